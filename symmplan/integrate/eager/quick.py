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
from symmplan.capture.eager import signature
from symmplan.integrate.eager.direct import MISS, front_of, launcher
from symmplan.integrate.eager.schedule import bound_values
from symmplan.memory.ops import IMPLEMENTATIONS
from symmplan.memory.own import OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.capture.c10d import Functional
    from symmplan.integrate.eager.lanes import Lanes
    from symmplan.integrate.eager.schedule import Event, Lent, Stage

__all__ = ["MISS", "Line", "Quick", "quick_call", "quick_memory"]


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


@define(eq=False)
class _Arguments:
    """What is expected of a call's arguments, by their places; an address of 0 is any."""

    count: int
    tensors: list[tuple[int, Any, Any, int]] = field(factory=list)
    lists: list[tuple[int, tuple[tuple[Any, Any, int], ...]]] = field(factory=list)
    groups: list[tuple[int, Any]] = field(factory=list)
    values: list[tuple[int, Any]] = field(factory=list)
    stages: list[tuple[int, Stage]] = field(factory=list)

    def key(self) -> Any:
        return (
            self.count,
            tuple(self.tensors),
            tuple(self.lists),
            tuple((i, id(group)) for i, group in self.groups),
            tuple((i, v.__class__, tuple(v) if isinstance(v, list) else v) for i, v in self.values),
            tuple((i, id(s.view), s.copy_in, tuple(map(id, s.ready))) for i, s in self.stages),
        )


def _arguments(event: Event, args: Sequence[Any], form: Functional | None) -> _Arguments | None:
    """What to expect of calls like this one; None if that cannot be said in short."""
    values = bound_values(event, *((args, {}) if form is None else (form.args, form.kwargs)))
    addresses: dict[int, int] = {}
    for bound in event.binds:
        addresses[id(_at(values[bound.head], bound.index))] = bound.address
    stages = {id(_at(values[s.head], s.index)): s for s in event.stages}
    found = _Arguments(len(args))
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            found.tensors.append((i, value.shape, value.dtype, addresses.pop(id(value), 0)))
            stage = stages.pop(id(value), None)
            if stage is not None:
                found.stages.append((i, stage))
        elif isinstance(value, list) and value and all(isinstance(x, torch.Tensor) for x in value):
            wants = tuple((x.shape, x.dtype, addresses.pop(id(x), 0)) for x in value)
            found.lists.append((i, wants))
            for x in value if form is not None else ():  # its front copies
                stages.pop(id(x), None)
        elif isinstance(value, torch.ScriptObject):
            group = compat.unboxed_if_group(value)
            if group is not None:
                found.groups.append((i, group))
        elif value is None or isinstance(value, (bool, int, str, torch.dtype, torch.device)):
            found.values.append((i, value))
        elif isinstance(value, list) and all(isinstance(x, (bool, int)) for x in value):
            found.values.append((i, list(value)))
        elif not isinstance(value, float):
            return None
    return None if addresses or stages else found


def _fits(expected: _Arguments, claims: tuple[tuple[int, int], ...]) -> Callable[[Any], bool]:
    """Compares arguments, and sees that the bytes to be written are nobody's."""
    simple = _fits_simple(expected, claims)
    if simple is not None:
        return simple
    count, tensors, lists = expected.count, tuple(expected.tensors), tuple(expected.lists)
    groups, values = tuple(expected.groups), tuple(expected.values)
    unboxed, uses = compat.unboxed_group, compat.storage_use_count

    def fits(args: Any) -> bool:
        if len(args) != count:
            return False
        try:
            for i, shape, dtype, address in tensors:
                tensor = args[i]
                if tensor.shape != shape or tensor.dtype is not dtype:
                    return False
                if address and tensor.data_ptr() != address:
                    return False
            for i, wants in lists:
                if len(args[i]) != len(wants):
                    return False
                for tensor, (shape, dtype, address) in zip(args[i], wants, strict=True):
                    if tensor.shape != shape or tensor.dtype is not dtype:
                        return False
                    if address and tensor.data_ptr() != address:
                        return False
            for i, group in groups:
                if unboxed(args[i]) is not group:
                    return False
        except (AttributeError, TypeError):  # no tensor, no list
            return False
        for i, value in values:
            if args[i].__class__ is not value.__class__ or args[i] != value:
                return False
        for storage, own in claims:  # noqa: SIM110 (a generator costs as much as all this)
            if uses(storage) > own:
                return False
        return True

    return fits


def _fits_simple(
    expected: _Arguments, claims: tuple[tuple[int, int], ...]
) -> Callable[[Any], bool] | None:
    """The same where a tensor is followed by plain values, as in functional collectives."""
    rest = tuple(value for _, value in expected.values)
    if [i for i, _ in expected.values] != list(range(1, expected.count)):
        return None
    if len(expected.tensors) != 1 or not all(isinstance(x, (int, str)) for x in rest):
        return None
    _, shape, dtype, address = expected.tensors[0]
    uses = compat.storage_use_count

    def fits(args: Any) -> bool:
        tensor = args[0]
        if args[1:] != rest or tensor.shape != shape or tensor.dtype is not dtype:
            return False
        if address and tensor.data_ptr() != address:
            return False
        for storage, own in claims:  # noqa: SIM110 (a generator costs as much as all this)
            if uses(storage) > own:
                return False
        return True

    return fits


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
    expected = _arguments(event, args, form)
    if expected is None:
        return None, None
    claims = event.marks()
    front: Callable[..., Any] | None = None
    if form is not None:
        front = front_of(event, args, form, claims)
    fits = _fits(expected, claims)
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
    event: Event, fits: Callable[[Any], bool], expected: _Arguments
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
    event: Event, fits: Callable[[Any], bool], expected: _Arguments
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
    event: Event, args: Any, fits: Callable[[Any], bool], expected: _Arguments
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
    event: Event, args: Any, fits: Callable[[Any], bool], expected: _Arguments
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
    expected: _Arguments,
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


def quick_memory(
    event: Event, run: Callable[[Sequence[Callable[[], None]]], None]
) -> tuple[Any, Quick | None]:
    """The same for `symmplan.empty` and `symmplan.out`: of the function, its arguments.

    ``run`` runs what is to be done besides, such as barriers.
    """
    lent = next(iter(event.lent.values()), None)
    writes, acts = event.call.kind == "out", (*event.ready, *event.after)
    claims, uses = event.marks(), compat.storage_use_count
    first = tuple(event.before)
    function, *recorded = event.call.args
    wanted, named = tuple(recorded), event.call.kwargs
    if any(isinstance(value, (tuple, dict)) for value in named.values()):  # there may be tensors
        return None, None
    place = None if lent is None else lent.tensor
    tensors = [(i, *w) for i, w in enumerate(wanted) if _is_tensor(w)]
    floats = [i for i, w in enumerate(wanted) if w is float]
    others = [(i, w) for i, w in enumerate(wanted) if not _is_tensor(w) and w is not float]

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
        if first:
            run(first)
        if place is None:
            result: torch.Tensor = make(*args, **kwargs)
        else:
            if writes:
                OWN.depth += 1
                try:
                    make(*args, **kwargs, out=place)
                finally:
                    OWN.depth -= 1
            result = place.detach()
        if acts:
            run(acts)
        return result

    parts = (event.call.kind, event.stream, id(function), repr(wanted), repr(named), claims)
    key = (*parts, tuple(map(id, (*first, *acts))))
    return (*key, id(place)), Quick(event.call.kind, event.stream, call)


def _is_tensor(wanted: Any) -> bool:
    """Whether a signature is a tensor's."""
    return wanted.__class__ is tuple and len(wanted) == 2 and isinstance(wanted[1], torch.dtype)


def _at(value: Any, index: tuple[int, ...]) -> Any:
    for i in index:
        value = value[i]
    return value
