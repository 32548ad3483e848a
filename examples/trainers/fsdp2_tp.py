"""FSDP2 over one dimension of a mesh, tensor parallelism of compiled blocks over the other.

`torchrun --nproc-per-node 4 examples/trainers/fsdp2_tp.py`, on GPUs if there are enough, prints

    alone    1.01 0.98 0.94 0.90
    symmplan 1.01 0.98 0.94 0.90
    ... bytes for FSDP2 and compiled graphs...
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import symmplan

device = torch.device("cuda" if torch.cuda.device_count() >= 4 else "cpu")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if device.type == "cuda" else -1)


def train(name: str, *, planned: bool) -> None:
    """Four steps; between the matrices of a block, features are split over the ranks."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    model = nn.Sequential(*blocks).to(device)
    for block in blocks:
        styles = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
        parallelize_module(block, mesh["tp"], dict(zip("02", styles, strict=True)))
        block.compile(backend=backend if planned else inner)  # one line
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    handle = symmplan.fsdp.apply(model) if planned else None  # the other
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(4):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = (model(torch.randn(16, 64).to(device)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.2f}")
    if dist.get_rank() == 0:
        held = [f"\n{s.nbytes} bytes for {' and '.join(s.users)}" for s in symmplan.segments()]
        print(f"{name:<8}", *losses, *held)
    if handle is not None:
        handle.remove()


dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = dist.init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
inner = "inductor" if device.type == "cuda" else "eager"
backend = symmplan.backend(inner=inner)
train("alone", planned=False)
train("symmplan", planned=True)
dist.barrier()
backend.release()
dist.destroy_process_group()
