"""Sequence-parallel Llama blocks through DTensor, and what compiles and judges them."""

from __future__ import annotations

import random
import time

import torch
from torch import nn

from symmplan.bench.parts.llama import Block


def blocks(mesh, dim, *, layers=2, width=32, device="cpu", dtype=torch.float32):
    """Blocks whose tokens are sharded along a dimension between their products."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    made = (Block(width, heads=4, shared=1, hidden=3 * width) for _ in range(layers))
    model = nn.Sequential(*made).to(device, dtype)
    rows = Shard(dim)
    to_all = {"input_layouts": (rows,), "desired_input_layouts": (Replicate(),)}
    for block in model:
        styles = {
            "attention_norm": SequenceParallel(sequence_dim=dim),
            "attention": PrepareModuleInput(**to_all),
            **{f"attention.{n}": ColwiseParallel() for n in "qkv"},
            "attention.o": RowwiseParallel(output_layouts=rows),
            "mlp_norm": SequenceParallel(sequence_dim=dim),
            "mlp": PrepareModuleInput(**to_all),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=rows),
        }
        parallelize_module(block, mesh, styles)
    return model


def shards(rank, world, dim, step, *, batch=2, rows=6, width=32):
    """This rank's tokens of a step: ``(rows, width)``, or of a batch."""
    shape = [world * rows, width] if dim == 0 else [batch, world * rows, width]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(step))
    return whole.chunk(world, dim)[rank].contiguous()


def late(rank, step):
    """Some ranks are late in some steps."""
    time.sleep(random.Random(f"{rank} {step}").choice((0.0, 0.0, 0.02)))


def trained(model, run, x):
    """``(loss, output, gradients)`` of one step."""
    x = x.clone().requires_grad_()
    result = run(x)
    loss = result.float().square().mean()
    loss.backward()
    gradients = [
        p.grad.to_local().clone() if hasattr(p.grad, "to_local") else p.grad.clone()
        for p in model.parameters()
    ]
    model.zero_grad()
    return loss.detach(), result.detach(), [x.grad, *gradients]
