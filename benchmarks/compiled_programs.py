"""The programs that `compile.py` compiles.

| name | what communicates |
| --- | --- |
| ``tensor_parallel`` | Llama-style blocks sharded with DTensor, sequence parallel |
| ``simple_fsdp`` | the same blocks, parameters gathered by ``redistribute``, again in backward |
| ``tensor_parallel_4096`` | the same with 4 layers of width 4096 and 16,384 tokens |
| ``tensor_parallel_8192`` | the same with 8 layers of width 8192 |
| ``overlap`` | eight all-gathers started before four matrix products and waited for after them |

A program is a function of the step's number that returns this rank's loss.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
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

from symmplan.bench.parts.llama import Block

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    Program = Callable[[int], torch.Tensor]

__all__ = ["CASES"]

_GATHERS, _PRODUCTS = 8, 4


def _blocks(settings: dict[str, Any], device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    # Heads are 128 wide, less in small models, which have at least eight.
    dim = settings["dim"]
    shape = {"heads": max(8, dim // 128), "shared": 1, "hidden": 4 * dim}
    blocks = (Block(dim, **shape) for _ in range(settings["layers"]))
    return nn.Sequential(*blocks).to(device, getattr(torch, settings["dtype"]))


def _training(
    settings: dict[str, Any], model: nn.Module, compiled: Callable[..., Any], rows: slice
) -> Program:
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(11)
    whole = torch.randn(settings["tokens"], settings["dim"], generator=generator)
    mine = whole[rows].to(weight.device, weight.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def run(step: int) -> torch.Tensor:
        loss: torch.Tensor = compiled(mine + step % 7).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def _tensor_parallel(
    settings: dict[str, Any], mesh: DeviceMesh, device: torch.device, wrap: Callable[..., Any]
) -> Program:
    model = _blocks(settings, device)
    rows = Shard(0)
    to_all: Any = {"input_layouts": (rows,), "desired_input_layouts": (Replicate(),)}
    for block in model:
        styles = {
            "attention_norm": SequenceParallel(sequence_dim=0),
            "attention": PrepareModuleInput(**to_all),
            **{f"attention.{n}": ColwiseParallel() for n in "qkv"},
            "attention.o": RowwiseParallel(output_layouts=rows),
            "mlp_norm": SequenceParallel(sequence_dim=0),
            "mlp": PrepareModuleInput(**to_all),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=rows),
        }
        parallelize_module(block, mesh, styles)
    count = settings["tokens"] // settings["ranks"]
    begin = mesh.get_local_rank() * count
    return _training(settings, model, wrap(model), slice(begin, begin + count))


class _Gathered(nn.Linear):
    """A linear layer that has a part of its weight, and gathers the whole when it runs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        part: Any = self.weight
        whole = part.redistribute(placements=[Replicate()])
        whole = whole.to_local(grad_placements=[Partial()])
        return nn.functional.linear(input, whole)


def _simple_fsdp(
    settings: dict[str, Any], mesh: DeviceMesh, device: torch.device, wrap: Callable[..., Any]
) -> Program:
    model = _blocks(settings, device)
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

    return _training(settings, model, wrap(forward), slice(None))


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> checkpoint.CheckpointPolicy:
    ops = torch.ops._c10d_functional
    if op in (ops.all_gather_into_tensor.default, ops.wait_tensor.default):
        return checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    return checkpoint.CheckpointPolicy.MUST_SAVE


def _overlap(
    settings: dict[str, Any], mesh: DeviceMesh, device: torch.device, wrap: Callable[..., Any]
) -> Program:
    dtype = getattr(torch, settings["dtype"])
    group, size = dist.group.WORLD.group_name, mesh.size()  # type: ignore[union-attr]
    torch.manual_seed(mesh.get_local_rank())
    # Shards are kept in another type than they are gathered in, as under mixed precision.
    kept = torch.float32 if dtype != torch.float32 else torch.float64
    count = settings["gather_bytes"] // dtype.itemsize
    shards = [torch.randn(count, device=device, dtype=kept) for _ in range(_GATHERS)]
    width = settings["width"]
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

    @torch.no_grad()
    def run(step: int) -> torch.Tensor:
        loss: torch.Tensor = compiled(shards, x + step % 7, weight)
        return loss

    return run


def _wide(layers: int, dim: int) -> Callable[..., Program]:
    """Tensor parallelism of a size, whatever the options say."""

    def make(settings: dict[str, Any], *rest: Any) -> Program:
        sizes = {"layers": layers, "dim": dim, "tokens": 16384}
        return _tensor_parallel({**settings, **sizes}, *rest)

    return make


#: Name -> makes a program: settings, mesh, device, what compiles its function.
CASES: dict[str, Callable[[dict[str, Any], Any, torch.device, Callable[..., Any]], Program]] = {
    "tensor_parallel": _tensor_parallel,
    "tensor_parallel_4096": _wide(4, 4096),
    "tensor_parallel_8192": _wide(8, 8192),
    "simple_fsdp": _simple_fsdp,
    "overlap": _overlap,
}
