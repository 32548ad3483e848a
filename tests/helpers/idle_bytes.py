"""How much lower a device's peak would be if idle symmetric bytes held ordinary tensors.

    PYTHONPATH=.:tests/helpers python tests/helpers/idle_bytes.py [--json]

Simulates training programs. At each moment of a step the bytes of a segment in which no buffer
lives are idle. The bound lets ordinary tensors have all of them, in any pieces, at any time, so no
allocator can do better: the peak is then that of ordinary bytes and live buffers. It is printed
for the plans that are made by default, and for those whose bytes are not limited. Those place more
collectives, and lending would have to keep them at the peak without symmplan.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import symmplan
from symmplan.bench.parts.llama import Llama
from symmplan.model import PUSHES
from symmplan.report.format import size, table
from symmplan.simulation import run

_LAYERS, _DIM, _TOKENS = 12, 4096, 4096


def llama(*, wide=False, optimizer=False, recomputed=False, replicas=1, capacity=None):
    """Two steps of FSDP2 on layers of Llama 3 8B."""
    world = dist.get_world_size()
    shape = (world,) if replicas == 1 else (replicas, world // replicas)
    names = None if replicas == 1 else ("replicate", "shard")
    b16 = torch.bfloat16
    policy = MixedPrecisionPolicy(b16, torch.float32) if wide else MixedPrecisionPolicy()
    options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names), "mp_policy": policy}
    with torch.device("meta"):
        model = Llama(_LAYERS, _DIM).to(torch.float32 if wide else b16)
    for layer in model.layers:
        if recomputed:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu")
    symmplan.fsdp.apply(model, capacity=capacity)
    adam = torch.optim.AdamW(model.parameters(), foreach=False) if optimizer else None
    for _ in range(2):
        model(torch.randn(1, _TOKENS, _DIM, dtype=b16)).float().square().mean().backward()
        if adam is not None:
            adam.step()
        model.zero_grad()


def large(mesh, *, capacity=None):
    """Llama 3.1 405B, as `examples/simulate_llama.py` trains it."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import simulate_llama

    os.environ |= {"LLAMA": "405B", "MESH": mesh}
    apply = symmplan.fsdp.apply
    symmplan.fsdp.apply = functools.partial(apply, capacity=capacity)
    try:
        simulate_llama.train()
    finally:
        symmplan.fsdp.apply = apply


PROGRAMS = {
    "2 ranks": (llama, {}, 2),
    "64 ranks": (llama, {}, 64),
    "64 ranks, fp32 reductions": (llama, {"wide": True}, 64),
    "2 ranks, AdamW": (llama, {"optimizer": True}, 2),
    "64 ranks, AdamW": (llama, {"optimizer": True}, 64),
    "64 ranks, fp32 reductions, AdamW": (llama, {"wide": True, "optimizer": True}, 64),
    "2 ranks, checkpointed": (llama, {"recomputed": True}, 2),
    "64 ranks, checkpointed": (llama, {"recomputed": True}, 64),
    "HSDP 8 x 8": (llama, {"replicas": 8}, 64),
    "405B, 512 x 8": (large, {"mesh": "1,512,8"}, 4096),
    "405B, 8 x 64 x 8": (large, {"mesh": "8,64,8"}, 4096),
}


def lent(world, plans, storages, report):
    """The peak if each idle symmetric byte could hold an ordinary one, in bytes."""
    pushed = (made for planner, key, made in world.held if planner.algorithm(key) in PUSHES)
    held = {storage for made in pushed for storage in made}
    places = [
        {name.partition(".")[2] or name: p.nbytes for name, p in plan.placements.items()}
        for plan in plans
    ]
    owner = {
        id(s): (number, key)
        for number, planner in enumerate(world.planners)
        for of, key, s in world.buffers
        if of is planner and s.kind == "placed"
    }
    live, ordinary, most = Counter(), report.ordinary_bytes.optimizer, 0
    for index, (storage, change, _) in enumerate(storages._changes):
        kind = "activations" if storage in held else storage.kind
        if id(storage) in owner and kind == "placed":
            live[owner[id(storage)]] += change
        elif kind in ("parameters", "gradients", "activations"):
            ordinary += change
        if index >= storages._begin:
            most = max(most, ordinary + _occupied(live, places, report.peak_bytes))
    return most


def _occupied(live, places, segments):
    """Bytes of the placements whose buffers live; a module's gather has one."""
    found = {}
    for (number, key), nbytes in live.items():
        if nbytes:
            of = places[number]
            name = f"{'backward' if key.of_backward else 'forward'}.{key.site}.{key.kind}"
            slots = [n for slot, n in of.items() if slot.startswith("slot")]
            found[number, key.site, key.kind] = of.get(name, max(slots, default=0))
    return min(segments, sum(found.values()))


def bound_of(program, ranks, **options):
    """A program's report, what `lent` says of it, and its tensors' peak without symmplan."""
    found = []
    make = run._report

    def report(world, others, plans, storages):
        made = make(world, others, plans, storages)
        found.append((lent(world, plans, storages, made), storages.most_without()))
        return made

    run._report = report
    try:
        made = symmplan.simulate(functools.partial(program, **options), ranks=ranks)
    finally:
        run._report = make
    return made, *found[0]


def tensors_of(report):
    """Bytes of tensors and segments at their peak."""
    return report.peak_bytes + report.ordinary_bytes.total


def rows(names):
    """What there is to print of programs."""
    for name in names:
        program, options, ranks = PROGRAMS[name]
        for capacity in (None, "1 TiB"):
            report, least, without = bound_of(program, ranks, **options, capacity=capacity)
            placed = sum(c.count for c in report.collectives if c.algorithm != "ordinary")
            yield {
                "program": name,
                "plan": "default" if capacity is None else "not limited",
                "placed": placed,
                "symmetric": report.peak_bytes,
                "without": without,
                "device": tensors_of(report),
                "lent": least,
            }


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="all by default")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = list(rows(options.programs or PROGRAMS))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    lines = [("program", "plan", "placed", "symmetric", "without", "device", "lent at best", "")]
    for row in found:
        sizes = [size(row[name]) for name in ("symmetric", "without", "device", "lent")]
        gain = f"{1 - row['lent'] / row['device']:.1%}"
        lines.append((row["program"], row["plan"], f"{row['placed']:,}", *sizes, gain))
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
