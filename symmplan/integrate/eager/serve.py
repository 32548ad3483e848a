"""Run one call of a frozen session in its placements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan import _compat
from symmplan.errors import RunError
from symmplan.integrate.eager.direct import starter
from symmplan.integrate.eager.schedule import bound_values
from symmplan.memory.own import own_work
from symmplan.memory.touches import LIVE
from symmplan.place.watching import watched

if TYPE_CHECKING:
    from symmplan.capture.c10d import Functional
    from symmplan.integrate.eager.schedule import Event

__all__ = ["serve", "take_away"]


def serve(
    event: Event,
    behind: Any,
    args: Any,
    kwargs: Any,
    form: Functional | None,
) -> Any:
    """Run ``event``.

    Args:
        event: What the schedule expects; the call is known to fit it.
        behind: The dispatch keys behind the session's own.
        args: Arguments of the op as the program called it.
        kwargs: The same by name.
        form: The functional form of a ``c10d::`` call.

    Returns:
        What the op returns.

    Raises:
        RunError: An argument lies elsewhere than planned.

    Collective: as the op.
    """
    original = watched(event.call.op) if LIVE else event.call.op.redispatch
    if not event.placed:
        for act in event.ready:
            act()
        result = original(behind, *args, **kwargs)
        for act in event.after:
            act()
        return result
    values = bound_values(event, *((args, kwargs) if form is None else (form.args, form.kwargs)))
    for bound in event.binds:
        tensor = _at(values[bound.head], bound.index)
        if tensor.data_ptr() != bound.address:
            raise RunError(
                f"{event.name}: argument {bound.head!r} is not the tensor that it was when the "
                f"iteration was recorded, buffer {bound.buffer!r}",
                expected=f"a tensor at {bound.address:#x}",
                got=f"one at {tensor.data_ptr():#x}",
                fix="pass the same tensor in every iteration, or call session.replan() on all "
                "ranks",
                op=event.name,
                buffer=bound.buffer,
            )
    swapped: dict[int, torch.Tensor] = {}
    back: list[tuple[torch.Tensor, torch.Tensor]] = []
    for stage in event.stages:
        tensor = _at(values[stage.head], stage.index)
        for act in stage.ready:
            act()
        if stage.copy_in:
            stage.view.copy_(tensor)
        values[stage.head] = _put(values[stage.head], stage.index, stage.view)
        swapped[id(tensor)] = stage.view
        if stage.copy_back:
            back.append((tensor, stage.view))
    by_row = event.row is not None and (form is None or event.row.one_sided)
    for act in () if by_row else event.ready:
        act()
    if by_row:
        results = _run_row(event, values)
        work = None
    elif event.variant is not None:
        results = _run_variant(event, values)
        work = None
    elif form is not None and event.engine:
        work = _run_on_engine(event, values)
        if event.call.asynchronous:
            return form.results(_finish_later(event, work, back, form.written))
        work.wait()
        results, work = {(): form.written}, None
    else:
        args, kwargs = _swap(args, swapped), {k: _swap(v, swapped) for k, v in kwargs.items()}
        result = original(behind, *args, **kwargs)
        if form is not None:
            work = result[1]
            started = work_of(work)
            if event.call.asynchronous and started is not None:
                return form.results(_finish_later(event, started, back, form.written))
            if back and started is not None:  # there is none of what ran on the current stream
                started.wait()
            results = {(): form.written}
        else:
            copied = _copied(event, result)
            if copied is None:
                return _ended(event, back, result)
            results, work = copied, None
    for act in () if event.leaving else event.copied:
        act()
    for tensor, view in back:
        if event.waits and form is None:
            torch.ops._c10d_functional.wait_tensor(view)
        tensor.copy_(view)
    for act in event.after:
        act()
    if form is not None:
        return form.results(_compat.finished_work() if work is None else work)
    return _handed(event, results, back)


def work_of(work: Any) -> Any:
    """The work in its box."""
    return torch.distributed.Work.unbox(work)


def _finish_later(
    event: Event, work: Any, back: list[tuple[torch.Tensor, torch.Tensor]], written: torch.Tensor
) -> Any:
    """A work that copies back what was staged when it is waited for.

    Also where nothing was: torch's own works hold their tensors for as long as they live.
    """
    for act in event.after:
        act()

    @own_work
    def finish() -> None:
        for act in event.copied:
            act()
        for tensor, view in back:
            tensor.copy_(view)

    event.work, boxed = _compat.watched_work(work, finish, written)
    return boxed


def take_away(event: Event, tensor: torch.Tensor) -> None:
    """Copy a result that leaves, which has just been waited for, out of its placement.

    Whoever holds the tensor, as asynchronous tensors of torch do, holds the copy from now on.
    """
    for act in event.copied:
        act()
    copy = tensor.clone()
    tensor.set_(copy.untyped_storage(), 0, copy.shape, copy.stride())


def _ended(
    event: Event,
    back: list[tuple[torch.Tensor, torch.Tensor]],
    result: Any,
) -> Any:
    """An op none of whose results has a placement."""
    for act in event.copied:
        act()
    for tensor, view in back:
        tensor.copy_(view)
    for act in event.after:
        act()
    originals = {id(view): tensor for tensor, view in back}
    if isinstance(result, torch.Tensor):
        return originals.get(id(result), result)
    return result


def _run_on_engine(event: Event, values: dict[str, Any]) -> Any:
    """Start a collective of the process group over the communicator for copy engines."""
    assert event.row is not None
    start = starter(
        event.row.target, event.engine, values["input"].device, reduction=None, root=None
    )
    assert start is not None
    return start(values[event.row.out], values["input"])


def _run_row(event: Event, values: dict[str, Any]) -> dict[tuple[int, ...], torch.Tensor]:
    row = event.row
    assert row is not None
    if event.group:
        values[event.group_argument] = event.engine or event.group
    elements: dict[tuple[int, ...], dict[str, Any]] = {(): values}
    if row.each:
        elements = {(i,): {**values, "input": x} for i, x in enumerate(values["inputs"])}
    outs = {path: _out(event, element, path) for path, element in elements.items()}
    for act in event.filling:
        act()
    for path, out in outs.items() if row.inplace else ():
        out.copy_(elements[path]["input"])
        elements[path] = {**elements[path], "input": out}
    for act in event.ready:
        act()
    schema = event.target._schema
    for path, element in elements.items():
        args = [element[a.name] for a in schema.arguments if not a.kwarg_only]
        if schema.arguments[-1].name == "out":
            event.target(*args, out=outs[path])
        else:
            event.target(*args)
    return outs


def _out(event: Event, values: dict[str, Any], path: tuple[int, ...]) -> torch.Tensor:
    """What the op that runs by its row writes."""
    row = event.row
    assert row is not None
    out = values[row.out] if row.out != "return" else event.results.get(path)
    if out is None:
        like = event.shapes[path]
        out = torch.empty(like.shape, dtype=like.dtype, device=values["input"].device)
    return out


def _run_variant(event: Event, values: dict[str, Any]) -> dict[tuple[int, ...], torch.Tensor]:
    outs = iter(event.results.values())
    args, kwargs = [], {}
    for argument in event.variant._schema.arguments:
        value = values[argument.name] if argument.name in values else next(outs)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    event.variant(*args, **kwargs)
    return dict(event.results)


def _copied(event: Event, result: Any) -> dict[tuple[int, ...], torch.Tensor] | None:
    """Copy results into their placements, for an op that cannot write there."""
    if not event.results:
        return None
    found: dict[tuple[int, ...], torch.Tensor] = {}
    tensors = {(): result} if isinstance(result, torch.Tensor) else dict(_leaves(result))
    for act in event.landing:
        act()
    for path, tensor in tensors.items():
        place = event.results.get(path)
        if place is not None:
            place.copy_(tensor)
        found[path] = tensor if place is None else place
    return found


def _leaves(result: Any) -> Any:
    return (((i,), t) for i, t in enumerate(result) if isinstance(t, torch.Tensor))


def _handed(
    event: Event,
    results: dict[tuple[int, ...], torch.Tensor],
    back: list[tuple[torch.Tensor, torch.Tensor]],
) -> Any:
    """What the program gets: tensors in placements, copies of those that leave, its own.

    Results that leave and are still pending are copied when they are waited for.
    """
    originals = {id(view): tensor for tensor, view in back}
    given = []
    for path, tensor in results.items():
        lent = event.lent.get(path, event.leaving.get(path))
        if lent is not None:
            given.append(lent.give())
        elif path in event.results:
            given.append(tensor.clone())
        else:
            given.append(originals.get(id(tensor), tensor))
    if () in results:
        return given[0]
    return given


def _at(value: Any, index: tuple[int, ...]) -> Any:
    for i in index:
        value = value[i]
    return value


def _put(value: Any, index: tuple[int, ...], new: Any) -> Any:
    if not index:
        return new
    items = list(value)
    items[index[0]] = _put(items[index[0]], index[1:], new)
    return items


def _swap(value: Any, by: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(_swap(v, by) for v in value)
    return value
