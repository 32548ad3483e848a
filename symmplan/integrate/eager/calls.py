"""A planned call, ready to be made: what is expected of its arguments, and what is done with them.

[Note: short ways]
    What a declared call costs the host is for the most part Python's. So each planned call has a
    function that compares the arguments at their places and runs its steps. Where anything is not
    as expected it gives up before it did anything, and `Session.serve` finds out what is wrong.

    Calls that are alike, down to the bytes that they use, share one function: in a program of a
    hundred layers it stays in the processor's caches, which is worth more than all the rest.

[Note: past the dispatcher]
    `torch.distributed`'s collectives reach the dispatcher as ops that take the process group and
    the reduction as boxed objects. A kernel in Python gets those boxed anew for every call, and
    hands them back when it goes on to the op itself: twice as long as the collective takes to
    launch. So ``dist.all_reduce`` and its like are caught where Python calls the group's method.
    Their frames begin with the tensor that is read, the one that is written, what launches the
    collective, and the program's options for it. Functional collectives are caught where Python
    calls the op, if no mode, transform or autograd is there to see the call. What is not as
    planned, and whoever calls from C++, comes to the session's kernel in the dispatcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define

from symmplan import _compat as compat
from symmplan.capture.eager import signature
from symmplan.integrate.eager.direct import METHODS, MISS
from symmplan.integrate.eager.expected import WORDS, expected_of, fitting, is_tensor
from symmplan.integrate.eager.tape import Slot, frameless
from symmplan.memory.own import OWN, own_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.integrate.eager.lanes import Lanes
    from symmplan.integrate.eager.schedule import Event
    from symmplan.integrate.eager.tape import Step

__all__ = ["Line", "Ready", "frame_of", "ready_calls", "runner", "stands_for"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@define(eq=False)
class Ready:
    """A planned call's short way.

    Attributes:
        op: The op that the program calls; ``"empty"`` or ``"out"`` for memory.
        role: The stream on which it does.
        call: Of the call's dispatch keys and its arguments, or of the function and its arguments.
            Returns what the program gets, or `MISS`.
        front: Of a process group and the arguments of its method, or of the op's arguments; see
            [Note: past the dispatcher]. None if there is none.
    """

    op: Any
    role: str
    call: Callable[..., Any]
    front: Callable[..., Any] | None = None


@define(eq=False)
class Line:
    """Where in the schedule the program is.

    Attributes:
        lanes: The streams.
        calls: The short way of each call that has one; empty where nothing is served.
        at: Which call comes next.
        before: How many calls the iterations before this one made.
    """

    lanes: Lanes
    calls: Sequence[Ready | None] = ()
    at: int = 0
    before: int = 0

    def turn(self) -> None:
        """An iteration is over."""
        self.before, self.at = self.before + self.at, 0


def _missing(_keys: Any, _args: Any) -> Any:
    """Who comes this way was not caught in front: from C++, under a mode, or with other words."""
    return MISS


def frame_of(event: Event, given: Sequence[Any], *more: Any) -> list[Any]:
    """The frame of a call. See [Note: frames] in `symmplan.integrate.eager.tape`.

    Args:
        event: The call.
        given: All arguments of the op, in the order of its schema; or the tensors and what launches
            them, see [Note: past the dispatcher].
        more: The dispatch keys.
    """
    frame = list(given)
    for i in event.lists:
        frame.extend(frame[i])
    frame.extend(more)
    frame.extend([None] * (event.size - len(frame)))
    return frame


def runner(event: Event, gives: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """What makes a call, given its frame, and returns what the program gets."""
    tape = event.tape
    assert tape is not None
    first = (*map(frameless, event.before), *tape.begin.all())
    late, after = tuple(tape.late.all()), tuple(map(frameless, event.after))
    if event.form:
        return _collective(event, first, late, after, gives)
    steps = (*first, *late, *after)

    def run(frame: list[Any]) -> Any:
        OWN.depth += 1
        try:
            for step in steps:
                step(frame)
            return gives(frame)
        finally:
            OWN.depth -= 1

    return run


def _collective(
    event: Event,
    first: Sequence[Step],
    late: Sequence[Step],
    after: Sequence[Step],
    gives: Callable[[list[Any]], Any],
) -> Callable[[list[Any]], Any]:
    """The same for a ``c10d::`` call, which returns a work. ``gives`` takes it out of the frame."""
    written, pends, rest = int(event.has_out), event.pends, (*late, *after)
    waits = any(s.copy_back for s in event.stages) or bool(event.engine)

    def run(frame: list[Any]) -> Any:
        OWN.depth += 1
        try:
            for step in first:
                step(frame)
            work = gives(frame)
            pending = pends and work is not None
            if waits and not pending and work is not None:  # none of what ran on this stream
                work.wait()
            for step in after if pending else rest:
                step(frame)
            return _finish_later(work, late, frame, written) if pending else work
        finally:
            OWN.depth -= 1

    return run


def _finish_later(work: Any, late: Sequence[Step], frame: list[Any], written: int) -> Any:
    """A work that copies back what was staged when it is waited for.

    Also where nothing was: torch's own works hold their tensors for as long as they live.
    """

    @own_work
    def finish() -> None:
        for step in late:
            step(frame)

    return compat.watched_handle(work, finish, frame[written])


def ready_calls(
    events: Sequence[Event], perform: Callable[[Sequence[Callable[[], None]]], None]
) -> list[Ready | None]:
    """The short ways of planned calls, None for those that have none.

    Args:
        events: The calls.
        perform: Does what is to be done besides making memory, such as barriers.
    """
    known: dict[Any, Ready] = {}
    found = []
    for event in events:
        if event.call.kind == "op":
            found.append(_ready_call(event, known))
        else:
            event.run = _memory_runner(event, perform)
            found.append(_ready_memory(event, known))
    return found


def _ready_call(event: Event, known: dict[Any, Ready]) -> Ready | None:
    """The short way of a declared call; None if it has none.

    Args:
        event: The call.
        known: The short ways so far, to be shared. See [Note: short ways].
    """
    tape, run = event.tape, event.run
    if tape is None or run is None or event.watched:
        return None
    claims = event.marks()
    if event.form:
        wants = [event.call.args[0], *event.call.kwargs.values()]
        front = _front(event, wants, claims, run)
        if front is None:
            return None
        made = Ready(event.call.op, event.stream, _missing, front)
        expected: Any = (tuple(wants), event.call.args[1:], event.call.asynchronous)
        expected = (*expected, tuple(b.address for b in event.binds))
    else:
        if event.call.kwargs:
            return None
        arguments = expected_of(event)
        call = _call(event, fitting(arguments, claims), run)
        front = None if tape.needs_keys else lambda args: call(None, args)
        made = Ready(event.call.op, event.stream, call, front)
        expected = arguments.key()
    acts = (*event.before, *tape.begin.acts(), *tape.late.acts(), *event.after)
    key = (event.call.op, event.stream, expected, claims, tuple(tape.keys), event.gives)
    return known.setdefault((*key, tuple(map(id, acts))), made)


def _call(
    event: Event, fits: Callable[[Any], bool], run: Callable[[list[Any]], Any]
) -> Callable[[Any, Any], Any]:
    tail = tuple(event.defaults[len(event.call.args) :])
    blank = (None,) * (event.size - len(event.names) - 1)
    if event.lists:

        def call(keys: Any, args: Any) -> Any:
            return run(frame_of(event, (*args, *tail), keys)) if fits(args) else MISS

        return call

    def lean(keys: Any, args: Any) -> Any:
        return run([*args, *tail, keys, *blank]) if fits(args) else MISS

    return lean


def _front(
    event: Event,
    wants: Sequence[Any],
    claims: tuple[tuple[int, int], ...],
    run: Callable[[list[Any]], Any],
) -> Callable[..., Any] | None:
    """Serves a ``c10d::`` call where Python makes it.

    Returns:
        A function of the group and its method's arguments; it returns the work, or `MISS`.
    """
    name, args = event.call.op._schema.name, event.call.args
    method, group = METHODS[name], compat.group_by_name(args[-1])
    backend = compat.group_backend(args[-1], event.device)
    if backend is None or any(dtype.is_complex for _, dtype in wants):
        return None
    native, listed = getattr(backend, method), method in ("allreduce", "broadcast")
    launch = event.launch
    if launch is None and listed:
        launch = lambda out, _, options: native([out], options)  # noqa: E731
    elif launch is None:
        launch = native
    addresses = {b.head: b.address for b in event.binds}
    tensors = [(*wants[0], addresses.get("input", 0))]
    tensors += [(*want, addresses.get("out", 0)) for want in wants[1:]]
    reduces = name in ("c10d::allreduce_", "c10d::_reduce_scatter_base_")
    reduction = compat.reduction_named(args[1]) if reduces else None
    root = args[1] if name == "c10d::broadcast_" else None
    asynchronous, kind = event.call.asynchronous, compat.group_options(method)
    uses, modes, count = compat.storage_use_count, compat.dispatch_modes, 2 if listed else 3
    blank = (None,) * (event.size - 4)

    def front(its: Any, args: Any) -> Any:
        if its is not group or len(args) != count or modes():
            return MISS
        options = args[-1]
        if options.__class__ is not kind or options.asyncOp is not asynchronous:
            return MISS
        if listed:
            found = args[0]
            if found.__class__ is not list or len(found) != 1:
                return MISS
        else:
            found = args[1::-1]  # what is read, what is written
        for tensor, (shape, dtype, address) in zip(found, tensors, strict=True):
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
        return run([found[0], found[-1], launch, options, *blank])

    return front


def _ready_memory(event: Event, known: dict[Any, Ready]) -> Ready | None:
    """The short way through `symmplan.empty` and `symmplan.out`; None if it has none."""
    function, *recorded = event.call.args
    wanted, named = tuple(recorded), event.call.kwargs
    if event.watched or any(isinstance(value, (tuple, dict)) for value in named.values()):
        return None  # there may be tensors
    claims, uses, run = event.marks(), compat.storage_use_count, event.run
    assert run is not None
    tensors = [(i, *w) for i, w in enumerate(wanted) if is_tensor(w)]
    floats = [i for i, w in enumerate(wanted) if w is float]
    others = [(i, w) for i, w in enumerate(wanted) if not is_tensor(w) and w is not float]

    def call(make: Any, args: Any, kwargs: Any) -> Any:
        if make is not function or len(args) != len(wanted) or kwargs != named:
            return MISS
        for i, shape, dtype in tensors:
            have = args[i]
            if not isinstance(have, torch.Tensor):
                return MISS
            if have.shape != shape or have.dtype is not dtype:
                return MISS
        for i in floats:
            if args[i].__class__ is not float:
                return MISS
        for i, want in others:
            value = signature(args[i]) if isinstance(args[i], (list, tuple)) else args[i]
            if value.__class__ is not want.__class__ or value != want:
                return MISS
        for storage, own in claims:
            if uses(storage) > own:
                return MISS
        return run(make, args, kwargs)

    acts = tuple(map(id, (*event.before, *event.after)))
    place = next((id(lent) for lent in event.lent.values()), None)
    parts = (event.call.kind, event.stream, id(function), repr(wanted), repr(named), claims)
    return known.setdefault((*parts, acts, place), Ready(event.call.kind, event.stream, call))


def _memory_runner(
    event: Event, perform: Callable[[Sequence[Callable[[], None]]], None]
) -> Callable[[Any, Any, Any], torch.Tensor]:
    """What makes a call of `symmplan.empty` or `symmplan.out`.

    Args:
        event: The call.
        perform: Does what is to be done besides, such as barriers.
    """
    lent = next(iter(event.lent.values()), None)
    place = None if lent is None else lent.tensor
    writes, before, after = event.call.kind == "out", tuple(event.before), tuple(event.after)

    def run(make: Any, args: Any, kwargs: Any) -> torch.Tensor:
        if before:
            perform(before)
        if place is None:
            result: torch.Tensor = make(*args, **kwargs)
        else:
            if writes:
                with own_work:
                    make(*args, **kwargs, out=place)
            result = place.detach()
        if after:
            perform(after)
        return result

    return run


def stands_for(event: Event) -> dict[str, Any]:
    """What stands for a placed call's arguments when it is lowered: slots, and plain values."""
    found: dict[str, Any] = {}
    recorded = dict(zip(event.names, event.call.args, strict=False)) | event.call.kwargs
    if event.form:
        found.update(recorded)
        found["input"] = Slot(0)
        if event.has_out:
            found["out"] = Slot(1)
        return found
    elements = len(event.names)
    for i, (name, default) in enumerate(zip(event.names, event.defaults, strict=True)):
        value = recorded.get(name, default)
        if i in event.lists:
            found[name] = [Slot(elements + j) for j in range(len(value))]
            elements += len(value)
        else:
            found[name] = value if isinstance(value, WORDS) else Slot(i)
    return found
