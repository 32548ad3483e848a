"""Tensor-parallel inference of an MLP in ordinary eager PyTorch, on two ranks of this machine.

    python examples/eager.py

The first batch is recorded. The others run in planned symmetric memory. `symmplan.placed.out` lets
a matrix product write straight into the placement that the all-reduce reads.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import symmplan


def layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One MLP block: columns of ``up`` and rows of ``down`` live on different ranks."""
    hidden = torch.relu(x @ up)
    part = symmplan.placed.out(torch.mm, hidden, down)
    dist.all_reduce(part)
    return x + part


def infer(rank: int, world_size: int, store: str) -> None:
    """What every rank runs."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    full = [(torch.randn(64, 256) / 16, torch.randn(256, 64) / 16) for _ in range(3)]
    shards = [(u.chunk(world_size, 1)[rank], d.chunk(world_size, 0)[rank]) for u, d in full]
    batches = [torch.randn(8, 64) for _ in range(4)]
    with symmplan.eager(timeout=60.0) as session:
        for x in batches:
            y = x
            for up, down in shards:
                y = layer(y, up.contiguous(), down.contiguous())
            session.step()
            expected = x
            for up, down in full:
                expected = expected + torch.relu(expected @ up) @ down
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        if rank == 0:
            print(session.stats)
            print(session.plan.summary())
            for copy in session.copies:
                print(f"{copy.where} of {copy.op} is copied: {copy.reason}. {copy.fix}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(infer, args=(2, f"{directory}/store"), nprocs=2)
