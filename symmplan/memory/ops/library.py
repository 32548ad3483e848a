"""The torch library ``symmplan``: the ops of `symmplan.memory` as ``torch.ops.symmplan.*``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan.memory.ops.kernels import kernel_all_reduce_
from symmplan.memory.ops.one_sided import (
    all_gather_out,
    all_gather_parts_,
    all_reduce_out,
    all_to_all_single_into,
    all_to_all_single_out,
    barrier_,
    broadcast_out,
    reduce_scatter_out,
)
from symmplan.memory.ops.started import all_gather_start, all_reduce_start, reduce_scatter_start
from symmplan.torch_private import works

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.memory.ops.one_sided import Run

__all__ = ["IMPLEMENTATIONS"]

_LIBRARY: Any = torch.library.Library("symmplan", "FRAGMENT")
_GATHER = "Tensor input, int group_size, str group_name, *, Tensor(a!) out"
_SCATTER = "Tensor input, str reduce_op, int group_size, str group_name, *, Tensor(a!) out"
_REDUCE = "Tensor input, str reduce_op, str group_name, *, Tensor(a!) out"
_SPLITS = "SymInt[] output_split_sizes, SymInt[] input_split_sizes"
_SCHEMAS: dict[Callable[..., Run], str] = {
    all_gather_out: _GATHER,
    reduce_scatter_out: _SCATTER,
    all_reduce_out: _REDUCE,
    all_to_all_single_out: f"Tensor input, {_SPLITS}, str group_name, *, Tensor(a!) out",
    broadcast_out: "Tensor input, int src, str group_name, *, Tensor(a!) out",
    all_gather_parts_: "Tensor(a!) whole, int[] offsets, int[] nbytes, int group_size, "
    "str group_name",
    barrier_: "Tensor(a!) segment, str group_name",
    all_to_all_single_into: f"Tensor input, {_SPLITS}, str group_name, *, Tensor(a!) out",
    all_gather_start: _GATHER,
    reduce_scatter_start: _SCATTER,
    all_reduce_start: _REDUCE,
    kernel_all_reduce_: "Tensor(a!) input, str reduce_op, str group_name",
}

#: ``{qualified name: function}`` of these ops, for whoever need not ask the dispatcher. Each checks
#: a call and returns what makes it, as often as wanted.
IMPLEMENTATIONS = {f"symmplan::{op.__name__}": op for op in _SCHEMAS}


def _fake(*args: object, **kwargs: object) -> None:
    """They change ``out`` in place and return nothing: no shape to compute."""


def _made(implementation: Callable[..., Run]) -> Callable[..., None]:
    """An op's kernel. What is not over then ends in ``wait_tensor`` of ``out``."""

    def kernel(*args: Any, **kwargs: Any) -> None:
        work = implementation(*args, **kwargs)()
        if work is not None:
            works.ended_by_wait(kwargs["out"], work)

    return kernel


def _register() -> None:
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    for implementation, arguments in _SCHEMAS.items():
        name = implementation.__name__
        _LIBRARY.define(f"{name}({arguments}) -> ()", tags=tags)
        _LIBRARY.impl(name, _made(implementation), "CompositeExplicitAutograd")
        # No formula and no warning about it: whoever differentiates does so above these ops.
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"symmplan::{name}", _fake, lib=_LIBRARY)


_register()
