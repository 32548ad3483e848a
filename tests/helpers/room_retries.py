"""How often torch's allocator retries in a step on a device that is nearly full, simulated.

    PYTHONPATH=.:tests/helpers python tests/helpers/room_retries.py 24 22 20 18 17

For each room, in GiB, the retries of one step of 12 layers of Llama 3 8B with 4,096 tokens and a
vocabulary of 32,768: of FSDP2, of the plan in which all pushes have slots of their own, of one in
which some have, and of the one in which all share bytes with gathers. `symmplan bench fsdp --room`
counts them on devices.
"""

from __future__ import annotations

import argparse
import functools
from unittest import mock

from llama_steps import steps

import symmplan
from symmplan.coordination.world import current
from symmplan.device.allocator import CachingAllocator
from symmplan.model import PUSHES
from symmplan.report.format import table
from symmplan.simulation import run
from symmplan.simulation.memory import Cached

GiB, MiB = 1 << 30, 1 << 20
#: What the program's communicators and modules of kernels take of a device, and symmplan's.
BESIDE, OURS = 150 * MiB, 84 * MiB
WORDS = 32768
PLANS = {"slots": None, "some slots": "1.46GiB", "shared": "1.2GiB"}
STEPS = 4


def program(capacity, ends):
    """Some steps; ``ends`` gets how many changes of storages there were at the end of each."""
    for _ in steps(STEPS, WORDS, capacity=capacity):
        ends.append(len(current().seen.__self__._changes))


def retries(changes, ends, limit):
    """Retries of the last step of a program that ended its steps at ``ends``; None if it is full.

    Args:
        changes: ``(storage, change of its bytes, stream)``, in their order.
        ends: How many of them there were at the end of each step.
        limit: Bytes of the device.
    """
    allocator, before = CachingAllocator(limit), 0
    cached = Cached(allocator=allocator)
    try:
        for index, change in changes:
            if index < ends[-2]:
                before = allocator.retries
            cached.change(*change)
    except MemoryError:
        return None
    return allocator.retries - before


def simulated(capacity):
    """``(bytes of the plan, changes of FSDP2's program, of the planned one, ends of steps)``."""
    ends, found, make = [], [], run._report

    def report(world, others, plans, storages):
        made = make(world, others, plans, storages)
        pushed = (kept for planner, key, kept in world.held if planner.algorithm(key) in PUSHES)
        held = {storage for kept in pushed for storage in kept}
        changes = [*enumerate(storages._changes)]
        ours = ("segment", "held", "placed")
        plain = [c for c in changes if c[1][0].kind not in ours[:2]]
        planned = [c for c in changes if c[1][0] in held or c[1][0].kind not in ours]
        found[:] = [plain, planned]
        return made

    with mock.patch.object(run, "_report", report):
        made = symmplan.simulate(functools.partial(program, capacity, ends), ranks=2, memory="nccl")
    return made.peak_bytes, *found, ends


def rows(rooms):
    """What there is to print of rooms in GiB."""
    found = {name: simulated(capacity) for name, capacity in PLANS.items()}
    for room in rooms:
        limit = int(room * GiB) - BESIDE
        _, plain, _, ends = found["slots"]
        row = {"room": room, "FSDP2": retries(plain, ends, limit)}
        for name, (nbytes, _, planned, ends) in found.items():
            row[name] = retries(planned, ends, limit - nbytes - OURS)
        yield row


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rooms", nargs="+", type=float, metavar="GIB")
    lines = [("GiB free", "FSDP2", *PLANS)]
    for row in rows(parser.parse_args().rooms):
        lines += [tuple("does not fit" if v is None else f"{v:g}" for v in row.values())]
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
