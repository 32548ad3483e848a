"""Collectives of a process group without the dispatcher.

[Note: past the dispatcher]
    `torch.distributed`'s collectives reach the dispatcher as ops that take the process group and
    the reduction as boxed objects. A kernel in Python gets those boxed anew for every call, and
    hands them back when it goes on to the op itself: twice as long as the collective takes to
    launch. So calls that are as planned go past it. ``dist.all_reduce`` and its like are caught
    where Python calls the group's method, and the group's backend launches the collective, as the
    op's own kernel would make it. Functional collectives are caught where Python calls the op, if
    no mode, transform or autograd is there to see the call. What is not as planned, and whoever
    calls from C++, comes to the session's kernel in the dispatcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan import _compat as compat
from symmplan.integrate.eager.schedule import bound_values
from symmplan.memory.ops import IMPLEMENTATIONS
from symmplan.memory.own import OWN, own_work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from symmplan.capture.c10d import Functional
    from symmplan.integrate.eager.schedule import Event
    from symmplan.integrate.eager.session import Session

__all__ = ["MISS", "Caught", "front_of", "install_fronts", "launcher", "starter"]

#: What a short way returns if the call is not the expected one.
MISS: Any = object()

_PLAIN = (torch.Tensor, torch.nn.Parameter)

#: The op -> the method of a process group by which Python calls it, and of its backend.
_METHODS = {
    "c10d::allreduce_": "allreduce",
    "c10d::broadcast_": "broadcast",
    "c10d::_allgather_base_": "_allgather_base",
    "c10d::_reduce_scatter_base_": "_reduce_scatter_base",
}


def starter(
    target: str, group: object, device: torch.device, *, reduction: object, root: object
) -> Callable[[torch.Tensor, torch.Tensor], Any] | None:
    """What a functional collective starts, past the dispatcher.

    Args:
        target: Its qualified name, with overload.
        group: Name of the process group.
        device: Where the tensors lie.
        reduction: Name of the reduction, where there is one.
        root: Rank of the root, where there is one.

    Returns:
        A function of the tensor that is written and the one that is read; it returns the work. None
        if there is no such way here.
    """
    given = _asked(target, group, device, reduction, root)
    if given is None:
        return None
    run, listed, options = given
    if listed:
        return lambda out, _: run([out], options)
    return lambda out, source: run(out, source, options)


def _asked(
    target: str, group: object, device: torch.device, reduction: object, root: object
) -> tuple[Callable[..., Any], bool, Any] | None:
    """The backend's method, whether it takes a list, and the options."""
    name = target.partition("::")[2].removesuffix(".default")
    given = compat.collective_options(name, reduction=reduction, root=root)
    backend = compat.group_backend(group, device) if isinstance(group, str) else None
    if given is None or backend is None:
        return None
    method, options = given
    return getattr(backend, method), method in ("allreduce", "broadcast"), options


def launcher(
    event: Event, values: dict[str, Any]
) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """What the functional collective that runs for ``event`` does, past the dispatcher.

    Args:
        event: A call that runs by its row.
        values: Its arguments by name.

    Returns:
        A function of the tensor that is written and the one that is read; None if there is no
        such way here.
    """
    assert event.row is not None
    source, register = values.get("input"), compat.register_work()
    if register is None or not isinstance(source, torch.Tensor) or source.is_complex():
        return None
    given = _asked(
        event.row.target,
        event.engine or values.get("group_name"),
        source.device,
        values.get("reduce_op"),
        values.get("src"),
    )
    if given is None:
        return None
    run, listed, options = given
    if listed:
        return lambda out, _: register(out, run([out], options))
    return lambda out, source: register(out, run(out, source, options))


def front_of(
    event: Event, args: Any, form: Functional, claims: tuple[tuple[int, int], ...]
) -> Callable[..., Any] | None:
    """Serves a ``c10d::`` call where Python makes it.

    Args:
        event: What the schedule expects; the call was served as it.
        args: The arguments with which the op came to the dispatcher.
        form: Its functional form.
        claims: Storages, each with the number of uses that are the session's own.

    Returns:
        A function of the group and its method's arguments; it returns the work, or `MISS`. None if
        the call needs more.
    """
    name = event.call.op._schema.name
    if name not in _METHODS or event.leaving or event.results or event.engine:
        return None
    listed = isinstance(args[0], list)
    tensors = tuple(args[0]) if listed else (args[0], args[1])
    group = compat.group_by_name(form.args[-1])
    backend = compat.group_backend(form.args[-1], form.written.device)
    if backend is None or any(x.is_complex() for x in tensors):
        return None
    bound: dict[int, int] = {}
    given = {"input": form.args[0], "out": form.written}
    for b in event.binds:
        bound[id(given[b.head])] = b.address
    stages = [(_index(tensors, given[s.head]), s) for s in event.stages]
    back = [(i, stage.view) for i, stage in stages if stage.copy_back]
    wants = [(x.shape, x.dtype, bound.get(id(x), 0)) for x in tensors]
    method = _METHODS[name]
    launch = getattr(backend, method)
    row = event.row
    by_row = None
    if row is not None and row.one_sided:
        by_row = _row_of(event, form, tensors)
    reduces = name in ("c10d::allreduce_", "c10d::_reduce_scatter_base_")
    reduction = compat.reduction_named(form.args[1]) if reduces else None
    root = form.args[1] if name == "c10d::broadcast_" else None
    first, ready = tuple(event.before), tuple(event.ready)
    copied, after = tuple(event.copied), tuple(event.after)
    written = _index(tensors, form.written)
    asynchronous = event.call.asynchronous
    uses, modes = compat.storage_use_count, compat.dispatch_modes
    finished, kind, count = compat.finished(), compat.group_options(method), 2 if listed else 3
    acts = (*first, *ready, *copied, *after)
    if name == "c10d::allreduce_" and not (acts or stages or by_row or asynchronous):
        return _plain_reduce(group, kind, wants[0], reduction, claims, launch)

    def front(its: Any, args: Any) -> Any:
        if its is not group or len(args) != count or modes():
            return MISS
        options, found = args[-1], args[0] if listed else args[:2]
        if options.__class__ is not kind or options.asyncOp is not asynchronous:
            return MISS
        if listed and (found.__class__ is not list or len(found) != 1):
            return MISS
        for tensor, (shape, dtype, address) in zip(found, wants, strict=True):
            if tensor.__class__ not in _PLAIN or tensor.shape != shape:
                return MISS
            if tensor.dtype is not dtype or (address and tensor.data_ptr() != address):
                return MISS
        if reduces and not (options.reduceOp == reduction):  # noqa: SIM201 (it has only that)
            return MISS
        if root is not None and (options.rootRank != root or options.rootTensor):
            return MISS
        for storage, own in claims:
            if uses(storage) > own:
                return MISS
        OWN.depth += 1
        try:
            for act in first:
                act()
            original = found
            if stages:
                found = list(found)
                for i, stage in stages:
                    for act in stage.ready:
                        act()
                    if stage.copy_in:
                        stage.view.copy_(found[i])
                    found[i] = stage.view
            for act in ready:
                act()
            if by_row is not None:
                by_row(found)
                work = finished
            else:
                work = launch(found, options) if listed else launch(*found, options)
                if asynchronous:
                    for act in after:
                        act()
                    return _finish_later(work, copied, back, original, written)
                if back and work is not None:
                    work.wait()
            for act in copied:
                act()
            for i, view in back:
                original[i].copy_(view)
            for act in after:
                act()
        finally:
            OWN.depth -= 1
        return work

    return front


def _plain_reduce(
    group: Any,
    kind: Any,
    want: tuple[Any, Any, int],
    reduction: Any,
    claims: tuple[tuple[int, int], ...],
    launch: Callable[..., Any],
) -> Callable[..., Any]:
    """The same for the most frequent call, an all-reduce of what is placed."""
    uses, modes = compat.storage_use_count, compat.dispatch_modes
    shape, dtype, address = want

    def front(its: Any, args: Any) -> Any:
        if its is not group or len(args) != 2 or modes():
            return MISS
        tensors, options = args
        if options.__class__ is not kind or options.asyncOp:
            return MISS
        if tensors.__class__ is not list or len(tensors) != 1:
            return MISS
        tensor = tensors[0]
        if tensor.__class__ not in _PLAIN or tensor.shape != shape or tensor.dtype is not dtype:
            return MISS
        if address and tensor.data_ptr() != address:
            return MISS
        if not (options.reduceOp == reduction):  # noqa: SIM201 (it has only that)
            return MISS
        for storage, own in claims:
            if uses(storage) > own:
                return MISS
        return launch(tensors, options)

    return front


def _index(tensors: Sequence[torch.Tensor], tensor: torch.Tensor) -> int:
    return next(i for i, x in enumerate(tensors) if x is tensor)


def _row_of(
    event: Event, form: Functional, tensors: Sequence[torch.Tensor]
) -> Callable[[Any], None]:
    """How the collective runs by its row, which is none of the process group's."""
    assert event.row is not None
    values = bound_values(event, form.args, form.kwargs)
    out = _index(tensors, values[event.row.out])
    values[event.group_argument] = event.group
    picks: list[tuple[int, Any]] = []
    for argument in event.target._schema.arguments:
        if not argument.kwarg_only:
            value = values[argument.name]
            there = isinstance(value, torch.Tensor)
            picks.append((_index(tensors, value), None) if there else (-1, value))
    named = event.target._schema.arguments[-1].name == "out"
    target = IMPLEMENTATIONS.get(event.target._schema.name, event.target)

    def by_row(found: Any) -> None:
        given = [value if i < 0 else found[i] for i, value in picks]
        if named:
            target(*given, out=found[out])
        else:
            target(*given)

    return by_row


def _finish_later(work: Any, copied: Any, back: Any, original: Any, written: int) -> Any:
    """See the function of the same name in `symmplan.integrate.eager.serve`."""

    @own_work
    def finish() -> None:
        for act in copied:
            act()
        for i, view in back:
            original[i].copy_(view)

    return compat.watched_handle(work, finish, original[written])


class Caught:
    """What functions that catch calls know of a session, until it is left.

    Torch keeps kernels for ever, also those that are removed: they hold this, and no session.
    """

    __slots__ = ("faults", "fits", "line", "session")

    def __init__(self, session: Session) -> None:
        self.session: Session | None = session
        self.faults, self.line = session.faults, session.line
        self.fits = session.line.lanes.fits

    def forget(self) -> None:
        """No call is caught any more."""
        self.session = None
        self.line.quicks = []
        del self.faults, self.line, self.fits


def install_fronts(caught: Caught, ops: Iterable[Any]) -> Callable[[], None]:
    """Catch calls of process groups' methods and of ops. See [Note: past the dispatcher].

    Args:
        caught: The session.
        ops: What the program calls.

    Returns:
        What undoes it.
    """
    undo = []
    for op in dict.fromkeys(ops):
        if op is None:
            continue
        names = compat.group_method_names(_METHODS.get(op._schema.name, ""))
        undo += [compat.replace_group_method(n, _method(caught, op)) for n in names]
        if op.namespace == "_c10d_functional":
            undo.append(compat.replace_op_call(op, _call(caught, op)))

    def remove() -> None:
        for act in undo:
            act()

    return remove


def _method(caught: Caught, op: Any) -> Callable[[Any], Callable[..., Any]]:
    def make(original: Any) -> Callable[..., Any]:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            if caught.session is None:
                return original(group, *args, **kwargs)
            line = caught.line
            quicks, at = line.quicks, line.at
            if at < len(quicks) and not OWN.depth:
                quick = quicks[at]
                if (
                    quick is not None
                    and quick.front is not None
                    and quick.op is op
                    and not kwargs
                    and caught.fits(quick.role)
                ):
                    try:
                        work = quick.front(group, args)
                    except BaseException as error:
                        caught.faults.found(error)
                        raise
                    if work is not MISS:
                        line.at = at + 1
                        return work
            return original(group, *args, **kwargs)

        return method

    return make


def _call(caught: Caught, op: Any) -> Callable[[Any], Callable[..., Any]]:
    alone = compat.nobody_looks()

    def make(original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if caught.session is None:
                return original(*args, **kwargs)
            line = caught.line
            quicks, at = line.quicks, line.at
            if at < len(quicks) and args and not kwargs and not OWN.depth:
                quick = quicks[at]
                if (
                    quick is not None
                    and quick.front is not None
                    and quick.op is op
                    and caught.fits(quick.role)
                    and alone(args[0])
                ):
                    try:
                        result = quick.front(args)
                    except BaseException as error:
                        caught.faults.found(error)
                        raise
                    if result is not MISS:
                        line.at = at + 1
                        return result
            return original(*args, **kwargs)

        return call

    return make
