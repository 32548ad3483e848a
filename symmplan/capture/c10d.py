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
    returns: str = "tensor"  # what the original returns before its work, of `_FORMS`
    asynchronous: bool = False  # whether the caller holds a ``Work`` to wait for

    def results(self, work: Any) -> Any:
        """The results of the original op."""
        if self.returns == "nothing":
            return work
        return ([self.written] if self.returns == "list" else self.written), work


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


def _all_to_all(out: Any, source: Any, group: str, received: Any, sent: Any) -> tuple[Any, ...]:
    return (source, received, sent, group), {"out": out}, out


def _size(group: str) -> int:
    return c10d.group_by_name(group).size()


_F = "_c10d_functional::"
#: The functional form of an op, what the op returns before its work, and what makes of a call's
#: arguments those of the form; or None.
_FORMS: Mapping[str, tuple[str, str, Callable[..., tuple[Any, ...] | None]]] = {
    "c10d::_allgather_base_": (f"{_F}all_gather_into_tensor_out", "tensor", _all_gather),
    "c10d::_reduce_scatter_base_": (f"{_F}reduce_scatter_tensor_out", "tensor", _reduce_scatter),
    "c10d::allreduce_": (f"{_F}all_reduce_", "list", _all_reduce),
    "c10d::alltoall_base_": ("symmplan::all_to_all_single_into", "nothing", _all_to_all),
    "c10d::broadcast_": (f"{_F}broadcast_", "list", _broadcast),
}
#: Those in which a rank says how many rows go to whom.
_ALL_TO_ALLS = ("c10d::alltoall_base_", f"{_F}all_to_all_single")

#: The ops that have a functional form.
NAMES = tuple(_FORMS)
#: ``{op: its functional form}``, qualified names.
FUNCTIONAL = {op: name for op, (name, *_) in _FORMS.items()}


def is_all_to_all(op: OpOverload) -> bool:
    """Whether an op is an all-to-all of a process group whose parts may differ from rank to rank.

    Args:
        op: What is called.
    """
    return op._schema.name in _ALL_TO_ALLS


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
    name, returns, form = _FORMS[op._schema.name]
    said = reader_of(op)(args)
    found = form(*map_tensors(said))
    if found is None:
        return None
    asynchronous = args[len(said)] if len(args) > len(said) else True
    namespace, _, name = name.partition("::")
    target, (positional, named, written) = getattr(getattr(torch.ops, namespace), name), found
    return Functional(target.default, positional, named, written, returns, bool(asynchronous))
