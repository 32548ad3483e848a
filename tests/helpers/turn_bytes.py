"""Bytes of all segments of FSDP2 with optimizers that gather, with and without turns.

    PYTHONPATH=.:tests/helpers python tests/helpers/turn_bytes.py

Two CPU ranks, four blocks of width 256 under FSDP2, an update by whole gradients in a session.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp_models import Net, shard
from gathering_optimizers import Gathering

import symmplan
from symmplan.integrate.eager.turns import Turns


def train(rank, store, style, apart):
    if apart:
        Turns.place = lambda *_, **__: None
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = shard(Net(blocks=4, dim=256))
    symmplan.fsdp.apply(model, choose="placed")
    optimizer = Gathering(model.parameters(), style, dist.group.WORLD, holds=style == "all-to-all")
    with symmplan.eager(choose="placed") as session:
        for _ in range(3):
            model(torch.ones(4, 256)).sum().backward()
            optimizer.step()
            session.step()
        held, plan = sum(s.nbytes for s in symmplan.segments()), session.plan.peak_bytes
    if rank == 0:
        print(f"{style:12} {'apart' if apart else 'in turns':8} {held:10,} {plan:10,}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for style in ("in place", "all-to-all"):
        for apart in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(train, (f"{folder}/store", style, apart), nprocs=2)
