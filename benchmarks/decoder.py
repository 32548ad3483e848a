"""A tensor-parallel Llama that decodes a token of each sequence, with caches of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Decoder", "Shape"]


@frozen
class Shape:
    """The sizes of a decoder.

    Attributes:
        dim: Width of its layers.
        heads: Of attention.
        hidden: Width between the matrices of the feed-forward part.
        layers: How many.
        length: Entries of the caches.
    """

    dim: int
    heads: int
    hidden: int
    layers: int
    length: int


class Decoder(nn.Module):
    """Layers that read and append to caches of ``(sequences, length, heads, dim / heads)``.

    Heads and matrices are shared out over the ranks; each layer sums twice over them.

    Args:
        shape: Its sizes.
        most: Sequences that it can decode at the same time.
        mesh: The ranks.
        how: ``device`` and ``dtype``.

    Collective: yes, where weights are sharded.
    """

    def __init__(self, shape: Shape, most: int, mesh: DeviceMesh, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = (_Layer(shape, most, shape.heads // mesh.size()) for _ in range(shape.layers))
        self.layers = nn.ModuleList(made)
        self.to(**how).eval()
        columns = [*(f"qkv.{i}" for i in range(3)), "gate", "up"]
        styles: Any = {**dict.fromkeys(columns, ColwiseParallel()), "o": RowwiseParallel()}
        for layer in self.layers:
            parallelize_module(layer, mesh, {**styles, "down": RowwiseParallel()})

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Decode one token of each sequence.

        Args:
            x: ``(tokens, dim)``.
            place: Which entry of the caches they are, ``(1,)``.
        """
        for layer in self.layers:
            x = layer(x, place)
        return x


class _Layer(nn.Module):
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, shape: Shape, most: int, heads: int) -> None:
        super().__init__()
        dim, hidden, self.head = shape.dim, shape.hidden, shape.dim // shape.heads
        self.norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(most, shape.length, heads, self.head))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        normed, tokens = self.norm(x), x.shape[0]
        q, k, v = (layer(normed).view(tokens, -1, self.head) for layer in self.qkv)
        rows = torch.arange(tokens, device=x.device)
        # Written whole, not by views: Inductor then copies no cache.
        self.keys[rows, place], self.values[rows, place] = k, v
        keys, values = (c[:tokens].transpose(1, 2) for c in (self.keys, self.values))
        seen = torch.arange(keys.shape[2], device=x.device) <= place
        mixed = functional.scaled_dot_product_attention(
            q.unsqueeze(2), keys, values, attn_mask=seen.view(1, 1, 1, -1)
        )
        x = x + self.o(mixed.reshape(tokens, -1))
        normed = self.mlp_norm(x)
        result: torch.Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result
