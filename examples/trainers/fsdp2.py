"""FSDP2 with compiled blocks, half precision, a gradient scaler, and a checkpoint to resume from.

`torchrun --nproc-per-node 2 examples/trainers/fsdp2.py`, on GPUs if there are enough, prints

    alone    0.94 0.92 0.89 0.87 0.85 0.82
    symmplan 0.94 0.92 0.89 0.87 0.85 0.82
    resumed  0.87 0.85 0.82
    plan ...: 14 buffers in 1 segment, ...
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import symmplan

device = torch.device("cuda" if torch.cuda.device_count() >= 2 else "cpu")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if device.type == "cuda" else -1)


def train(name: str, *, planned: bool = True, first: int = 0) -> None:
    """Steps from ``first`` to 6; before step 3 the state is written, or read."""
    torch.manual_seed(0)
    blocks = [torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU())) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(64, 1)).to(device)
    for module in (*blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    handle = symmplan.fsdp.apply(model) if planned else None  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler, losses = torch.amp.GradScaler(device.type, init_scale=2.0**10), []
    for step in range(first, 6):
        if step == 3 and planned:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "moments": moments, "scaler": scaler.state_dict()}
            (dcp.load if first else dcp.save)(state, checkpoint_id="checkpoint")
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            scaler.load_state_dict(state["scaler"])
        torch.manual_seed(100 * step + dist.get_rank())
        loss = (model(torch.randn(16, 64).to(device)).float() - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.2f}")
    if dist.get_rank() == 0:
        print(f"{name:<8}", *losses, *([f"\n{handle.plan.summary()}"] if first else []))
    if planned:
        handle.remove()


dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
train("alone", planned=False)
train("symmplan")
train("resumed", first=3)
dist.destroy_process_group()
