"""A tensor-parallel Llama that decodes a token of each sequence: `decoder`, small."""

from __future__ import annotations

import torch
from decoder import Decoder, Shape

DIM, LENGTH = 64, 12


def decoder(mesh, most, *, device="cpu", dtype=torch.float32):
    """A decoder of up to ``most`` sequences, its layers sharded over a mesh."""
    shape = Shape(dim=DIM, heads=8, hidden=4 * DIM, layers=2, length=LENGTH)
    return Decoder(shape, most, mesh, device=device, dtype=dtype)


def tokens(count, step, **how):
    """What all ranks decode in a step."""
    generator = torch.Generator().manual_seed(1000 * step + count)
    return torch.randn(count, DIM, generator=generator).to(**how)


def forget(model):
    """Empty the caches."""
    for layer in model.layers:
        layer.keys.zero_()
        layer.values.zero_()
