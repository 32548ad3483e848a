"""The models that benchmarks train: layers of a Llama, and a plain stack of linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Block", "Llama", "mlp", "parts"]


def mlp(layers: int, dim: int) -> nn.Module:
    """``layers`` blocks of two linear layers, ``dim`` wide."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.Tanh(), nn.Linear(4 * dim, dim))
            for _ in range(layers)
        )
    )


class _Attention(nn.Module):
    """Causal attention with ``shared`` query heads for each key and value head."""

    def __init__(self, dim: int, heads: int, shared: int) -> None:
        super().__init__()
        self.head, self.grouped = dim // heads, shared > 1
        few = heads // shared * self.head
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, few, bias=False)
        self.v = nn.Linear(dim, few, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.view(-1, *x.shape[-2:]).shape[:2]  # also of a batch that has no dimension
        q, k, v = (
            layer(x).view(*rows, -1, self.head).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if turn is not None:
            q, k = _turned(q, turn), _turned(k, turn)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.grouped
        )
        result: torch.Tensor = self.o(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1))
        return result


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding; ``turn`` has the cosines and sines, ``(2, length, width / 2)``."""
    even, odd = x.chunk(2, -1)
    cos, sin = turn
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


class _Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """A layer of a Llama: ``(..., length, dim)``, in and out.

    Args:
        dim: Width.
        heads: Query heads.
        shared: How many of them share a key and value head.
        hidden: Width between the matrices of the feed-forward part.
    """

    def __init__(self, dim: int, *, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = _Attention(dim, heads, shared)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = _Mlp(dim, hidden)

    def forward(self, x: torch.Tensor, *turn: torch.Tensor) -> torch.Tensor:
        """Attention and feed-forward; ``turn`` embeds positions."""
        x = x + self.attention(self.attention_norm(x), *turn)
        result: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Llama(nn.Module):
    """The layers of a Llama: ``(batch, length, dim)`` to the same.

    With a vocabulary it has an embedding and a head, too: ``(batch, length)`` of tokens to
    ``(batch, length, vocabulary)``.

    Args:
        layers: How many.
        dim: Their width; 4096 for the layers of Llama 3 8B, whose other sizes follow from it.
        vocabulary: How many tokens there are; 0 for neither embedding nor head.
    """

    def __init__(self, layers: int, dim: int, vocabulary: int = 0) -> None:
        super().__init__()
        self.embedding: nn.Module | None = None
        self.head: nn.Module | None = None
        if vocabulary:
            self.embedding = nn.Embedding(vocabulary, dim)
            self.head = nn.Linear(dim, vocabulary, bias=False)
        heads = max(4, dim // 128)
        shape = {"heads": heads, "shared": 4, "hidden": dim * 7 // 2}
        self.layers = nn.ModuleList(Block(dim, **shape) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.width = dim // heads
        self._turns: dict[Any, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers."""
        if self.embedding is not None:
            x = self.embedding(x)
        turn = self._turn(x)
        for layer in self.layers:
            x = layer(x, turn)
        result: torch.Tensor = self.norm(x)
        if self.head is not None:
            result = self.head(result)
        return result

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        key = (x.shape[1], x.device, x.dtype)
        if key not in self._turns:
            place = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
            pair = torch.arange(self.width // 2, device=x.device, dtype=torch.float32)
            angle = place[:, None] / 500000.0 ** (2 * pair / self.width)
            self._turns[key] = torch.stack((angle.cos(), angle.sin())).to(x.dtype)
        return self._turns[key]


def parts(model: nn.Module) -> list[nn.Module]:
    """What of ``model`` becomes an FSDP module, beside itself."""
    if not isinstance(model, Llama):
        return list(model.children())
    found = [model.embedding, *model.layers, model.head]
    return [part for part in found if part is not None]
