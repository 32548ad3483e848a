"""A recorded iteration -> its `Problem`.

[Note: held tensors]
    A graph knows the last *use* of a tensor; a running program may hold one longer, and could use
    it at any time, even in ways that are not seen. So the moment at which a storage is released is
    recorded, and where other operations lie between last use and release the buffer gets one more
    access, ``<buffer>:drop``, on the stream on which it was made: whoever uses it elsewhere must
    have made that stream wait by then, or the memory would not be safe without a plan either. With
    ``record_stream`` it gets one on each of those streams, too. A program that computes nothing in
    vain and drops each tensor after its last use has none, and gives exactly the problem of FX.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from symmplan.capture.fx import capture_fx
from symmplan.capture.sites import Captured, Step
from symmplan.capture.streams import MAIN, unordered, with_streams
from symmplan.model import Access, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from torch import fx

    from symmplan.capture.eager import Recorder
    from symmplan.capture.producers import Write
    from symmplan.model import OpSpec, Requirement

__all__ = ["capture_recorded"]


def capture_recorded(
    recorder: Recorder,
    *,
    lookup: Callable[[Any], OpSpec | None],
    producer: Callable[[fx.Node, Callable[[fx.Node], Write | None]], Write | None],
    skip: Callable[[OpSpec, Requirement], str | None],
    partly: Callable[[Captured], Mapping[fx.Node, str]] = lambda _: {},
    choose: Callable[[Captured], Mapping[fx.Node, str]] = lambda _: {},
) -> Captured:
    """End a recording and capture it.

    Args:
        recorder: The recording.
        lookup: As for `capture_fx`.
        producer: The same; its second argument asks for what the program says of a node.
        skip: As for `capture_fx`.
        partly: Gives ops that cannot run with only some of their tensors placed, and why.
        choose: Gives ops that need not be placed, and why, once it is known what can be.

    Collective: no, but for what ``choose`` does.
    """
    recorder.close()
    refused: dict[fx.Node, str] = {}
    chosen = False
    while True:
        captured = capture_fx(
            recorder.graph,
            lookup=lookup,
            producer=lambda node: producer(node, recorder.write_of),
            skip=skip,
            refused=refused,
        )
        captured = _Line(recorder, captured).run()
        reasons = unordered(captured.problem)
        more = {s.node: reasons[s.buffer] for s in captured.sites if s.buffer in reasons}
        more = {**partly(captured), **more}
        if not chosen and not more.keys() - refused.keys():
            more, chosen = dict(choose(captured)), True
        if not more.keys() - refused.keys():
            return captured
        refused = {**more, **refused}


@define(eq=False)
class _Line:
    """The operations of a captured recording, each with its moment and its stream."""

    recorder: Recorder
    captured: Captured
    operations: list[Operation] = field(factory=list)
    accesses: list[Access] = field(factory=list)
    moments: list[tuple[int, str]] = field(factory=list)
    drops: dict[str, Step] = field(factory=dict)

    def run(self) -> Captured:
        problem = self.captured.problem
        self.operations = list(problem.operations)
        self.accesses = list(problem.accesses)
        for operation in self.operations:
            now, stream = self._moment(self.captured.steps[operation.name])
            # A copy out follows the wait, which may be that of another result.
            now = max(now, self.moments[-1][0]) if self.moments else now
            self.moments.append((now, stream))
        self._add_drops()
        problem = evolve(problem, operations=self.operations, accesses=self.accesses)
        declared = {call.stream for call in self.recorder.calls} | {MAIN}
        problem = with_streams(problem, self.recorder.timeline, self.moments, declared)
        return evolve(self.captured, problem=problem, steps={**self.captured.steps, **self.drops})

    def _moment(self, step: Step) -> tuple[int, str]:
        assert step.node is not None
        timeline, name = self.recorder.timeline, step.node.name
        if step.kind in ("copy out", "copy back"):
            waits = self.captured.waits.get(step.node, {}).values()
            name = max((wait.name for wait in waits), key=timeline.at.__getitem__, default=name)
        return timeline.at.get(name, 0), timeline.streams.get(name, MAIN)

    def _add_drops(self) -> None:
        """See [Note: held tensors]."""
        position = {o.name: i for i, o in enumerate(self.operations)}
        last: dict[str, int] = {}
        for access in self.accesses:
            last[access.buffer] = max(last.get(access.buffer, -1), position[access.operation])
        due: dict[int, list[tuple[int, str, str, int, str]]] = {}
        times = [at for at, _ in self.moments]
        marks = [mark.at for mark in self.recorder.timeline.marks]
        for home in self.captured.homes:
            storage = self.recorder.made.get((home.node, home.path))
            if storage is None or not storage.dropped:
                continue
            end = sum(at <= storage.dropped for at in times)
            used_at, used_on = self.moments[last[home.buffer]]
            held = end and times[end - 1] > used_at
            strays = used_on != storage.stream
            # In an order that is the same on all ranks, whenever their collectors run.
            when = bisect_right(marks, storage.dropped)
            names = [(f"{home.buffer}:drop", storage.stream)] if held or strays else []
            for i, stream in enumerate(dict.fromkeys(storage.users)):
                names.append((f"{home.buffer}:drop{i + 1}", stream))
            for name, stream in names:
                entry = (when, name, stream, storage.dropped, home.buffer)
                due.setdefault(end, []).append(entry)
        for end in sorted(due, reverse=True):
            for _, name, stream, at, buffer in sorted(due[end], reverse=True):
                self.operations.insert(end, Operation(name, stream=stream))
                self.moments.insert(end, (at, stream))
                self.accesses.append(Access(name, buffer))
                self.drops[name] = Step("release", buffer=buffer)
