"""The programs that `symmplan bench compile` compiles.

| name | what communicates |
| --- | --- |
| ``tensor_parallel`` | Llama-style blocks sharded with DTensor, sequence parallel |
| ``simple_fsdp`` | the same blocks, parameters gathered by ``redistribute``, again in backward |
| ``overlap`` | eight all-gathers started before four matrix products and waited for after them |
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import define
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CASES", "Program"]

#: Width of an attention head, less in small models, which have at least so many heads.
_HEAD, _HEADS = 128, 8
_GATHERS, _PRODUCTS = 8, 4


@define
class Program:
    """Something to compile and run again and again.

    Attributes:
        run: Takes the number of the step, computes it, returns this rank's loss.
    """

    run: Callable[[int], torch.Tensor]


class _Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.head = min(_HEAD, dim // _HEADS)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.view(-1, y.shape[-1] // self.head, self.head).transpose(0, 1).unsqueeze(0)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.squeeze(0).transpose(0, 1).flatten(1))  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 4 * dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """Of a Llama-style transformer; tokens x dim, in and out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = _Attention(dim)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = _Mlp(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


def _blocks(options: dict[str, Any], device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    dtype = getattr(torch, options["dtype"])
    blocks = (_Block(options["dim"]) for _ in range(options["layers"]))
    return nn.Sequential(*blocks).to(device, dtype)


def _training(
    model: nn.Module,
    compiled: Callable[..., Any],
    batch: Callable[[int], torch.Tensor],
) -> Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def run(step: int) -> torch.Tensor:
        loss: torch.Tensor = compiled(batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(run)


def _batches(
    options: dict[str, Any], device: torch.device, rows: slice
) -> Callable[[int], torch.Tensor]:
    dtype = getattr(torch, options["dtype"])
    generator = torch.Generator().manual_seed(11)
    whole = torch.randn(options["tokens"], options["dim"], generator=generator)
    mine = whole[rows].to(device, dtype)
    return lambda step: mine + step % 7


def _tensor_parallel(
    options: dict[str, Any], mesh: DeviceMesh, device: torch.device, wrap: Callable[..., Any]
) -> Program:
    model = _blocks(options, device)
    rows = Shard(0)
    to_all = {"input_layouts": (rows,), "desired_input_layouts": (Replicate(),)}
    for block in model:
        styles = {
            "attention_norm": SequenceParallel(sequence_dim=0),
            "attention": PrepareModuleInput(**to_all),  # type: ignore[arg-type]
            **{f"attention.{n}": ColwiseParallel() for n in "qkv"},
            "attention.o": RowwiseParallel(output_layouts=rows),
            "mlp_norm": SequenceParallel(sequence_dim=0),
            "mlp": PrepareModuleInput(**to_all),  # type: ignore[arg-type]
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=rows),
        }
        parallelize_module(block, mesh, styles)
    count = options["tokens"] // options["ranks"]
    begin = mesh.get_local_rank() * count
    return _training(model, wrap(model), _batches(options, device, slice(begin, begin + count)))


class _Gathered(nn.Linear):
    """A linear layer that has a part of its weight, and gathers the whole when it runs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        part: Any = self.weight
        whole = part.redistribute(placements=[Replicate()])
        whole = whole.to_local(grad_placements=[Partial()])
        return nn.functional.linear(input, whole)


def _simple_fsdp(
    options: dict[str, Any], mesh: DeviceMesh, device: torch.device, wrap: Callable[..., Any]
) -> Program:
    model = _blocks(options, device)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0)])
            module.weight = nn.Parameter(weight)
            module.__class__ = _Gathered
    # Gather again in backward instead of keeping whole parameters.
    context = functools.partial(checkpoint.create_selective_checkpoint_contexts, _policy)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=context)
        return x

    whole = slice(0, options["tokens"])
    return _training(model, wrap(forward), _batches(options, device, whole))


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> checkpoint.CheckpointPolicy:
    ops = torch.ops._c10d_functional
    if op in (ops.all_gather_into_tensor.default, ops.wait_tensor.default):
        return checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    return checkpoint.CheckpointPolicy.MUST_SAVE


def _overlap(
    options: dict[str, Any], mesh: DeviceMesh, device: torch.device, wrap: Callable[..., Any]
) -> Program:
    dtype = getattr(torch, options["dtype"])
    group, size = dist.group.WORLD.group_name, mesh.size()  # type: ignore[union-attr]
    torch.manual_seed(mesh.get_local_rank())
    # Shards are kept in another type than they are gathered in, as under mixed precision.
    kept = torch.float32 if dtype != torch.float32 else torch.float64
    count = options["gather_bytes"] // dtype.itemsize
    shards = [torch.randn(count, device=device, dtype=kept) for _ in range(_GATHERS)]
    width = options["width"]
    weight = torch.randn(width, width, device=device, dtype=dtype) / width**0.5

    def forward(shards: list[torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        started = [ops.all_gather_into_tensor(s.to(dtype), size, group) for s in shards]
        for _ in range(_PRODUCTS):
            x = x @ weight
        ends = [ops.wait_tensor(s) for s in started]
        loss = x.float().square().mean()
        for end in ends:
            loss = loss + end[:: count // 2].float().sum()
        return loss

    compiled = wrap(forward)
    x = torch.randn(width, width, device=device, dtype=dtype)

    def run(step: int) -> torch.Tensor:
        with torch.no_grad():
            loss: torch.Tensor = compiled(shards, x + step % 7, weight)
            return loss

    return Program(run)


#: Name -> makes a program: options, mesh, device, what compiles its function.
CASES: dict[str, Callable[[dict[str, Any], Any, torch.device, Callable[..., Any]], Program]] = {
    "tensor_parallel": _tensor_parallel,
    "simple_fsdp": _simple_fsdp,
    "overlap": _overlap,
}
