"""A planned call: what is expected of its arguments, and what is done with them.

[Note: short ways]
    What a declared call costs the host is for the most part Python's. So each planned call has a
    function that compares the arguments at their places and runs its steps. Where anything is not
    as expected it gives up before it did anything, and `Session.serve` finds out what is wrong.

[Note: past the dispatcher]
    `torch.distributed`'s collectives reach the dispatcher as ops that take the process group and
    the reduction as boxed objects. A kernel in Python gets those boxed anew for every call, and
    hands them back when it goes on to the op itself: twice as long as the collective takes to
    launch. So ``dist.all_reduce`` and its like are caught where Python calls the group's method.
    Functional collectives are caught where Python calls the op, if no mode, transform or autograd
    is there to see the call. What is not as planned, and whoever calls from C++, comes to the
    session's kernel in the dispatcher, as other declared ops do.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from symmplan.capture.c10d import FUNCTIONAL
from symmplan.capture.eager import signature
from symmplan.errors import RunError
from symmplan.integrate.eager.tape import Slot, in_order
from symmplan.memory.own import OWN, own_work
from symmplan.memory.races import LIVE
from symmplan.place.watching import watched
from symmplan.registry import bind_arguments
from symmplan.torch_private import c10d, dispatch, works

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.capture.c10d import Functional
    from symmplan.integrate.eager.faults import Faults
    from symmplan.integrate.eager.schedule import Event

__all__ = ["METHODS", "MISS", "counted", "is_tensors", "make_ready", "serve", "stands_for"]

#: What a short way returns if the call is not the expected one.
MISS: Any = object()

#: The op -> the method of a process group by which Python calls it, and of its backend.
METHODS = {op: c10d.GROUP_METHODS[form.partition("::")[2]] for op, form in FUNCTIONAL.items()}

#: Values that are compared as they are, and that a call is lowered with.
_WORDS = (bool, int, str, torch.dtype, torch.device)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def make_ready(events: Sequence[Event], faults: Faults) -> None:
    """Give each planned call what runs it, and its short way if it has one."""
    for event in events:
        if event.call.kind == "op":
            _ready_call(event, faults)
        else:
            _ready_memory(event, faults)


# What is expected.


def is_tensor(want: Any) -> bool:
    """Whether a signature is a tensor's."""
    return want.__class__ is tuple and len(want) == 2 and isinstance(want[1], torch.dtype)


def is_tensors(want: Any) -> bool:
    """Whether a signature is that of a list of tensors."""
    return want.__class__ is tuple and bool(want) and all(map(is_tensor, want))


def _fitting(
    wants: Sequence[Any], addresses: dict[int, int], claims: Sequence[tuple[int, int]]
) -> Callable[[Sequence[Any]], bool]:
    """Compares values with what was recorded, and sees that the bytes to be written are nobody's.

    Args:
        wants: What was recorded of each value.
        addresses: Of values that must lie where they did.
        claims: See `Event.marks`.
    """
    tensors: list[tuple[int, Any, Any]] = []
    words: list[tuple[int, Any, Any]] = []
    others: list[tuple[int, Any]] = []
    for i, want in enumerate(wants):
        if is_tensor(want):
            tensors.append((i, *want))
        elif want is float:
            words.append((i, float, None))
        elif isinstance(want, _WORDS) or callable(want):
            words.append((i, want.__class__, want))
        else:
            others.append((i, want))
    places, uses = tuple(addresses.items()), dispatch.storage_use_count

    def fits(values: Sequence[Any]) -> bool:
        for i, shape, dtype in tensors:
            tensor = values[i]
            if not isinstance(tensor, torch.Tensor):
                return False
            if tensor.shape != shape or tensor.dtype is not dtype:
                return False
        for i, kind, word in words:
            value = values[i]
            if value.__class__ is not kind or (word is not None and value != word):
                return False
        for i, want in others:
            if signature(values[i]) != want:
                return False
        for i, address in places:
            if values[i].data_ptr() != address:
                return False
        for storage, planned in claims:  # noqa: SIM110 (a generator costs as much as all this)
            if uses(storage) > planned:
                return False
        return True

    return fits


# Declared calls.


def stands_for(event: Event) -> dict[str, Any]:
    """What stands for a placed call's arguments when it is lowered: slots, and plain values."""
    found: dict[str, Any] = {}
    recorded = event.recorded
    elements = len(recorded)
    for i, (name, value) in enumerate(recorded.items()):
        if i in event.lists:
            found[name] = [Slot(elements + j) for j in range(len(value))]
            elements += len(value)
        else:
            found[name] = value if isinstance(value, _WORDS) else Slot(i)
    return found


def _ready_call(event: Event, faults: Faults) -> None:
    if event.tape is None:
        return
    run = event.run = _runner(event, faults)
    addresses = {slot: event.arguments[site].data_ptr() for slot, site in event.bound.items()}
    fits = _fitting(list(event.recorded.values()), addresses, event.marks)
    if event.form:
        event.short = _front(event, fits, run)
        return
    defaults = [a.default_value for a in event.overload._schema.arguments]
    needs_keys, frame_of = event.tape.needs_keys, event.frame

    def short(behind: Any, args: Any) -> Any:
        if len(args) != len(defaults):
            if len(args) > len(defaults):
                return MISS
            args = (*args, *defaults[len(args) :])
        if needs_keys and behind is None:
            return MISS
        frame = frame_of(args, behind)
        return run(frame) if fits(frame) else MISS

    event.short = short


def _runner(event: Event, faults: Faults) -> Callable[[list[Any]], Any]:
    """What makes a call, given its frame, and returns what the program gets."""
    tape, gives = event.tape, event.gives
    assert tape is not None
    assert gives is not None
    steps = [*event.before, *in_order(tape.begin)]
    if event.pends:
        gives = _finishing(event, gives)
    else:
        steps += in_order(tape.late)
    steps += event.after

    def run(frame: list[Any]) -> Any:
        OWN.depth += 1
        try:
            for step in steps:
                step(frame)
            return gives(frame)
        except BaseException as error:
            faults.found(error)
            raise
        finally:
            OWN.depth -= 1

    return run


def _finishing(event: Event, gives: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Gives a work that copies back what was staged when it is waited for.

    Also where nothing was: torch's own works hold their tensors for as long as they live.
    """
    assert event.tape is not None
    late, written = in_order(event.tape.late), stands_for(event).get("out", Slot(0)).index

    def give(frame: list[Any]) -> Any:
        @own_work
        def finish() -> None:
            for step in late:
                step(frame)

        return works.watched_handle(gives(frame), finish, frame[written])

    return give


def _front(
    event: Event,
    fits: Callable[[Sequence[Any]], bool],
    run: Callable[[list[Any]], Any],
) -> Callable[[Any, Any], Any] | None:
    """Serves a ``c10d::`` call where Python makes it; None if the group's methods are others.

    Returns:
        A function of the group and its method's arguments; it returns the work, or `MISS`.
    """
    name, (_, *words) = event.call.op._schema.name, event.call.args
    method, group = METHODS[name], c10d.group_by_name(words[-1])
    if type(group) is not torch.distributed.ProcessGroup:
        return None
    listed = method in ("allreduce", "broadcast")
    asynchronous, kind = event.call.asynchronous, c10d.group_options(method)
    reduces = hasattr(kind, "reduceOp")
    reduction = c10d.reduction_named(words[0]) if reduces else None
    root = words[0] if method == "broadcast" else None
    modes, count = dispatch.dispatch_modes, 2 if listed else 3

    def front(its: Any, args: Any) -> Any:
        if its is not group or len(args) != count or modes():
            return MISS
        options = args[-1]
        if options.__class__ is not kind or options.asyncOp is not asynchronous:
            return MISS
        if listed:
            tensors = args[0]
            if tensors.__class__ is not list or len(tensors) != 1:
                return MISS
        else:
            tensors = args[1::-1]  # what is read, what is written
        for tensor in tensors:
            if tensor.__class__ not in _PLAIN:
                return MISS
        if reduces and not (options.reduceOp == reduction):  # noqa: SIM201 (it has only that)
            return MISS
        if root is not None and (options.rootRank != root or options.rootTensor):
            return MISS
        frame = event.frame((tensors[0], *words, *tensors[1:]))
        return run(frame) if fits(frame) else MISS

    return front


def serve(
    event: Event, faults: Faults, behind: Any, args: Any, kwargs: Any, form: Functional | None
) -> Any:
    """Run ``event``, which the call is known to fit, for whoever comes through the dispatcher.

    ``form`` is the functional form of a ``c10d::`` call. Returns what the op returns.

    Raises:
        RunError: An argument lies elsewhere than planned.

    Collective: as the op.
    """
    with faults.guarded():
        if event.run is None:  # nothing of it is in a placement
            original = watched(event.call.op) if LIVE else event.call.op.redispatch
            for step in event.before:
                step([])
            result = original(behind, *args, **kwargs)
            for step in event.after:
                step([])
            return result
        given = (args, kwargs) if form is None else (form.args, form.kwargs)
        frame = event.frame(tuple(bind_arguments(event.overload, *given).values()), behind)
        for slot, site in event.bound.items():
            place, found = event.arguments[site].data_ptr(), frame[slot].data_ptr()
            if found != place:
                raise RunError(
                    f"{event.name}: argument {site.head!r} is not the tensor that it was when the "
                    f"iteration was recorded, buffer {site.buffer!r}",
                    expected=f"a tensor at {place:#x}",
                    got=f"one at {found:#x}",
                    fix="pass the same tensor in every iteration, or call session.replan() on all "
                    "ranks",
                    op=event.name,
                    buffer=site.buffer,
                )
    result = event.run(frame)
    if form is None:
        return result
    work = works.finished() if result is None else result
    if event.pends:
        event.work = work
    return form.results(work.boxed())


# Memory.


def _ready_memory(event: Event, faults: Faults) -> None:
    place = next((lent.tensor for lent in event.lent.values()), None)
    writes, before, after = event.call.kind == "out", event.before, event.after

    def run(make: Any, args: Any, kwargs: Any) -> torch.Tensor:
        if before:
            faults.perform(before)
        if place is None:
            result: torch.Tensor = make(*args, **kwargs)
        else:
            if writes:
                with own_work:
                    make(*args, **kwargs, out=place)
            result = place.detach()
        if after:
            faults.perform(after)
        return result

    event.run = run
    wants, named = event.call.args, event.call.kwargs
    if any(isinstance(value, (tuple, dict)) for value in named.values()):
        return  # there may be tensors
    fits = _fitting(wants, {}, event.marks)

    def short(kind: str, make: Any, args: Any, kwargs: Any) -> Any:
        values = (make, *args)
        if kind != event.call.kind or len(values) != len(wants):
            return MISS
        if kwargs != named or not fits(values):
            return MISS
        return run(make, args, kwargs)

    event.short = short


def counted(events: Sequence[Event]) -> Counter[str]:
    """What the calls of ``events`` add to `Stats`."""
    return Counter(
        served=sum(e.tape is not None for e in events),
        plain=sum(e.call.kind == "op" and e.tape is None for e in events),
        copies=sum(e.copies for e in events),
    )
