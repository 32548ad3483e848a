"""The short way through a call that is exactly what the schedule expects.

[Note: short ways]
    What a declared call costs the host is for the most part Python's. So when a call was served for
    the first time, and nothing but the op itself and plain copies into placements belongs to it, a
    function is made of it that compares the arguments at their places, and runs the op with the
    fewest calls. Where anything is not as expected it gives up before it did anything, and the long
    way finds out what is wrong. Group and element type are compared as objects. Which reduction a
    ``c10d::`` call asks for is not looked at: the program's own arguments are passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan import _compat as compat
from symmplan.memory.own import OWN

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.capture.c10d import Functional
    from symmplan.integrate.eager_schedule import Event

__all__ = ["MISS", "quick_call", "quick_memory"]

#: What a short way returns if the call is not the expected one.
MISS: Any = object()


def quick_call(
    event: Event, args: Any, kwargs: Any, form: Functional | None
) -> Callable[[Any, Any], Any] | None:
    """A short way for an op's calls like this one.

    Args:
        event: What the schedule expects; the call was served as it.
        args: The call's arguments.
        kwargs: The same by name.
        form: The functional form of a ``c10d::`` call.

    Returns:
        A function of the dispatch keys behind the session's and the arguments; it returns what the
        op returns, or `MISS`. None if the event needs more than that.
    """
    acts = (event.before, event.ready, event.copied, event.after)
    plain = not any(acts) and not any(s.copy_back or s.index for s in event.stages)
    if kwargs or not plain or not event.placed:
        return None
    if form is not None:
        if (
            event.call.asynchronous
            or event.stages
            or (event.row is not None and event.row.target[:5] != "_c10d")
        ):
            return None
        return _as_called(event, args)
    row = event.row
    if row is None and not event.stages and not event.results:
        return _as_called(event, args)
    if row is None or row.each or len(args) != len(event.names) or row.out != "return":
        return None
    return _by_row(event, args)


def _as_called(event: Event, args: Any) -> Callable[[Any, Any], Any] | None:
    """An op whose declared tensors are placements already: it runs as it was called."""
    tensors: list[tuple[int, bool, Any, Any]] = []
    values: list[tuple[int, Any]] = []
    groups: list[tuple[int, Any]] = []
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            tensors.append((i, False, value.shape, value.dtype))
        elif isinstance(value, list) and len(value) == 1:
            tensors.append((i, True, value[0].shape, value[0].dtype))
        elif isinstance(value, torch.ScriptObject):
            group = compat.unboxed_if_group(value)
            if group is not None:
                groups.append((i, group))
        elif value is None or isinstance(value, (bool, int, str)):
            values.append((i, value))
        elif not isinstance(value, float):
            return None
    addresses = {bound.address for bound in event.binds}
    count, claims = len(args), event.claims
    redispatch = event.call.op.redispatch
    unboxed = compat.unboxed_group

    def call(behind: Any, args: Any) -> Any:
        if len(args) != count:
            return MISS
        found = 0
        for i, listed, shape, dtype in tensors:
            tensor = args[i]
            if listed:
                if len(tensor) != 1:
                    return MISS
                tensor = tensor[0]
            if tensor.shape != shape or tensor.dtype is not dtype:
                return MISS
            found += tensor.data_ptr() in addresses
        for i, group in groups:
            if unboxed(args[i]) is not group:
                return MISS
        for i, value in values:
            if args[i] != value:
                return MISS
        for _, lent in claims:
            if lent.held:
                return MISS
        if found != len(addresses):
            return MISS
        OWN.depth += 1
        try:
            return redispatch(behind, *args)
        finally:
            OWN.depth -= 1

    return call


def _by_row(event: Event, args: Any) -> Callable[[Any, Any], Any] | None:
    """An op that runs as another one, which writes its result where it is told."""
    row, lent = event.row, event.lent.get((), event.leaving.get(()))
    assert row is not None
    if event.results.keys() - event.lent.keys() - event.leaving.keys():  # copied out at once
        return None
    expected: list[tuple[int, Any, Any, int]] = []
    values: list[tuple[int, Any]] = []
    addresses = {event.names.index(bound.head): bound.address for bound in event.binds}
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            expected.append((i, value.shape, value.dtype, addresses.get(i, 0)))
        elif isinstance(value, (str, int, bool)):
            values.append((i, value))
        elif not isinstance(value, float):
            return None
    stages = [(event.names.index(stage.head), stage) for stage in event.stages]
    schema = event.target._schema
    picks = [event.names.index(a.name) for a in schema.arguments if a.name in event.names]
    if len(picks) != len(schema.arguments) - (schema.arguments[-1].name == "out"):
        return None
    out_given = schema.arguments[-1].name == "out"
    source = event.names.index("input")
    like = event.shapes[()]
    shape, dtype, device = like.shape, like.dtype, args[source].device
    count, claims, inplace = len(args), event.claims, row.inplace
    target = event.target
    behind_own = row.target[:5] == "_c10d"  # it is declared, too: go past the session's kernel

    def call(behind: Any, args: Any) -> Any:
        if len(args) != count:
            return MISS
        for i, want, kind, address in expected:
            tensor = args[i]
            if tensor.shape != want or tensor.dtype is not kind:
                return MISS
            if address and tensor.data_ptr() != address:
                return MISS
        for i, value in values:
            if args[i] != value:
                return MISS
        for _, other in claims:
            if other.held:
                return MISS
        OWN.depth += 1
        try:
            given = list(args)
            for i, stage in stages:
                if stage.copy_in:
                    stage.view.copy_(given[i])
                given[i] = stage.view
            if lent is not None:
                out = lent.tensor
            else:
                out = torch.empty(shape, dtype=dtype, device=device)
            if inplace:
                out.copy_(given[source])
                given[source] = out
            chosen = [given[i] for i in picks]
            if out_given and behind_own:
                target.redispatch(behind, *chosen, out=out)
            elif out_given:
                target(*chosen, out=out)
            elif behind_own:
                target.redispatch(behind, *chosen)
            else:
                target(*chosen)
        finally:
            OWN.depth -= 1
        return out if lent is None else lent.give()

    return call


def quick_memory(event: Event) -> Callable[[Any, Any, Any], Any] | None:
    """The same for `symmplan.empty` and `symmplan.out`: of the function, its arguments."""
    lent = next(iter(event.lent.values()), None)
    if event.before or event.ready or event.after or lent is None:
        return None
    claims, writes = event.claims, event.call.kind == "out"
    function, *recorded = event.call.args
    wanted, named = tuple(recorded), event.call.kwargs
    if any(isinstance(value, (tuple, dict)) for value in named.values()):  # there may be tensors
        return None

    def call(make: Any, args: Any, kwargs: Any) -> Any:
        if make is not function or len(args) != len(wanted) or kwargs != named:
            return MISS
        for want, have in zip(wanted, args, strict=True):
            if isinstance(have, torch.Tensor):
                if want.__class__ is not tuple:
                    return MISS
                if want[0] != have.shape or want[1] is not have.dtype:
                    return MISS
            elif have.__class__ is float:
                if want is not float:
                    return MISS
            elif want.__class__ is not have.__class__ or want != have:
                return MISS
        for _, other in claims:
            if other.held:
                return MISS
        if writes:
            OWN.depth += 1
            try:
                make(*args, **kwargs, out=lent.tensor)
            finally:
                OWN.depth -= 1
        return lent.give()

    return call
