"""A pipeline of four stages on two pairs of ranks, interleaved, each stage under FSDP2.

`torchrun --nproc-per-node 4 examples/trainers/pipeline.py`, on GPUs if there are enough, prints

    alone    0.99 0.95 0.89 0.77
    symmplan 0.99 0.95 0.89 0.77
    stage 1: 36 served, 0 plain
    stage 3: 36 served, 0 plain
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import symmplan

device = torch.device("cuda" if torch.cuda.device_count() >= 4 else "cpu")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if device.type == "cuda" else -1)


def train(name: str, *, planned: bool) -> None:
    """Four steps. Each stage has its plan, agreed by the ranks that run it."""
    pp, stages, means = mesh.get_local_rank("pp"), [], []
    for index in range(pp, 4, 2):
        torch.manual_seed(index)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)]
        part = nn.Sequential(*blocks).to(device)
        for module in (*blocks, part):
            fully_shard(module, mesh=mesh["dp"])
        stages.append(PipelineStage(part, index, 4, device, group=mesh.get_group("pp")))
    handles = [symmplan.fsdp.apply(s.submod) for s in stages] if planned else []  # the one line
    optimizer = torch.optim.AdamW([p for s in stages for p in s.submod.parameters()], lr=1e-2)
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    for step in range(4):
        torch.manual_seed(100 * step + mesh.get_local_rank("dp"))
        data, losses = torch.randn(32, 64).to(device), []
        if pp == 0:
            schedule.step(data)
        else:
            schedule.step(target=torch.ones_like(data), losses=losses)
            means.append(f"{torch.stack(losses).mean().item():.2f}")
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == dist.get_world_size() - 1:
        print(f"{name:<8}", *means)
        for stage, stats in zip(stages, [h.stats for h in handles], strict=False):
            print(f"stage {stage.stage_index}: {stats.served} served, {stats.plain} plain")
    for handle in handles:
        handle.remove()


dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = dist.init_device_mesh(device.type, (2, 2), mesh_dim_names=("pp", "dp"))
train("alone", planned=False)
train("symmplan", planned=True)
dist.destroy_process_group()
