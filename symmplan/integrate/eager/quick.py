"""The short way through a call that is exactly what the schedule expects.

[Note: short ways]
    What a declared call costs the host is for the most part Python's. So when a call was served for
    the first time, a function is made of it that compares the arguments at their places, and runs
    what the long way would with the fewest calls. Where anything is not as expected it gives up
    before it did anything, and the long way finds out what is wrong. Group and element type are
    compared as objects.

    Plain collectives, which are most calls, go through the shortest of these functions.

    Calls that are alike, down to the bytes that they use, share one function: in a program of a
    hundred layers it stays in the processor's caches, which is worth more than all the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from symmplan import _compat as compat
from symmplan.integrate.eager.direct import MISS, front_of, launcher
from symmplan.integrate.eager.expected import Arguments, arguments_of, fitting
from symmplan.memory.ops import IMPLEMENTATIONS
from symmplan.memory.own import OWN

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.capture.c10d import Functional
    from symmplan.integrate.eager.lanes import Lanes
    from symmplan.integrate.eager.schedule import Event, Lent, Stage

__all__ = ["MISS", "Line", "Quick", "quick_call"]


@define(eq=False)
class Quick:
    """A short way.

    Attributes:
        op: The op that the program calls; ``"empty"`` or ``"out"`` for memory.
        role: The stream on which it does.
        call: Of the call's dispatch keys and its arguments, or of the function and its arguments.
            Returns what the program gets, or `MISS`.
        front: Of a process group and the arguments of its method, or of the op's arguments; see
            `symmplan.integrate.eager.direct`. None if there is none.
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
        quicks: The short way of each call that has one by now; empty where nothing is served.
        at: Which call comes next.
        before: How many calls the iterations before this one made.
        known: Short ways to be shared; see [Note: short ways].
    """

    lanes: Lanes
    quicks: list[Quick | None] = field(factory=list)
    at: int = 0
    before: int = 0
    known: dict[Any, Quick] = field(factory=dict)

    def turn(self) -> None:
        """An iteration is over."""
        self.before, self.at = self.before + self.at, 0

    def learn(self, at: int, key: Any, quick: Quick | None) -> None:
        """``quick`` serves call ``at`` from now on."""
        if quick is not None and at < len(self.quicks):
            self.quicks[at] = self.known.setdefault(key, quick)


def quick_call(
    event: Event, args: Any, kwargs: Any, form: Functional | None
) -> tuple[Any, Quick | None]:
    """A short way for an op's calls like this one.

    Args:
        event: What the schedule expects; the call was served as it.
        args: The call's arguments.
        kwargs: The same by name.
        form: The functional form of a ``c10d::`` call.

    Returns:
        What those that may share it have in common, and it; None if the event needs more.
    """
    if kwargs or not event.placed or (form is None and any(s.copy_back for s in event.stages)):
        return None, None
    expected = arguments_of(event, args, form)
    if expected is None:
        return None, None
    claims = event.marks()
    front: Callable[..., Any] | None = None
    if form is not None:
        front = front_of(event, args, form, claims)
    fits = fitting(expected, claims)
    call: Callable[[Any, Any], Any] | None
    if form is not None:
        call = None if front is None else _missing
    elif event.row is not None:
        front = _lean(event, args, fits, expected)
        call = _by_row(event, args, fits, expected) if front is None else _behind(front)
    else:
        call = _plainly(event, fits, expected)
    if call is None:
        return None, None
    acts = (
        *(*event.before, *event.filling, *event.ready),
        *(*event.landing, *event.copied, *event.after),
    )
    key = (
        event.call.op,
        event.stream,
        form is None or (event.call.asynchronous, form.args[1:]),
        expected.key(),
        claims,
        tuple(map(id, acts)),
        id(event.results.get(())),
    )
    return key, Quick(event.call.op, event.stream, call, front)


def _missing(_keys: Any, _args: Any) -> Any:
    """Who comes this way was not caught in front: from C++, under a mode, or with other words."""
    return MISS


def _is_another(event: Event) -> bool:
    """Whether what runs is no collective of the process group."""
    return event.row is not None and event.row.one_sided


def _as_called(
    event: Event, fits: Callable[[Any], bool], expected: Arguments
) -> Callable[[Any, Any], Any]:
    """An op that runs as it was called, on placements."""
    redispatch, after = compat.redispatch_of(event.call.op), compat.keyset_after_select()
    stages = tuple(expected.stages)
    first = (*event.before,)
    ready, last = tuple(event.ready), (*event.copied, *event.after)

    def call(keys: Any, args: Any) -> Any:
        if not fits(args):
            return MISS
        OWN.depth += 1
        try:
            for act in first:
                act()
            if stages:
                args = _staged(args, stages)
            for act in ready:
                act()
            result = redispatch(keys & after, *args)
            for act in last:
                act()
        finally:
            OWN.depth -= 1
        return result

    return call


def _staged(args: Any, stages: tuple[tuple[int, Stage], ...]) -> list[Any]:
    given = list(args)
    for i, stage in stages:
        for act in stage.ready:
            act()
        if stage.copy_in:
            stage.view.copy_(given[i])
        given[i] = stage.view
    return given


def _plainly(
    event: Event, fits: Callable[[Any], bool], expected: Arguments
) -> Callable[[Any, Any], Any] | None:
    """An op that is called as it is, or in the variant that writes where it is told."""
    if not event.results:
        return _as_called(event, fits, expected)
    if event.results.keys() != {()}:
        return None
    variant = None if event.variant is None else event.variant
    names = event.names
    order: list[tuple[str, int]] = []
    if variant is not None:
        for argument in variant._schema.arguments:
            at = names.index(argument.name) if argument.name in names else -1
            order.append((argument.name if argument.kwarg_only else "", at))
    original, after = compat.redispatch_of(event.call.op), compat.keyset_after_select()
    landing = tuple(event.landing)

    def make(keys: Any, given: Any, out: torch.Tensor) -> None:
        if variant is None:
            result = original(keys & after, *given)
            for act in landing:
                act()
            out.copy_(result)
            return
        chosen, named = [], {}
        for name, at in order:
            value = out if at < 0 else given[at]
            if name:
                named[name] = value
            else:
                chosen.append(value)
        variant(*chosen, **named)

    if variant is not None and sum(at < 0 for _, at in order) != 1:
        return None
    return _into(event, fits, expected, make)


def _by_row(
    event: Event, args: Any, fits: Callable[[Any], bool], expected: Arguments
) -> Callable[[Any, Any], Any] | None:
    """An op that runs as another one, which writes its result where it is told."""
    row = event.row
    assert row is not None
    if row.each or len(args) != len(event.names):
        return None
    if row.out != "return" and (row.out not in event.names or event.stages):
        return None
    within = -1 if row.out == "return" else event.names.index(row.out)
    schema = event.target._schema
    picks = [event.names.index(a.name) for a in schema.arguments if a.name in event.names]
    out_given = schema.arguments[-1].name == "out"
    if len(picks) != len(schema.arguments) - out_given:
        return None
    source = event.names.index("input")
    launch = launcher(event, dict(zip(event.names, args, strict=True)))
    if launch is None and event.engine:
        return None
    target, inplace = IMPLEMENTATIONS.get(schema.name, event.target), row.inplace
    redispatch, after = compat.redispatch_of(event.target), compat.keyset_after_select()
    behind_own = not _is_another(event)  # it is declared, too: go past the session's kernel

    def make(keys: Any, given: Any, out: torch.Tensor) -> None:
        if launch is not None:
            launch(out, given[source])
            return
        chosen = [out if inplace and i == source else given[i] for i in picks]
        if behind_own:
            redispatch(keys & after, *chosen, **({"out": out} if out_given else {}))
        elif out_given:
            target(*chosen, out=out)
        else:
            target(*chosen)

    return _into(event, fits, expected, make, within, source if inplace else -1)


def _lean(
    event: Event, args: Any, fits: Callable[[Any], bool], expected: Arguments
) -> Callable[[Any], Any] | None:
    """A plain collective past the dispatcher, where nothing else is declared, so that nobody asks.

    Its input may be copied, its result is a placement or the input itself.
    """
    row, lent = event.row, event.lent.get((), event.leaving.get(()))
    late = () if event.leaving else event.copied
    if event.before or event.ready or late or event.after:
        return None
    if any(stage.ready for stage in event.stages):
        return None
    if row is None or row.inplace or row.each or len(args) != len(event.names):
        return None
    launch = launcher(event, dict(zip(event.names, args, strict=True)))
    if launch is None:
        return None
    source = event.names.index("input")
    if lent is None:
        if row.out != "input" or expected.stages:
            return None

        def in_place(args: Any) -> Any:
            if not fits(args):
                return MISS
            tensor = args[source]
            launch(tensor, tensor)
            return tensor

        return in_place
    out, give = lent.tensor, lent.tensor.detach
    if not expected.stages:

        def bound(args: Any) -> Any:
            if not fits(args):
                return MISS
            launch(out, args[source])
            return give()

        return bound
    at, stage = expected.stages[0]
    if len(expected.stages) > 1 or at != source or not stage.copy_in:
        return None
    copy = stage.view.copy_

    def staged(args: Any) -> Any:
        if not fits(args):
            return MISS
        launch(out, copy(args[source]))
        return give()

    return staged


def _behind(front: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """The same for who comes through the dispatcher."""
    return lambda _keys, args: front(args)


def _into(
    event: Event,
    fits: Callable[[Any], bool],
    expected: Arguments,
    make: Callable[[Any, Any, torch.Tensor], None],
    within: int = -1,
    fills: int = -1,
) -> Callable[[Any, Any], Any] | None:
    """An op with one result: where it is written, and what the program gets of it.

    ``within`` is the argument that it writes, ``fills`` the one that is copied there first, for an
    op that works in place; -1 if it is none.
    """
    lent: Lent | None = event.lent.get((), event.leaving.get(()))
    place = event.results.get(())
    if place is not None and lent is None and event.waits:
        return None
    stages = tuple(expected.stages)
    first, filling, ready = tuple(event.before), tuple(event.filling), tuple(event.ready)
    copied = () if event.leaving else tuple(event.copied)
    after = tuple(event.after)
    like = event.shapes[()]
    shape, dtype = like.shape, like.dtype
    device = next(iter(event.results.values())).device if event.results else None

    def call(keys: Any, args: Any) -> Any:
        if not fits(args):
            return MISS
        OWN.depth += 1
        try:
            for act in first:
                act()
            given = _staged(args, stages) if stages else args
            out = place
            if within >= 0:
                out = args[within]
            elif out is None:
                out = torch.empty(shape, dtype=dtype, device=device or _device(args))
            for act in filling:
                act()
            if fills >= 0:
                out.copy_(given[fills])
            for act in ready:
                act()
            make(keys, given, out)
            for act in copied:
                act()
            for act in after:
                act()
            if lent is not None:
                return lent.tensor.detach()
            return out if place is None else out.clone()
        finally:
            OWN.depth -= 1

    return call


def _device(args: Any) -> torch.device:
    return next(x.device for x in args if isinstance(x, torch.Tensor))
