"""The schedule of a placed recording.

[Note: barriers of an eager program]
    The plan may want a barrier before an op that is not declared, and those are not seen any more.
    What it protects from is a peer's access, which only a declared op can have made, so the
    barrier moves up to the end of the declared op before it. Before the first, it moves to the end
    of the iteration: the program repeats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from symmplan.capture.graphs import at_path, overload_of
from symmplan.capture.streams import MARK
from symmplan.integrate.eager.calls import is_tensors, stands_for
from symmplan.integrate.eager.schedule import Event
from symmplan.integrate.eager.tape import Slot, Tape, getter
from symmplan.place.loans import Lent, lend
from symmplan.place.lower import launch
from symmplan.planner.order import order_of
from symmplan.torch_private import works

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from symmplan.capture.eager import Recorded, Recorder
    from symmplan.capture.graphs import Value
    from symmplan.capture.sites import Captured, PlacedStorage
    from symmplan.integrate.eager.tape import Step
    from symmplan.memory import Arena
    from symmplan.model import Plan
    from symmplan.place.lower import Launched
    from symmplan.place.program import Instruction, PlacedCall, PlacedProgram
    from symmplan.place.ways import Lowerings
    from symmplan.planner.order import Order

__all__ = ["events_of"]

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@define(eq=False)
class _Builder:
    recorder: Recorder
    program: PlacedProgram
    arena: Arena
    device: torch.device
    lowerings: Lowerings
    order: Order | None = field(init=False)  # None on one stream: all is in order there
    lent: dict[str, Lent] = field(init=False, factory=dict)
    position: dict[str, int] = field(init=False, factory=dict)

    @property
    def captured(self) -> Captured:
        return self.program.captured

    @property
    def plan(self) -> Plan:
        return self.program.plan

    def build(self) -> tuple[list[Event], list[Step]]:
        problem = self.captured.problem
        one_stream = all(o.op != MARK for o in problem.operations)
        self.order = None if one_stream else order_of(problem)
        order = {node: i for i, node in enumerate(self.recorder.graph.nodes)}
        homes: dict[fx.Node, list[PlacedStorage]] = {}
        for home in self.captured.homes:
            homes.setdefault(home.node, []).append(home)
            self.lent[home.buffer] = self._lend(home.buffer, (home.node, home.path))
        events = []
        for call in sorted(self.recorder.calls, key=lambda c: order[c.node]):
            event = self._event(call, homes.get(call.node, []))
            events.append(event)
            placed = self.program.calls.get(call.node)
            if placed is not None and event.overload is not None:
                self._place(event, placed)
        self._claim(events)
        return events, self._between(events, order)

    def _bytes(self, buffer: str) -> torch.Tensor:
        place = self.plan.placements[buffer]
        return self.arena.segments[place.segment].tensor[place.offset : place.end]

    def _lend(self, buffer: str, value: Value) -> Lent:
        like = self.captured.values.tensors[value]
        flat = lend(self._bytes(buffer).view(like.dtype))  # uses are counted
        tensor = flat.as_strided(like.shape, like.stride(), 0)
        del flat
        return Lent(tensor)

    def _flat(self, buffer: str, like: Any, begin: int = 0) -> torch.Tensor:
        """The placement, from a byte of it on, as a contiguous tensor."""
        flat = self._bytes(buffer)[begin : begin + like.numel() * like.element_size()]
        return flat.view(like.dtype).view(like.shape)

    def _event(self, call: Recorded, homes: list[PlacedStorage]) -> Event:
        values, spec = self.captured.values, self.captured.specs.get(call.node)
        event = Event(
            call,
            overload_of(call.form) if call.kind == "op" else None,
            {p: values.tensors[call.node, p] for _, p in values.of_node(call.node)},
            None if spec is None else self.lowerings.row(spec),
        )
        for home in homes:
            event.lent[home.path] = self.lent[home.buffer]
            event.writes.append(home.buffer)
        return event

    def _place(self, event: Event, call: PlacedCall) -> None:
        """Take down what a placed call does."""
        event.results = {path: lent.tensor for path, lent in event.lent.items()}
        event.group = call.engine or call.group
        event.expected = call.expected
        wants = list(event.recorded.values())
        event.lists = [i for i, want in enumerate(wants) if is_tensors(want)]
        tape = event.tape = Tape(
            lambda buffer, like, contiguous: self._view(event, call, buffer, like, contiguous),
            self.captured.values.tensors,
            self.device,
            len(wants) + sum(len(wants[i]) for i in event.lists) + 1,
            watched=self.arena.races is not None,
            direct=not any(x.dtype.is_complex for x in event.shapes.values()),
            works=event.call.asynchronous or bool(call.engine) if event.form else None,
        )
        stands = stands_for(event)
        launched = launch(call, tape, stands)
        for site in call.sites:
            if site.kind == "argument" and site.buffer is not None:
                assert site.source is not None
                like = self.captured.values.tensors[(site.source, site.path)]
                begin = 0 if site.how == "stage" else like.storage_offset() * like.element_size()
                event.arguments[site] = self._flat(site.buffer, like, begin)
                if site.how == "bind":
                    slot = at_path(stands[site.head], site.index)
                    event.bound[slot.index] = site
        event.copies = len(event.results) - len(event.lent)
        event.copies += sum(call.reads(s) + s.writes for s in call.staged)
        event.gives = self._finish(event, tape, call, launched)

    def _view(
        self, event: Event, call: PlacedCall, buffer: str, like: Value, contiguous: bool
    ) -> torch.Tensor:
        """The placement of a staged argument (contiguous), or where a result is made."""
        path = like[1]
        if not contiguous and path in event.lent:
            return event.lent[path].tensor
        event.writes.append(buffer)
        view = self._flat(buffer, self.captured.values.tensors[like])
        if contiguous:
            return view
        if call.spec.asynchronous and not event.form:
            lent = self.lent[buffer] = event.leaving[path] = self._lend(buffer, like)
            view = lent.tensor
        event.results[path] = view
        return view

    def _finish(
        self, event: Event, tape: Tape, call: PlacedCall, launched: Launched
    ) -> Callable[[list[Any]], Any]:
        """Take down what comes behind the launch; returns what the program gets of the frame."""
        results, back = dict(launched.results), []
        tape.part(tape.late)
        waits = event.form and (call.engine or any(s.writes for s in call.staged))
        if waits and tape.result is not None and not event.pends:
            # What ran on this stream has no work.
            tape.do(lambda work: None if work is None else work.wait(), tape.result)
        for site in call.sites:
            if site.leaves:
                tape.part(tape.away if site.path in event.leaving else tape.late)
                tape.doing(call.copy("copy out", site))
                if site.path not in event.leaving:
                    results[site.path] = tape.do(torch.clone, results[site.path])
            elif site in call.staged and site.writes:
                view, source = launched.staged[site]
                tape.part(tape.late)
                tape.doing(call.copy("copy back", site))
                if call.spec.asynchronous and not event.form:
                    tape.do(_WAIT, view)
                tape.copy(source, view)
                back.append((view, source))
        if event.form:
            return getter(works.finished() if tape.result is None else tape.result)
        if tape.result is not None and not call.results:
            return _raw(tape.result, back)
        tape.part(tape.late)
        lent = {**event.leaving, **event.lent}
        for path, value in results.items():
            if path in lent:
                results[path] = tape.do(lent[path].tensor.detach)
            else:
                results[path] = next((source for view, source in back if view is value), value)
        return getter(results[()] if () in results else list(results.values()))

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

    def _between(self, events: list[Event], order: dict[fx.Node, int]) -> list[Step]:
        """Barriers and overwriting; returns what belongs to the end of the iteration."""
        by_node = {event.call.node: event for event in events}
        barriers: dict[str, list[_Barrier]] = {}
        for instruction in self.program.instructions:
            if instruction.kind == "barrier":
                act = self._barrier(instruction)
                barriers.setdefault(instruction.operation, []).append(act)
        self.position = {o.name: i for i, o in enumerate(self.captured.problem.operations)}
        tail: list[Step] = []
        lazy: list[tuple[str, list[Step]]] = []  # waits for an event behind it
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
                        steps, lazy = self._ready(lazy, operation.name)
                        following.before += steps
                    current += 1
            if event is None:
                self._move_up(operation.name, due, events[: current + 1], tail)
            elif due:  # what still waits comes before these, too
                steps, lazy = self._ready(lazy, operation.name)
                event.ahead(operation.name, [*steps, *due])
        return [*(act for _, acts in lazy for act in acts), *tail]

    def _barrier(self, instruction: Instruction) -> _Barrier:
        segment = self.plan.placements[instruction.buffers[0]].segment
        return _Barrier(self.arena.segments[segment], instruction.group, instruction.buffers)

    def _move_up(
        self, before: str, barriers: list[_Barrier], events: list[Event], tail: list[Any]
    ) -> None:
        """See [Note: barriers of an eager program]; also those in front of overwriting.

        That waits for a later call, but what comes before it may count on the barrier. So may the
        copies behind a launch, if the plan has it before them.
        """
        for act in barriers:
            targets = self._behind(act, events)
            for event in targets:
                names = event.behind_launch()
                later = [n for n in names if self.position[n] > self.position[before]]
                if later:
                    event.ahead(min(later, key=self.position.__getitem__), [act])
                else:
                    event.after.append(act)
            if not targets:
                tail.append(act)

    def _ready(
        self, lazy: list[tuple[str, list[Step]]], operation: str
    ) -> tuple[list[Step], list[tuple[str, list[Step]]]]:
        """What is to be overwritten before an operation, and what is not.

        It is done on the stream of the operation's event, which must come after the last use: the
        one of that use may be far behind what others wait for. Who writes there next comes after
        it, too.
        """
        ready: list[Step] = []
        left, order = [], self.order
        for name, steps in lazy:
            if order is None or order.precedes(order.index[name], order.index[operation]):
                ready += steps
            else:
                left.append((name, steps))
        return ready, left

    def _behind(self, barrier: _Barrier, events: list[Event]) -> list[Event]:
        """The calls behind which a barrier runs instead of before an op that is not seen.

        On one stream, behind the last declared op. Else behind the last one of each stream on which
        peers took part in the buffers that it protects: whoever comes after those has waited for
        these streams.
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

    def __call__(self, _frame: list[Any]) -> None:
        self.segment.barrier(self.group)


@define(eq=False)
class _Poison:
    """Overwrite a dead placement with bits that are no number."""

    view: torch.Tensor
    lent: Lent | None

    def __call__(self, _frame: list[Any]) -> None:
        if self.lent is None or not self.lent.held:
            self.view.fill_(255)


def _raw(slot: Slot, back: list[tuple[Any, Any]]) -> Callable[[list[Any]], Any]:
    """What the op itself returned; the program's own tensor where it is its placement."""
    pairs = [(view, getter(source)) for view, source in back]

    def give(frame: list[Any]) -> Any:
        result = frame[slot.index]
        return next((get(frame) for view, get in pairs if result is view), result)

    return give


def events_of(
    recorder: Recorder,
    program: PlacedProgram,
    arena: Arena,
    device: torch.device,
    lowerings: Lowerings,
) -> tuple[list[Event], list[Step]]:
    """The events of a placed recording in order, and what is to be done when the iteration ends."""
    return _Builder(recorder, program, arena, device, lowerings).build()
