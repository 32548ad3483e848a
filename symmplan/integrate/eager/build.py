"""The schedule of a placed recording.

[Note: barriers of an eager program]
    A plan may have a barrier before an op that is not declared, but a session does not see such ops
    in later iterations. A barrier protects from a peer's access, and only declared ops access
    peers' bytes. So the barrier moves up to the end of the preceding declared op. If there is none,
    it moves to the end of the iteration, because the program repeats.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from attrs import define, field

from symmplan.capture.graphs import overload_of
from symmplan.capture.streams import MARK
from symmplan.integrate.eager.schedule import Event
from symmplan.memory.leased import lease_out
from symmplan.planner.order import order_of
from symmplan.runtime.leases import Ledger, StorageLease

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import fx

    from symmplan.capture.eager import Recorder
    from symmplan.capture.graphs import Value
    from symmplan.capture.recorded import Recorded
    from symmplan.capture.sites import Captured, PlacedStorage
    from symmplan.integrate.eager.schedule import Act
    from symmplan.memory import Arena
    from symmplan.model import Plan
    from symmplan.place.program import PlacedCall, PlacedProgram
    from symmplan.planner.order import Order


@define(eq=False)
class Builder:
    """Makes the events of a placed recording, and what is to be done when the iteration ends.

    Attributes:
        recorder: The recording.
        program: The recorded program, and its plan.
        device: Where its tensors lie.
        elements: An element of each type there.
        arena: The plan's memory.
    """

    recorder: Recorder
    program: PlacedProgram
    device: torch.device
    elements: Mapping[torch.dtype, torch.Tensor]
    arena: Arena
    order: Order | None = field(init=False)  # None on one stream: all is in order there
    leased: dict[str, StorageLease] = field(init=False, factory=dict)
    moving: set[str] = field(init=False, factory=set)  # see [Note: tensors that move] in `moving`
    position: dict[str, int] = field(init=False, factory=dict)

    @property
    def captured(self) -> Captured:
        """The recorded program."""
        return self.program.captured

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return self.program.plan

    def build(self) -> tuple[list[Event], list[Act]]:
        """The events in order, and the work at the end of the iteration."""
        problem = self.captured.problem
        one_stream = all(o.op != MARK for o in problem.operations)
        self.order = None if one_stream else order_of(problem)
        order = {node: i for i, node in enumerate(self.recorder.graph.nodes)}
        placed_storages: dict[fx.Node, list[PlacedStorage]] = {}
        for storage in self.captured.placed_storages:
            placed_storages.setdefault(storage.node, []).append(storage)
            self.leased[storage.buffer] = self._lease_out(
                storage.buffer, (storage.node, storage.path)
            )
        called = {call.node for call in self.recorder.calls}
        for node in placed_storages.keys() - called:
            self.moving.update(storage.buffer for storage in placed_storages[node])
        events = []
        for call in sorted(self.recorder.calls, key=lambda c: order[c.node]):
            event = self._event(call, placed_storages.get(call.node, []))
            events.append(event)
            if event.placed is not None:
                self._place(event, event.placed)
        self._claim(events)
        return events, self._between(events, order)

    def _bytes(self, buffer: str) -> torch.Tensor:
        place = self.plan.placements[buffer]
        return self.arena.segments[place.segment].tensor[place.offset : place.end]

    def _lease_out(self, buffer: str, value: Value) -> StorageLease:
        like = self.captured.values.tensors[value]
        kept = [self._bytes(buffer)]
        flat = lease_out(kept[0].view(like.dtype), kept=kept)  # uses are counted
        tensor = flat.as_strided(like.shape, like.stride(), 0)
        del flat
        return StorageLease(tensor, name=buffer, kept=kept)

    def _flat(self, buffer: str, like: Any, begin: int = 0) -> torch.Tensor:
        """The placement, from a byte of it on, as a contiguous tensor."""
        flat = self._bytes(buffer)[begin : begin + like.numel() * like.element_size()]
        return flat.view(like.dtype).view(like.shape)

    def _event(self, call: Recorded, placed_storages: list[PlacedStorage]) -> Event:
        values = self.captured.values
        overload = None if call.form is None else overload_of(call.form.op)
        shapes = {p: values.tensors[call.node, p] for _, p in values.of_node(call.node)}
        placed = None if overload is None else self.program.calls.get(call.node)
        event = Event(call, self.device, self.elements, overload, shapes, placed)
        for storage in placed_storages:
            event.leased[storage.path] = self.leased[storage.buffer]
            event.writes.append(storage.buffer)
        return event

    def _place(self, event: Event, call: PlacedCall) -> None:
        """Where the tensors of a call lie."""
        for site in call.staged:
            assert site.buffer is not None
            view = self._flat(site.buffer, self.captured.values.tensors[site.value])
            # Who waits for a tensor waits for all that is under way on its storage.
            event.views[site.buffer, True] = lease_out(view) if call.spec.asynchronous else view
            event.writes.append(site.buffer)
        for path, buffer in call.results.items():
            event.views[buffer, False] = self._result(event, call, buffer, path)
        for site in call.sites:
            if site.kind == "argument" and site.how == "bind":
                assert site.buffer is not None
                like = self.captured.values.tensors[site.value]
                begin = like.storage_offset() * like.element_size()
                flat = self._flat(site.buffer, like, begin)
                event.bound[site] = flat.as_strided(like.shape, like.stride())
                if site.buffer in self.moving:
                    self.moving.remove(site.buffer)
                    event.moving[site] = self.leased[site.buffer]
                    event.writes.append(site.buffer)
        event.copies = len(call.results.keys() - event.leased.keys())
        event.copies += sum(call.reads(s) + s.writes for s in call.staged)

    def _result(
        self, event: Event, call: PlacedCall, buffer: str, path: tuple[int, ...]
    ) -> torch.Tensor:
        if path in event.leased:
            return event.leased[path].tensor
        event.writes.append(buffer)
        if call.spec.asynchronous:
            leased = self.leased[buffer] = event.leaving[path] = self._lease_out(
                buffer, (call.node, path)
            )
            return leased.tensor
        return self._flat(buffer, self.captured.values.tensors[call.node, path])

    def _claim(self, events: list[Event]) -> None:
        """Tell every event which bytes it is to lease."""
        for event in events:
            for buffer in event.writes:
                place = self.plan.placements[buffer]
                segment = self.arena.segments[place.segment]
                begin, lease = segment.begin + place.offset, self.leased.get(buffer)
                ledger = Ledger(segment.leases)
                event.claims.append((ledger, begin, begin + place.nbytes, lease))

    def _between(self, events: list[Event], order: dict[fx.Node, int]) -> list[Act]:
        """Barriers and overwriting; returns what belongs to the end of the iteration."""
        by_node = {event.call.node: event for event in events}
        barriers: dict[str, list[_Barrier]] = {}
        for barrier in self.program.barriers:
            segment = self.arena.segments[self.plan.placements[barrier.buffers[0]].segment]
            act = _Barrier(segment, barrier.group, barrier.buffers)
            barriers.setdefault(barrier.before, []).append(act)
        self.position = {o.name: i for i, o in enumerate(self.captured.problem.operations)}
        tail: list[Act] = []
        lazy: list[tuple[str, list[Act]]] = []  # waits for an event behind it
        current = -1
        for operation in self.captured.problem.operations:
            if operation.op == MARK:
                continue
            due, step = barriers.get(operation.name, []), self.captured.steps[operation.name]
            event = None if step.node is None else by_node.get(step.node)
            if event is None and due and lazy:  # what still waits comes before the barrier, too
                lazy.append((operation.name, list(due)))
            if step.kind == "poison":
                lease = self.leased.get(step.buffer)
                poison = functools.partial(_overwrite, self._bytes(step.buffer), lease)
                lazy.append((operation.name, [poison]))
            if step.node is not None:
                while current + 1 < len(events):
                    following = events[current + 1]
                    if order[following.call.node] > order[step.node]:
                        break
                    if following is event:
                        steps, lazy = self._ready(lazy, operation.name)
                        following.before += steps
                    current += 1
            if event is None:
                self._move_up(operation.name, due, events[: current + 1], tail)
            elif due:  # what still waits comes before these, too
                steps, lazy = self._ready(lazy, operation.name)
                event.ahead(operation.name, [*steps, *due])
        return [*(act for _, acts in lazy for act in acts), *tail]

    def _move_up(
        self, before: str, barriers: list[_Barrier], events: list[Event], tail: list[Any]
    ) -> None:
        """See [Note: barriers of an eager program]; also those in front of overwriting.

        Overwriting waits for a later call, but operations before that call may rely on the barrier.
        So may the copies after a launch, if the plan has the barrier before them.
        """
        for act in barriers:
            targets = self._behind(act, events)
            for event in targets:
                names = event.copies_behind()
                later = [n for n in names if self.position[n] > self.position[before]]
                if later:
                    event.ahead(min(later, key=self.position.__getitem__), [act])
                else:
                    event.after.append(act)
            if not targets:
                tail.append(act)

    def _ready(
        self, lazy: list[tuple[str, list[Act]]], operation: str
    ) -> tuple[list[Act], list[tuple[str, list[Act]]]]:
        """The buffers to be overwritten before an operation, and the others.

        Overwriting happens on the stream of the operation's event, which must come after the last
        use. The stream of the last use may be far behind the work for which others wait. The next
        write comes after the overwriting, too.
        """
        ready: list[Act] = []
        left, order = [], self.order
        for name, steps in lazy:
            if order is None or order.precedes(order.index[name], order.index[operation]):
                ready += steps
            else:
                left.append((name, steps))
        return ready, left

    def _behind(self, barrier: _Barrier, events: list[Event]) -> list[Event]:
        """The calls after which a barrier runs, in place of an op that is not seen.

        With one stream that is the last declared op. With several it is the last one of each stream
        on which peers accessed the buffers that the barrier protects: later users of these buffers
        have waited for these streams.
        """
        if self.order is None:
            return events[-1:]
        nodes = {
            self.captured.steps[a.operation].node
            for a in self.captured.problem.accesses
            if a.remote and a.buffer in barrier.buffers
        }
        last = {e.call.stream: e for e in events if e.call.node in nodes}
        return list(last.values())


@define(eq=False)
class _Barrier:
    segment: Any
    group: str
    buffers: tuple[str, ...]

    def __call__(self) -> None:
        self.segment.barrier(self.group)


def _overwrite(view: torch.Tensor, lease: StorageLease | None) -> None:
    """Overwrite a dead placement with bits that are no number."""
    if lease is None or not lease.held:
        view.fill_(255)
