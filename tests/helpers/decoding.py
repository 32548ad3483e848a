"""A tensor-parallel Llama that decodes a token of each sequence, with caches of keys and values."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

DIM, HEADS, LAYERS, LENGTH = 64, 8, 2, 12


class Decoder(nn.Module):
    """Layers that read and append to a cache of ``(tokens, heads, LENGTH, width)``."""

    def __init__(self, most, heads, *, device="cpu", dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(_Layer(most, heads) for _ in range(LAYERS))
        self.to(device, dtype)

    def forward(self, x, place):
        for layer in self.layers:
            x = layer(x, place)
        return x


class _Layer(nn.Module):
    def __init__(self, most, heads):
        super().__init__()
        width = DIM // HEADS
        self.norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.o = nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = (nn.Linear(DIM, 4 * DIM, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * DIM, DIM, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(most, heads, LENGTH, width))

    def forward(self, x, place):
        """``x``: ``(tokens, DIM)``; ``place``: which entry of the cache they are, one number."""
        normed, tokens = self.norm(x), x.shape[0]
        q, k, v = (layer(normed).view(tokens, -1, 1, DIM // HEADS) for layer in self.qkv)
        self.keys[:tokens].index_copy_(2, place, k)
        self.values[:tokens].index_copy_(2, place, v)
        seen = torch.arange(LENGTH, device=x.device) <= place
        mixed = functional.scaled_dot_product_attention(
            q, self.keys[:tokens], self.values[:tokens], attn_mask=seen.view(1, 1, 1, LENGTH)
        )
        x = x + self.o(mixed.reshape(tokens, -1))
        normed = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def decoder(mesh, most, **how):
    """A decoder of up to ``most`` sequences, its layers sharded over a mesh."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = Decoder(most, HEADS // mesh.size(), **how).eval()
    columns = [*(f"qkv.{i}" for i in range(3)), "gate", "up"]
    styles = {**dict.fromkeys(columns, ColwiseParallel()), "o": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, {**styles, "down": RowwiseParallel()})
    return model


def tokens(count, step, **how):
    """What all ranks decode in a step."""
    generator = torch.Generator().manual_seed(1000 * step + count)
    return torch.randn(count, DIM, generator=generator).to(**how)


def forget(model):
    """Empty the caches."""
    for layer in model.layers:
        layer.keys.zero_()
        layer.values.zero_()
