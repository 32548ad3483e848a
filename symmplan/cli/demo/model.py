"""The demo's model: a small transformer under tensor and sequence parallelism.

Every rank holds half of each weight matrix (tensor parallel) and half of the sequence between them
(sequence parallel), as in Megatron-LM. Each block gathers the sequence in front of a matrix, and
reduces and scatters it behind one; the backward pass does the opposite. The collectives are written
out as functional ones, so they are visible in the captured graph.

The loss is a cross entropy over a vocabulary that is split over the ranks. It needs the largest
logit over all ranks, which `peer_max` computes, an op declared with `symmplan.symm_args` that reads
its peers' memory by itself. In the model without symmplan its argument lies in ordinary memory, and
it falls back on a collective of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from attrs import frozen
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import symmplan

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Config", "Transformer", "peer_max", "sync_replicated"]


@frozen
class Config:
    """Sizes in elements; ``world`` ranks share heads, hidden units, sequence and vocabulary."""

    world: int = 2
    vocab: int = 256
    dim: int = 256
    heads: int = 8
    hidden: int = 1024
    blocks: int = 2
    seq: int = 256
    batch: int = 4


# handshake: nobody reads a peer before the barrier below, so before every rank has written its x.
# It has no barrier behind the reads (release is left out): the plan sees to it that nobody writes
# over x before all ranks have read it, for which the entry of a later collective is enough.
@symmplan.symm_args("x", group="group_name", align=64, handshake=True)
@torch.library.custom_op("symmplan_demo::peer_max", mutates_args=())
def peer_max(x: Tensor, group_name: str) -> Tensor:
    """The elementwise maximum of ``x`` over the ranks of a group.

    Collective: yes.
    """
    try:
        placed = symmplan.handle(x, group_name)
    except symmplan.errors.RunError:  # not placed: this is the model without symmplan
        top = torch.ops._c10d_functional.all_reduce(x, "max", group_name)
        return torch.ops._c10d_functional.wait_tensor(top)  # type: ignore[no-any-return]
    placed.barrier()
    top = placed.peer(0).clone()
    for rank in range(1, placed.world_size):
        torch.maximum(top, placed.peer(rank), out=top)
    return top


@peer_max.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    del group_name
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _Gather(torch.autograd.Function):
    """All-gather the sequence; the gradient is reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, world: int, group: str) -> Tensor:
        ctx.world, ctx.group = world, group
        return _all_gather(shard, world, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad, ctx.world, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    """Sum over the ranks and scatter the sequence; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, world: int, group: str) -> Tensor:
        ctx.world, ctx.group = world, group
        return _reduce_scatter(partial, world, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.world, ctx.group), None, None


class _Sum(torch.autograd.Function):
    """Sum over the ranks.

    Every rank goes on to compute the same loss from the sum, so its gradient is already complete.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: str) -> Tensor:
        del ctx
        total = torch.ops._c10d_functional.all_reduce(partial.contiguous(), "sum", group)
        return torch.ops._c10d_functional.wait_tensor(total)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad, None


def _all_gather(shard: Tensor, world: int, group: str) -> Tensor:
    whole = torch.ops._c10d_functional.all_gather_into_tensor(shard.contiguous(), world, group)
    return torch.ops._c10d_functional.wait_tensor(whole)  # type: ignore[no-any-return]


def _reduce_scatter(whole: Tensor, world: int, group: str) -> Tensor:
    shard = torch.ops._c10d_functional.reduce_scatter_tensor(
        whole.contiguous(), "sum", world, group
    )
    return torch.ops._c10d_functional.wait_tensor(shard)  # type: ignore[no-any-return]


# What `apply` returns is untyped.
_gather: Callable[[Tensor, int, str], Tensor] = _Gather.apply
_scatter: Callable[[Tensor, int, str], Tensor] = _Scatter.apply
_sum: Callable[[Tensor, str], Tensor] = _Sum.apply


class _Block(nn.Module):
    """Attention and MLP on half the heads and half the hidden units."""

    def __init__(self, config: Config, group: str) -> None:
        super().__init__()
        self.config, self.group = config, group
        width = config.dim // config.world
        hidden = config.hidden // config.world
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * width, bias=False)
        self.proj = nn.Linear(width, config.dim, bias=False)
        self.up = nn.Linear(config.dim, hidden, bias=False)
        self.down = nn.Linear(hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._parallel(self._attention, self.norm1(x))
        return x + self._parallel(self._mlp, self.norm2(x))

    def _parallel(self, inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        world, group = self.config.world, self.group
        return _scatter(inner(_gather(x, world, group)), world, group)

    def _attention(self, x: Tensor) -> Tensor:
        seq, batch, _ = x.shape
        heads = self.config.heads // self.config.world
        q, k, v = self.qkv(x).view(seq, batch, 3, heads, -1).permute(2, 1, 3, 0, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast("Tensor", self.proj(out.permute(2, 0, 1, 3).reshape(seq, batch, -1)))

    def _mlp(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.down(F.gelu(self.up(x))))


class Transformer(nn.Module):
    """A language model over bytes; returns the mean cross entropy of the next byte."""

    def __init__(self, config: Config, rank: int, group: str) -> None:
        super().__init__()
        self.config, self.rank, self.group = config, rank, group
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.places = nn.Embedding(config.seq, config.dim)
        self.blocks = nn.ModuleList(_Block(config, group) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab // config.world, bias=False)
        # Split parameters differ between ranks, replicated ones do not.
        for index, (name, parameter) in enumerate(self.named_parameters()):
            split = not _replicated(name)
            generator = torch.Generator().manual_seed(2 * index + split * rank)
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05, generator=generator)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """``inputs`` and ``targets`` are (seq, batch) bytes, the same on all ranks."""
        world, length = self.config.world, self.config.seq // self.config.world
        begin = self.rank * length
        places = self.places.weight[begin : begin + length].unsqueeze(1)
        x = self.tokens(inputs[begin : begin + length]) + places
        for block in self.blocks:
            # Recomputed in the backward pass: gathered activations live only for a moment, so
            # their bytes can be shared.
            x = checkpoint(block, x, use_reentrant=False)
        whole = _gather(self.norm(x), world, self.group)
        return self._loss(self.head(whole), targets)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        width = logits.shape[-1]
        top = peer_max(logits.detach().amax(-1), self.group)
        logits = logits - top.unsqueeze(-1)
        local = targets - self.rank * width
        mine = (local >= 0) & (local < width)
        picked = logits.gather(-1, local.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
        partial = torch.stack([logits.exp().sum(-1), torch.where(mine, picked, 0.0)])
        total, target = _sum(partial, self.group)
        return cast("Tensor", (total.log() - target).mean())


def _replicated(name: str) -> bool:
    """Whether all ranks hold the same values of the parameter ``name``."""
    return any(part in name for part in ("tokens", "places", "norm"))


def sync_replicated(model: nn.Module, group: str) -> None:
    """Sum the gradients of replicated parameters, each of which saw half of the sequence.

    Collective: yes.
    """
    grads = [p.grad for n, p in model.named_parameters() if _replicated(n) and p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    flat = torch.ops._c10d_functional.all_reduce(flat, "sum", group)
    flat = torch.ops._c10d_functional.wait_tensor(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))
