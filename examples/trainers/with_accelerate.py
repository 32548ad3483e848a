"""Hugging Face Accelerate with its FSDP2 plugin: one line after `prepare`.

`torchrun --nproc-per-node 2 examples/trainers/with_accelerate.py`, on two GPUs, prints

    alone    0.942 0.722 0.494 0.115 0.189 0.367 | evaluated 0.462 0.138 0.147
    symmplan 0.942 0.722 0.494 0.115 0.189 0.367 | evaluated 0.462 0.138 0.147
    {... 'symmplan/plain': 0, ... 'symmplan/flat': 0, 'symmplan/algorithms/symmetric': ...}
    resumed  0.189 0.367 | evaluated 0.147
    {... 'symmplan/plain': 0, ... 'symmplan/flat': 0, 'symmplan/algorithms/symmetric': ...}
"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import symmplan
from symmplan.trainers import watched


class Block(nn.Sequential):
    """What Accelerate shards by itself, as the plugin says."""


def train(name: str, *, planned: bool, resume: bool) -> None:
    """Six steps; evaluated after every second, saved after the fourth."""
    torch.manual_seed(0)
    blocks = (Block(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
    model = nn.Sequential(*blocks, nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(96, 64)), batch_size=8)
    held_out, losses, evaluated = torch.randn(8, 64), [], []
    by = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **by))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = symmplan.fsdp.apply(model) if planned else None  # the one line
    if resume:
        accelerator.load_state("with_accelerate")
        loader = accelerator.skip_first_batches(loader, 4)
    for step, (x,) in enumerate(loader, 5 if resume else 1):
        loss = (model(x) - 1).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.3f}")
        if step % 2 == 0:
            with torch.no_grad():
                evaluated.append(f"{(model(held_out.to(x.device)) - 1).square().mean().item():.3f}")
        if step == 4:
            accelerator.save_state("with_accelerate")
    accelerator.print(f"{name:<8}", *losses, "| evaluated", *evaluated)
    if handle is not None:
        accelerator.print(watched(handle))
        handle.remove()


for name in ("alone", "symmplan", "resumed"):
    train(name, planned=name != "alone", resume=name == "resumed")
torch.distributed.destroy_process_group()
