"""Training and generation take turns on one device: FSDP2 trains, a session serves the weights.

`torchrun --nproc-per-node 2 examples/trainers/turns.py` prints for each turn the loss, an answer,
and bytes of symmetric memory: of the trainer and the engine in training, and of both while it serves:

    loss 0.065, answer 0.858 66560 0 0 34304
    loss 0.015, answer 0.952 66560 0 0 34304
    loss 0.009, answer 0.975 66560 0 0 34304
    loss 0.005, answer 0.985 66560 0 0 34304
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
first = nn.Linear(64, 128, bias=False, device=device)
second = nn.Linear(128, 1, bias=False, device=device)
model = fully_shard(nn.Sequential(fully_shard(first), nn.GELU(), fully_shard(second)))
trainer = symmplan.fsdp.apply(model, choose="placed")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
prompts = torch.randn(world, 16, 64, device=device)


def train() -> float:
    """Three steps on this rank's batch."""
    for _ in range(3):
        loss = (model(prompts[rank]) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


@torch.no_grad()
def generate() -> float:
    """By a tensor-parallel engine: each rank has a part of the hidden layer."""
    up = first.weight.full_tensor().chunk(world, 0)[rank]
    down = second.weight.full_tensor().chunk(world, 1)[rank]
    answers = []
    for prompt in prompts:
        y = symmplan.placed.out(torch.mm, nn.functional.gelu(prompt @ up.T), down.T)
        dist.all_reduce(y)
        answers.append(float(y.mean()))
    return sum(answers) / world


with symmplan.eager(choose="placed", device=device) as engine:
    for turn in range(4):
        loss = train()
        trains = trainer.stats.segment_bytes, engine.stats.segment_bytes
        trainer.sleep()
        answer = generate()
        engine.step()  # in the first turn it is planned here
        serves = trainer.stats.segment_bytes, engine.stats.segment_bytes
        engine.sleep()
        if rank == 0:
            print(f"loss {loss:.3f}, answer {answer:.3f}", *trains, *serves)
trainer.remove()
dist.destroy_process_group()
