"""`torch.distributed`'s in-place collectives in the words of the functional ones.

``dist.all_reduce(x)`` reaches the dispatcher as ``c10d::allreduce_``, whose schema does not say
that it writes ``x``. The functional collectives do the same, and their schemas are right. So a
recorded call becomes a functional one, and capture, registry and lowerings need to know only those.

The dispatcher gives all arguments by position, but for defaults at the end. The group and the
reduction are in boxes, made anew for each call. ``async_op`` and ``timeout`` come last: they say
how a call is made, and not what it does.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from attrs import define

from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.torch_private.ops import OpOverload


@define(eq=False)
class Functional:
    """A call of a functional collective that does what a call of ``c10d::`` does."""

    op: Any  # the functional collective
    args: Any  # its positional arguments
    kwargs: dict[str, Any]  # its arguments by name
    written: Any = None  # the tensor that it writes
    listed: bool = False  # whether the original returns its tensor in a list
    asynchronous: bool = False  # whether the caller holds a ``Work`` to wait for

    def results(self, work: Any) -> tuple[Any, Any]:
        """The results of the original op."""
        return ([self.written] if self.listed else self.written), work


# From what a call does: the form's arguments, by position and by name, and the tensor it writes.


def _all_gather(out: Any, source: Any, group: str) -> tuple[Any, ...]:
    return (source, _size(group), group), {"out": out}, out


def _reduce_scatter(out: Any, source: Any, group: str, reduction: Any) -> tuple[Any, ...] | None:
    if reduction is None:
        return None
    return (source, reduction, _size(group), group), {"out": out}, out


def _all_reduce(tensors: Any, group: str, reduction: Any, sparse: Any) -> tuple[Any, ...] | None:
    if reduction is None or len(tensors) != 1 or sparse is not None:
        return None
    return (tensors[0], reduction, group), {}, tensors[0]


def _broadcast(tensors: Any, group: str, root: int, number: int) -> tuple[Any, ...] | None:
    if len(tensors) != 1 or number != 0:
        return None
    return (tensors[0], root, group), {}, tensors[0]


def _size(group: str) -> int:
    return c10d.group_by_name(group).size()


#: The functional form of an op, whether the op takes its tensor in a list, and what makes of a
#: call's arguments those of the form; or None.
_FORMS: Mapping[str, tuple[str, bool, Callable[..., tuple[Any, ...] | None]]] = {
    "c10d::_allgather_base_": ("all_gather_into_tensor_out", False, _all_gather),
    "c10d::_reduce_scatter_base_": ("reduce_scatter_tensor_out", False, _reduce_scatter),
    "c10d::allreduce_": ("all_reduce_", True, _all_reduce),
    "c10d::broadcast_": ("broadcast_", True, _broadcast),
}

#: The ops that have a functional form.
NAMES = tuple(_FORMS)
#: ``{op: its functional form}``, qualified names.
FUNCTIONAL = {op: f"_c10d_functional::{name}" for op, (name, *_) in _FORMS.items()}


@functools.cache
def reader_of(op: OpOverload) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that picks the arguments of a call of ``op`` that say what it does.

    It unboxes them: the name of the group, and the name of a plain reduction. Arguments of ops
    without a functional form stay as they are.
    """
    if op._schema.name not in _FORMS:
        return lambda args: args
    names = [argument.name for argument in op._schema.arguments]
    count, group = names.index("async_op"), names.index("process_group")
    reduction = names.index("reduce_op") if "reduce_op" in names else None

    def read(args: Sequence[Any]) -> Sequence[Any]:
        found = list(args[:count])
        found[group] = c10d.boxed_group(found[group])
        if reduction is not None:
            found[reduction] = c10d.boxed_reduction(found[reduction])
        return found

    return read


def functional_form(
    op: OpOverload, args: Sequence[Any], map_tensors: Callable[[Any], Any] = lambda x: x
) -> Functional | None:
    """The functional form of a call of ``c10d::``, or None if it has none.

    Args:
        op: What is called.
        args: As the dispatcher gives them.
        map_tensors: Makes of what the call does what stands for it in the form.
    """
    if op._schema.name not in _FORMS:
        return None
    name, listed, form = _FORMS[op._schema.name]
    said = reader_of(op)(args)
    found = form(*map_tensors(said))
    if found is None:
        return None
    asynchronous = args[len(said)] if len(args) > len(said) else True
    target, (positional, named, written) = getattr(torch.ops._c10d_functional, name), found
    return Functional(target.default, positional, named, written, listed, bool(asynchronous))
