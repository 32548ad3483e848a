"""Training and generation take turns on one device: FSDP2 trains, a session serves the weights.

`torchrun --nproc-per-node 2 examples/trainers/turns.py` prints losses, answers and segments' bytes

    0.065 66560 0 0.919 0 34048
    0.015 66560 0 0.997 0 34048
    0.009 66560 0 1.004 0 34048
"""

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
first, second = (nn.Linear(*s, bias=False, device=device) for s in ((64, 128), (128, 1)))
model = fully_shard(nn.Sequential(fully_shard(first), nn.GELU(), fully_shard(second)))
trainer = symmplan.fsdp.apply(model, choose="placed")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
prompts = torch.randn(world, 16, 64, device=device)


def train() -> float:
    """Three steps."""
    for _ in range(3):
        loss = (model(prompts[rank]) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def generate() -> float:
    """By a tensor-parallel engine: each rank has a part of the hidden layer."""
    whole = (layer.weight.full_tensor() for layer in (first, second))
    up, down = (weight.chunk(world, dim)[rank] for dim, weight in enumerate(whole))
    y = symmplan.placed.out(torch.mm, nn.functional.gelu(prompts[0] @ up.T), down.T)
    dist.all_reduce(y)
    return y.mean().item()


with symmplan.eager(choose="placed", device=device) as engine:
    for _ in range(3):
        said = [f"{train():.3f}", *(has.stats.segment_bytes for has in (trainer, engine))]
        trainer.sleep()
        said.append(f"{generate():.3f}")
        engine.step()  # in the first turn it is planned here
        said += [has.stats.segment_bytes for has in (trainer, engine)]
        engine.sleep()
        if rank == 0:
            print(*said)
trainer.remove()
dist.destroy_process_group()
