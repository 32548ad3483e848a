"""The models that ``symmplan bench fsdp`` trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Llama", "mlp", "parts"]


def mlp(layers: int, dim: int) -> nn.Module:
    """``layers`` blocks of two linear layers, ``dim`` wide."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.Tanh(), nn.Linear(4 * dim, dim))
            for _ in range(layers)
        )
    )


class _Attention(nn.Module):
    """Causal attention with four query heads for each key and value head."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = max(4, dim // 128)
        self.width = dim // self.heads
        shared = self.heads // 4 * self.width
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, shared, bias=False)
        self.value = nn.Linear(dim, shared, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, self.width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            _turned(query, turn), _turned(key, turn), value, is_causal=True, enable_gqa=True
        )
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return result


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding; ``turn`` has the cosines and sines, ``(2, length, width / 2)``."""
    even, odd = x.chunk(2, -1)
    cos, sin = turn
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


class _Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = dim * 7 // 2
        self.before = nn.RMSNorm(dim)
        self.attention = _Attention(dim)
        self.between = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), turn)
        y = self.between(x)
        result: torch.Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """The layers of a Llama without its embeddings: ``(batch, length, dim)`` to the same.

    Args:
        layers: How many.
        dim: Their width; 4096 for the layers of Llama 3 8B, whose other sizes follow from it.
    """

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.width = dim // max(4, dim // 128)
        self._turns: dict[Any, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers on ``(batch, length, dim)``."""
        turn = self._turn(x)
        for layer in self.layers:
            x = layer(x, turn)
        result: torch.Tensor = self.norm(x)
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
    return list(model.layers if isinstance(model, Llama) else model.children())
