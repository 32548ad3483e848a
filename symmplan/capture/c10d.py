"""`torch.distributed`'s in-place collectives in the words of the functional ones.

``dist.all_reduce(x)`` reaches the dispatcher as ``c10d::allreduce_``, whose schema does not say
that it writes ``x``. The functional collectives do the same with schemas that tell the truth, so a
recorded call becomes one of those, and capture, registry and lowerings need to know only them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from attrs import define

from symmplan.registry import bind_arguments
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.torch_private.ops import OpOverload

__all__ = ["FUNCTIONAL", "NAMES", "Functional", "functional_form"]


@define(eq=False)
class Functional:
    """A call of a functional collective that does what a call of ``c10d::`` does."""

    op: Any  # the functional collective
    args: tuple[Any, ...]  # its positional arguments
    kwargs: dict[str, Any]  # its arguments by name
    written: torch.Tensor  # the tensor that it writes
    listed: bool  # whether the original returns its tensor in a list
    asynchronous: bool  # whether the caller holds a ``Work`` to wait for

    def results(self, work: Any) -> tuple[Any, Any]:
        """What the original op returns."""
        return ([self.written] if self.listed else self.written), work


def _all_gather(bound: dict[str, Any], name: str, size: int) -> tuple[Any, ...]:
    out = bound["output_tensor"]
    return (bound["input_tensor"], size, name), {"out": out}, out, False


def _reduce_scatter(bound: dict[str, Any], name: str, size: int) -> tuple[Any, ...] | None:
    reduction, out = c10d.reduction_name(bound["reduce_op"]), bound["output_tensor"]
    if reduction is None:
        return None
    return (bound["input_tensor"], reduction, size, name), {"out": out}, out, False


def _all_reduce(bound: dict[str, Any], name: str, _size: int) -> tuple[Any, ...] | None:
    reduction, tensors = c10d.reduction_name(bound["reduce_op"]), bound["tensors"]
    if reduction is None or len(tensors) != 1 or bound["sparse_indices"] is not None:
        return None
    return (tensors[0], reduction, name), {}, tensors[0], True


def _broadcast(bound: dict[str, Any], name: str, _size: int) -> tuple[Any, ...] | None:
    tensors = bound["tensors"]
    if len(tensors) != 1 or bound["root_tensor"] != 0:
        return None
    return (tensors[0], bound["root_rank"], name), {}, tensors[0], True


#: The functional form of an op, and what makes of a call's arguments those of `Functional` between
#: its op and the last; or None.
_FORMS: Mapping[str, tuple[str, Callable[[dict[str, Any], str, int], tuple[Any, ...] | None]]] = {
    "c10d::_allgather_base_": ("all_gather_into_tensor_out", _all_gather),
    "c10d::_reduce_scatter_base_": ("reduce_scatter_tensor_out", _reduce_scatter),
    "c10d::allreduce_": ("all_reduce_", _all_reduce),
    "c10d::broadcast_": ("broadcast_", _broadcast),
}

#: The ops that have a functional form.
NAMES = tuple(_FORMS)
#: ``{op: its functional form}``, qualified names.
FUNCTIONAL = {op: f"_c10d_functional::{name}" for op, (name, _) in _FORMS.items()}


@functools.cache
def _overload(name: str) -> Any:
    return getattr(torch.ops._c10d_functional, name).default


def functional_form(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Functional | None:
    """The functional form of a call of ``c10d::``, or None if it has none."""
    if op._schema.name not in _FORMS:
        return None
    functional, form = _FORMS[op._schema.name]
    bound = bind_arguments(op, args, kwargs)
    group = c10d.unboxed_group(bound["process_group"])
    found = form(bound, c10d.group_name(group), group.size())
    if found is None:
        return None
    positional, named, written, listed = found
    return Functional(
        _overload(functional), positional, named, written, listed, bool(bound["async_op"])
    )
