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

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import symmplan

__all__ = ["BATCH", "SEQ", "Transformer", "peer_max", "sync_replicated"]


#: Sizes in elements. The ranks share the vocabulary, heads, hidden units and the sequence.
VOCAB, DIM, HEADS, HIDDEN, BLOCKS = 256, 256, 8, 1024, 2
SEQ, BATCH = 256, 4


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
        placed = symmplan.placed.handle(x, group_name)
    except symmplan.errors.RunError:  # not placed: this is the model without symmplan
        return _run(x, ("all_reduce", "max", group_name))
    placed.barrier()
    return torch.stack([placed.peer(rank) for rank in range(placed.world_size)]).amax(0)


@peer_max.register_fake
def _(x: Tensor, _group_name: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _run(x: Tensor, call: tuple[Any, ...]) -> Tensor:
    """A functional collective of torch: its name, and what it takes behind the tensor."""
    started = getattr(torch.ops._c10d_functional, call[0])(x.contiguous(), *call[1:])
    return cast("Tensor", torch.ops._c10d_functional.wait_tensor(started))


class _Collective(torch.autograd.Function):
    """One collective in the forward pass, another or none for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: tuple[Any, ...], back: tuple[Any, ...] | None) -> Tensor:
        ctx.back = back
        return _run(x, call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.back is None else _run(grad, ctx.back), None, None


_collective: Any = _Collective.apply


_linear = functools.partial(nn.Linear, bias=False)


class _Block(nn.Module):
    """Attention and MLP on half the heads and half the hidden units."""

    def __init__(self, world: int, gather: tuple[Any, ...], scatter: tuple[Any, ...]) -> None:
        super().__init__()
        self.heads, self.gather, self.scatter = HEADS // world, gather, scatter
        width, hidden = DIM // world, HIDDEN // world
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = _linear(DIM, 3 * width), _linear(width, DIM)
        self.mlp = nn.Sequential(_linear(DIM, hidden), nn.GELU(), _linear(hidden, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._parallel(self._attention, self.norm1(x))
        return x + self._parallel(self.mlp, self.norm2(x))

    def _parallel(self, inner: Any, x: Tensor) -> Tensor:
        whole = _collective(x, self.gather, self.scatter)
        return cast("Tensor", _collective(inner(whole), self.scatter, self.gather))

    def _attention(self, x: Tensor) -> Tensor:
        seq, batch, _ = x.shape
        q, k, v = self.qkv(x).view(seq, batch, 3, self.heads, -1).permute(2, 1, 3, 0, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast("Tensor", self.proj(out.permute(2, 0, 1, 3).reshape(seq, batch, -1)))


class Transformer(nn.Module):
    """A language model over bytes; returns the mean cross entropy of the next byte."""

    def __init__(self, rank: int, world: int, group: str) -> None:
        super().__init__()
        self.rank, self.world, self.group = rank, world, group
        self.gather = ("all_gather_into_tensor", world, group)
        self.scatter = ("reduce_scatter_tensor", "sum", world, group)
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        both = self.gather, self.scatter
        self.blocks = nn.ModuleList(_Block(world, *both) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(DIM)
        self.head = _linear(DIM, VOCAB // world)
        # Split parameters differ between ranks, replicated ones do not.
        for index, (name, parameter) in enumerate(self.named_parameters()):
            split = not _replicated(name)
            generator = torch.Generator().manual_seed(2 * index + split * rank)
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05, generator=generator)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """``inputs`` and ``targets`` are (seq, batch) bytes, the same on all ranks."""
        length = SEQ // self.world
        begin = self.rank * length
        places = self.places.weight[begin : begin + length].unsqueeze(1)
        x = self.tokens(inputs[begin : begin + length]) + places
        for block in self.blocks:
            # Recomputed in the backward pass: gathered activations live only for a moment, so
            # their bytes can be shared.
            x = checkpoint(block, x, use_reentrant=False)
        whole = _collective(self.norm(x), self.gather, self.scatter)
        return self._loss(self.head(whole), targets)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        width = logits.shape[-1]
        top = peer_max(logits.detach().amax(-1), self.group)
        logits = logits - top.unsqueeze(-1)
        local = targets - self.rank * width
        mine = (local >= 0) & (local < width)
        picked = logits.gather(-1, local.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
        partial = torch.stack([logits.exp().sum(-1), torch.where(mine, picked, 0.0)])
        # Every rank goes on to compute the same loss, so the sum's gradient is already complete.
        total, target = _collective(partial, ("all_reduce", "sum", self.group), None)
        return cast("Tensor", (total.log() - target).mean())


def _replicated(name: str) -> bool:
    """Whether all ranks hold the same values of the parameter ``name``."""
    return any(part in name for part in ("tokens", "places", "norm"))


def sync_replicated(model: nn.Module, group: str) -> None:
    """Sum the gradients of replicated parameters, each of which saw half of the sequence.

    Collective: yes.
    """
    for name, parameter in model.named_parameters():
        if _replicated(name):
            parameter.grad = _run(cast("Tensor", parameter.grad), ("all_reduce", "sum", group))
