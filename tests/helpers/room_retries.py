"""How often torch's allocator retries on a device that is nearly full, by replays.

    PYTHONPATH=.:tests/helpers python tests/helpers/room_retries.py 24 22 20 18 17

For each room, in GiB, the retries of three steps of 12 layers of Llama 3 8B with 4,096 tokens and a
vocabulary of 32,768: of FSDP2, of the plan in which all pushes have slots of their own, of one in
which some have, and of the one in which all share bytes with gathers; of this one also with
gradients on the program's stream. And whether the last plan is used there, and whether gradients
move. `symmplan bench fsdp --room` counts them on devices.
"""

from __future__ import annotations

import argparse
import functools
import math
from unittest import mock

from llama_steps import steps

import symmplan
from symmplan.integrate.fsdp.program_usage import ProgramUsage
from symmplan.memory.room import LEFT
from symmplan.report.format import table

GiB, MiB = 1 << 30, 1 << 20
#: What the program's communicators and modules of kernels take of a device, and symmplan's.
BESIDE, OURS = 150 * MiB, 86 * MiB
WORDS = 32768
#: The capacities of plans.
PLANS = {"slots": None, "some slots": "1.46GiB", "shared": "1.2GiB"}


def program(capacity):
    """Some steps of the model."""
    for _ in steps(3, WORDS, capacity=capacity):
        pass


def simulated(capacity):
    """``(bytes of the plan, what the allocator has for the recorded step)``."""
    known, had = [], ProgramUsage.had

    def note(usage, *args):
        had(usage, *args)
        known.append(usage._reserved)

    with mock.patch.object(ProgramUsage, "had", note):
        made = symmplan.simulate(functools.partial(program, capacity), ranks=2, memory="nccl")
    return made.peak_bytes, known[0]


def rows(rooms):
    """What there is to print of rooms in GiB."""
    plans = {name: simulated(capacity) for name, capacity in PLANS.items()}
    of = {"all_gather": "symmetric", "reduce_scatter": "push"}
    nbytes, reserved = plans["shared"]
    placed = [of[call.key.kind] for call in reserved._recording.collectives]
    for room in rooms:
        limit = int(room * GiB) - BESIDE
        row = {"room": room, "FSDP2": reserved.retries(["ordinary"] * len(placed), limit)}
        for name, (taken, known) in plans.items():
            row[name] = known.retries(placed, limit, plan=taken + OURS)
        given = placed, limit
        row["moved"] = reserved.retries(*given, plan=nbytes + OURS, moved=True)
        row["used"] = reserved.goes_on(*given, LEFT, plan=nbytes + OURS)[1]
        yield row | {"moves": reserved.gradients_move(*given, LEFT, plan=nbytes + OURS)}


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rooms", nargs="+", type=float, metavar="GIB")
    lines = [("GiB free", "FSDP2", *PLANS, "moved", "used", "moves")]
    for row in rows(parser.parse_args().rooms):
        *numbers, used, moves = row.values()
        numbers = ["does not fit" if n == math.inf else f"{n:g}" for n in numbers]
        lines.append((*numbers, *("yes" if found else "no" for found in (used, moves))))
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
