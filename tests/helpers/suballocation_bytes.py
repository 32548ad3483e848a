"""Bytes of all segments of FSDP2 with compiled tensor parallelism, with and without suballocations.

    PYTHONPATH=.:tests/helpers python tests/helpers/suballocation_bytes.py

Four CPU ranks, the blocks of ``examples/fsdp_and_tensor_parallel.py``.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import symmplan
from symmplan.integrate.fsdp.plans import Planning

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp_and_tensor_parallel.py"
WIDTH, BLOCKS = 256, 4
STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def train(rank, store, tokens, apart):
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.WIDTH = WIDTH
    if apart:
        Planning._tenants = lambda *_: {}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = example.Model()
    backend = symmplan.backend(inner="eager", timeout=60.0)
    model.blocks = torch.nn.ModuleList(example.Block() for _ in range(BLOCKS))
    for i, block in enumerate(model.blocks):
        parallelize_module(block, mesh["tp"], STYLES)
        model.blocks[i] = torch.compile(block, backend=backend, fullgraph=True)
        fully_shard(model.blocks[i], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    symmplan.fsdp.apply(model)
    for _ in range(3):
        model(torch.randint(0, 4096, (tokens,))).sum().backward()
    if rank == 0:
        how = "apart" if apart else "suballocated"
        print(tokens, how, sum(s.nbytes for s in symmplan.segments()), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for tokens in (512, 2048):
        for apart in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(train, (f"{folder}/store", tokens, apart), nprocs=4)
