"""HSDP: two replicas of a model, each sharded over two ranks, with accumulated, clipped gradients.

`torchrun --nproc-per-node 4 examples/trainers/hsdp.py`, on GPUs if there are enough, prints

    alone    0.79 0.54 0.21 0.08
    symmplan 0.79 0.54 0.21 0.08
    plan ...: 18 buffers in 1 segment, ...
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import symmplan

device = torch.device("cuda" if torch.cuda.device_count() >= 4 else "cpu")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if device.type == "cuda" else -1)


def train(name: str, *, planned: bool) -> None:
    """Four steps of two micro-batches; gradients are reduced, and replicas meet, in the second."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(64, 1)).to(device)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    handle = symmplan.fsdp.apply(model) if planned else None  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        torch.manual_seed(100 * step + dist.get_rank())
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            loss = (model(torch.randn(16, 64).to(device)) - 1).square().mean()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.2f}")
    if dist.get_rank() == 0:
        print(f"{name:<8}", *losses, *([f"\n{handle.plan.summary()}"] if handle else []))
    if handle is not None:
        handle.remove()


dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = dist.init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
train("alone", planned=False)
train("symmplan", planned=True)
dist.destroy_process_group()
