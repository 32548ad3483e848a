"""Hugging Face Accelerate with its FSDP2 plugin: one line after `prepare`.

`torchrun --nproc-per-node 2 examples/trainers/with_accelerate.py`, on two GPUs, prints

    alone    0.94 0.72 0.49 0.11
    symmplan 0.94 0.72 0.49 0.11
    plan ...: 14 buffers in 1 segment, 42 operations, ...
"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import symmplan


class Block(nn.Module):
    """What Accelerate shards by itself, as the plugin says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: rows x 64, in and out."""
        return nn.functional.gelu(self.linear(x))


def train(name: str, *, planned: bool) -> None:
    """Four steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8)
    wrap = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
    }
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **wrap))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = symmplan.fsdp.apply(model) if planned else None  # the one line
    losses = []
    for (x,) in loader:
        loss = (model(x) - 1).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.2f}")
    accelerator.print(f"{name:<8}", *losses)
    if handle is not None:
        accelerator.print(handle.plan.summary())
        handle.remove()


train("alone", planned=False)
train("symmplan", planned=True)
torch.distributed.destroy_process_group()
