"""FSDP2 with Muon: each rank orthogonalizes some of the matrices, dealt out by all-to-all.

`torchrun --nproc-per-node 2 examples/trainers/muon.py` prints losses, and the bytes of segments:
the session around the optimizer lies in those of FSDP2

    1.0001 0 32768
    0.9998 49152 0
    0.9995 49152 0
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import symmplan

cuda = torch.cuda.device_count() >= 2
dist.init_process_group("nccl" if cuda else "gloo")
torch.cuda.set_device(dist.get_node_local_rank() if cuda else -1)
device, world, rank = "cuda" if cuda else "cpu", dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 64, bias=False, device=device), nn.GELU()) for _ in range(5)]
model = fully_shard(nn.Sequential(*map(fully_shard, layers)))
handle = symmplan.fsdp.apply(model, choose="placed")
batch = torch.randn(world, 16, 64, device=device)
momenta = {p: torch.zeros_like(p.to_local()) for p in model.parameters()}


@torch.no_grad()
def update(parameters: list[nn.Parameter]) -> None:
    """At most one matrix for each rank, which makes it whole and deals the rows of its update."""
    shards = [momenta[p].mul_(0.95).add_(p.grad.to_local()) for p in parameters]
    shards += [torch.zeros_like(shards[0])] * (world - len(shards))
    mine, back = (torch.empty(world, *shards[0].shape, device=device) for _ in range(2))
    dist.all_to_all_single(mine, symmplan.placed.out(torch.stack, shards))
    x = mine.flatten(0, 1) / (mine.norm() + 1e-7)
    for addmm in (*[torch.addmm] * 4, partial(symmplan.placed.out, torch.addmm)):
        gram = x @ x.T  # Newton-Schulz: singular values of about 1
        x = addmm(x, -4.7750 * gram + 2.0315 * gram @ gram, x, beta=3.4445)
    dist.all_to_all_single(back, x.view_as(mine))
    for p, change in zip(parameters, back, strict=False):
        p.to_local().sub_(change, alpha=0.02)


with symmplan.eager(choose="placed", device=device) as session:
    for _ in range(3):
        loss = (model(batch[rank]) - 1).square().mean()
        loss.backward()
        weights = list(model.parameters())
        for first in range(0, len(weights), world):
            update(weights[first : first + world])
        model.zero_grad()
        session.step()
        if rank == 0:
            print(f"{loss.item():.4f}", handle.stats.segment_bytes, session.stats.segment_bytes)
handle.remove()
dist.destroy_process_group()
