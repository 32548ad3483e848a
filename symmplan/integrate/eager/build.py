"""The schedule that a plan makes of a recording.

[Note: barriers of an eager program]
    The plan may want a barrier before an op that is not declared, and those are not seen any more.
    What it protects from is a peer's access, which only a declared op can have made, so the
    barrier moves up to the end of the declared op before it. Before the first, it moves to the end
    of the iteration: the program repeats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field

from symmplan.capture.graphs import overload_of
from symmplan.capture.streams import MARK
from symmplan.integrate.eager.schedule import Bound, Event, Lent, Stage
from symmplan.memory.lend import lend
from symmplan.place.ways import overload_named
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import fx

    from symmplan.capture.eager import Recorded, Recorder
    from symmplan.capture.sites import Captured, Home, Site, Step
    from symmplan.memory import Arena
    from symmplan.model import Plan
    from symmplan.place.ways import Lowerings

__all__ = ["events_of"]


@define(eq=False)
class _Builder:
    recorder: Recorder
    captured: Captured
    plan: Plan
    arena: Arena
    lowerings: Lowerings
    engines: Mapping[fx.Node, str]
    one_stream: bool = field(init=False)
    lent: dict[str, Lent] = field(init=False, factory=dict)
    shared: dict[Any, Lent] = field(init=False, factory=dict)
    views: dict[Any, torch.Tensor] = field(init=False, factory=dict)

    def build(self) -> tuple[list[Event], list[Callable[[], None]]]:
        self.one_stream = all(o.op != MARK for o in self.captured.problem.operations)
        order = {node: i for i, node in enumerate(self.recorder.graph.nodes)}
        homes: dict[fx.Node, list[Home]] = {}
        for home in self.captured.homes:
            homes.setdefault(home.node, []).append(home)
            self.lent[home.buffer] = self._lend_once(home.buffer, (home.node, home.path))
        sites: dict[fx.Node, list[Site]] = {}
        for site in self.captured.sites:
            sites.setdefault(site.node, []).append(site)
        events = [
            self._event(call, sites.get(call.node, []), homes.get(call.node, []))
            for call in sorted(self.recorder.calls, key=lambda c: order[c.node])
        ]
        self._claim(events)
        return events, self._between(events, order)

    def _bytes(self, buffer: str) -> torch.Tensor:
        place = self.plan.placements[buffer]
        return self.arena.segments[place.segment].tensor[place.offset : place.end]

    def _lend(self, buffer: str, value: Any) -> Lent:
        like = self.captured.values.tensors[value]
        flat = self._bytes(buffer).view(like.dtype)
        base = lend(flat, _nothing)
        tensor = base.as_strided(like.shape, like.stride(), 0)
        del base
        return Lent(tensor, flat.data_ptr())

    def _lend_once(self, buffer: str, value: Any) -> Lent:
        """The same for buffers that differ in nothing but the time: they share it."""
        like, place = self.captured.values.tensors[value], self.plan.placements[buffer]
        key = place.segment, place.offset, place.end, like.dtype, like.shape, like.stride()
        if key not in self.shared:
            self.shared[key] = self._lend(buffer, value)
        return self.shared[key]

    def _flat(self, buffer: str, like: Any) -> torch.Tensor:
        """The placement as a contiguous tensor; one for all that look the same."""
        place = self.plan.placements[buffer]
        key = place.segment, place.offset, like.dtype, like.shape
        if key not in self.views:
            flat = self._bytes(buffer)[: like.numel() * like.element_size()]
            self.views[key] = flat.view(like.dtype).view(like.shape)
        return self.views[key]

    def _leave(self, event: Event, site: Site) -> torch.Tensor:
        """Where a result that leaves the iteration is made, to be copied out."""
        assert site.buffer is not None
        value = (site.node, site.path)
        if not event.waits:
            return self._flat(site.buffer, self.captured.values.tensors[value])
        lent = self.lent[site.buffer] = self._lend(site.buffer, value)
        event.leaving[site.path] = lent
        return lent.tensor

    def _claim(self, events: list[Event]) -> None:
        """Give every event the last users of the bytes that it writes.

        Who used them before those was gone when those came.
        """
        writes = [(event, buffer) for event in events for buffer in event.writes]
        for i, (event, buffer) in enumerate(writes):
            mine = self.plan.placements[buffer]
            free = [(mine.offset, mine.end)]
            for _, other in [*writes[:i][::-1], *writes[i:][::-1]]:
                theirs = self.plan.placements[other]
                if theirs.segment != mine.segment:
                    continue
                left = [
                    piece
                    for low, high in free
                    for piece in ((low, min(high, theirs.offset)), (max(low, theirs.end), high))
                    if piece[0] < piece[1]
                ]
                if left != free and other in self.lent:
                    event.claims.append((buffer, other, self.lent[other]))
                free = left
                if not free:
                    break

    def _event(self, call: Recorded, sites: list[Site], homes: list[Home]) -> Event:
        overload = overload_of(call.form) if call.kind == "op" else None
        event = Event(call, overload, stream=call.stream)
        for home in homes:
            event.lent[home.path] = self.lent[home.buffer]
            event.results[home.path] = self.lent[home.buffer].tensor
        written = [h.buffer for h in homes]
        event.shapes = {
            p: self.captured.values.tensors[(call.node, p)]
            for _, p in self.captured.values.of_node(call.node)
        }
        if overload is None:
            event.writes = written
            return event
        event.names = [a.name for a in overload._schema.arguments]
        spec = self.captured.specs.get(call.node)
        if spec is not None:
            event.row = self.lowerings.row(spec)
            event.group_argument = spec.group
            event.waits = spec.asynchronous
        for site in sites:
            if site.buffer is None:
                continue
            event.group = self._group(site.buffer)
            if site.kind == "result":
                if site.how == "stage" and not site.stays:
                    event.results[site.path] = self._leave(event, site)
                    written.append(site.buffer)
                continue
            head, index = site.head, site.index
            assert site.source is not None
            like = self.captured.values.tensors[(site.source, site.path)]
            if site.how == "stage":
                reads = event.row is None or event.row.out != head or head == "input"
                view = self._flat(site.buffer, like)
                event.stages.append(Stage(head, index, view, reads, site.writes))
                written.append(site.buffer)
            else:
                begin = like.storage_offset() * like.element_size()
                view = self._bytes(site.buffer)[begin : begin + like.numel() * like.element_size()]
                view = view.view(like.dtype).view(like.shape)
                event.binds.append(Bound(head, index, view.data_ptr(), site.buffer, view))
        event.engine = self.engines.get(call.node, "")
        if event.row is not None:
            event.target = overload_named(event.row.target)
        elif spec is not None and spec.out is not None and event.results:
            paths = [p for _, p in self.captured.values.of_node(call.node)]
            if len(paths) == len(event.results):
                event.variant = overload_named(spec.out)
        event.writes = written
        event.placed = bool(event.stages or event.binds or event.results)
        event.copies = len(event.results) - len(event.lent)
        event.copies += sum(s.copy_in + s.copy_back for s in event.stages)
        return event

    def _group(self, buffer: str) -> str:
        return next(b.group for b in self.captured.problem.buffers if b.name == buffer)

    def _between(self, events: list[Event], order: dict[fx.Node, int]) -> list[Callable[[], None]]:
        """Barriers and overwriting; returns what belongs to the end of the iteration."""
        by_node = {event.call.node: event for event in events}
        barriers: dict[str, list[_Barrier]] = {}
        for barrier in self.plan.barriers:
            segment = self.arena.segments[self.plan.placements[barrier.buffers[0]].segment]
            act = _Barrier(segment, barrier.group, barrier.buffers)
            barriers.setdefault(barrier.before, []).append(act)
        tail: list[Callable[[], None]] = []
        lazy: list[tuple[str, list[Callable[[], None]]]] = []  # waits for an event behind it
        behind = self._behind_of()
        current = -1
        for operation in self.captured.problem.operations:
            if operation.op == MARK:
                continue
            due, step = barriers.get(operation.name, []), self.captured.steps[operation.name]
            event = None if step.node is None else by_node.get(step.node)
            if event is None and due and lazy:  # what still waits comes before the barrier, too
                lazy.append((operation.name, list(due)))
            if step.kind == "poison":
                poison = _Poison(self._bytes(step.buffer), self.lent.get(step.buffer))
                lazy.append((operation.name, [poison]))
            if step.node is not None:
                while current + 1 < len(events):
                    following = events[current + 1]
                    if order[following.call.node] > order[step.node]:
                        break
                    if following is event:
                        lazy = _hand_over(lazy, following, operation.name, behind)
                    current += 1
            if event is None:
                self._move_up(due, events[: current + 1], tail)
            elif step.kind == "copy in":
                _before_copy(event, step).extend(due)
            elif event.call.kind != "op":
                event.before += due
            elif step.kind in ("copy out", "copy back"):
                event.copied += due
            else:
                event.ready += due
        return [*(act for _, acts in lazy for act in acts), *tail]

    def _move_up(
        self, barriers: list[_Barrier], events: list[Event], tail: list[Callable[[], None]]
    ) -> None:
        """See [Note: barriers of an eager program]; also those in front of overwriting.

        That waits for a later call, but what comes before it may count on the barrier.
        """
        for act in barriers:
            for target in self._behind(act, events) or [tail]:
                target.append(act)

    def _behind_of(self) -> Callable[[str, str], bool]:
        """Whether an operation, the second one, is ordered behind another."""
        if self.one_stream:
            return lambda _first, _second: True
        order = order_of(self.captured.problem)
        return lambda first, second: order.precedes(order.index[first], order.index[second])

    def _behind(self, barrier: _Barrier, events: list[Event]) -> list[list[Callable[[], None]]]:
        """Where a barrier runs instead of before an op that is not seen.

        On one stream, behind the last declared op. Else behind the last one of each stream on which
        peers took part in the buffers that it protects: whoever comes after those has waited for
        these streams.
        """
        if self.one_stream:
            return [events[-1].after] if events else []
        nodes = {
            self.captured.steps[a.operation].node
            for a in self.captured.problem.accesses
            if a.remote and a.buffer in barrier.buffers
        }
        last = {e.stream: e for e in events if e.call.node in nodes}
        return [event.after for event in last.values()]


@define(eq=False)
class _Barrier:
    segment: Any
    group: str
    buffers: tuple[str, ...]

    def __call__(self) -> None:
        self.segment.barrier(self.group)


@define(eq=False)
class _Poison:
    """Overwrite a dead placement with bits that are no number."""

    view: torch.Tensor
    lent: Lent | None

    def __call__(self) -> None:
        if self.lent is None or not self.lent.held:
            self.view.fill_(255)


def _before_copy(event: Event, step: Step) -> list[Callable[[], None]]:
    """Where barriers run that belong before a copy into a placement."""
    assert step.site is not None
    for stage in event.stages:
        if (stage.head, stage.index) == (step.site.head, step.site.index):
            return stage.ready
    return event.filling if event.row is not None else event.landing


def _hand_over(
    lazy: list[tuple[str, list[Callable[[], None]]]],
    event: Event,
    operation: str,
    behind: Callable[[str, str], bool],
) -> list[tuple[str, list[Callable[[], None]]]]:
    """Give an event what is to be overwritten by then; returns what is not.

    It is done on the event's stream, which must come after the last use: the one of that use may
    be far behind what others wait for. Who writes there next comes after it, too.
    """
    left = []
    for name, acts in lazy:
        if behind(name, operation):
            event.before += acts
        else:
            left.append((name, acts))
    return left


def _nothing() -> None:
    """Nobody needs to know that a lent tensor is gone: uses are counted."""


def events_of(
    recorder: Recorder,
    captured: Captured,
    plan: Plan,
    arena: Arena,
    lowerings: Lowerings,
    engines: Mapping[fx.Node, str],
) -> tuple[list[Event], list[Callable[[], None]]]:
    """The schedule that a plan makes of a recording.

    Args:
        recorder: The recording.
        captured: What capture made of it.
        plan: The plan.
        arena: Its memory.
        lowerings: How ops run on it.
        engines: Names of the communicators over which collectives run, of those that do not run
            over the program's own.

    Returns:
        The events in order, and what is to be done when the iteration ends.
    """
    return _Builder(recorder, captured, plan, arena, lowerings, engines).build()
