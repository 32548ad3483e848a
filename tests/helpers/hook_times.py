"""What it saves the host that FSDP2's hooks are kept from Dynamo once, not anew in each call.

    PYTHONPATH=.:tests/helpers python tests/helpers/hook_times.py

Twelve modules of seven small weights on two CPU ranks, so that the host takes nearly all of a step:
milliseconds of a planned step, medians of 200 steps with and 200 without, by turns.
"""

from __future__ import annotations

import statistics
import time

import torch
from ranks import RankPool

from symmplan.report.format import table

STEPS, MODULES, WEIGHTS = 400, 12, 7


class Block(torch.nn.Module):
    """Small weights, so that the host takes nearly all of a step."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ModuleList(
            torch.nn.Linear(16, 16, bias=False) for _ in range(WEIGHTS)
        )

    def forward(self, x):
        for weight in self.weights:
            x = x + weight(x).tanh()
        return x


def _timed(rank, world):
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule, fully_shard

    import symmplan
    from symmplan.torch_private import fsdp2_hooks

    torch.set_num_threads(1)
    mesh = dist.init_device_mesh("cpu", (world,))
    model = torch.nn.Sequential(*(Block() for _ in range(MODULES)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    handle = symmplan.fsdp.apply(model, choose="push")
    times, undo = {True: [], False: []}, handle._unwrap
    for number in range(STEPS + 10):
        once = number % 2 == 0
        while undo:
            undo.pop()()
        if once:
            sharded = (m for m in model.modules() if isinstance(m, FSDPModule))
            undo += map(fsdp2_hooks.wrap_once, sharded)
        dist.barrier()
        begin = time.perf_counter()
        model(torch.ones(4, 16)).sum().backward()
        times[once].append((time.perf_counter() - begin) * 1e3)
        model.zero_grad()
    handle.remove()
    return {once: statistics.median(each[5:]) for once, each in times.items()}


def main():
    """Print the table."""
    with RankPool(2, timeout=150) as pool:
        found = pool.run(_timed)
    slowest = {once: max(of[once] for of in found) for once in (False, True)}
    gain = f"{slowest[False] / slowest[True]:.3f}x"
    rows = [("in each call, ms", "once, ms", ""), (*(f"{ms:.2f}" for ms in slowest.values()), gain)]
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
