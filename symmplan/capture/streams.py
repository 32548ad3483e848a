"""Streams and events of a recorded iteration, as edges of its happens-before order.

[Note: what is seen of streams]
    Each recorded op runs on the stream that is current when it is called. The recording sees the
    calls in Python that order streams: recording an event, letting a stream or the host wait for
    one, synchronizing a stream or the device (``Stream.wait_stream`` is made of those), and
    waiting for a collective. Each becomes a *mark* on its stream, an operation that touches
    nothing. A wait is an edge between two marks. The recording does not see an order that is made
    elsewhere. If it leaves a buffer's accesses unordered, the buffer is left out of the plan.

[Note: the end of an iteration]
    A program repeats, so the work of an iteration must be over before the next one. The session
    joins the streams of its declared calls in `step`. The program must have made one of these
    streams wait for its work on other streams.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from symmplan.device import device_of
from symmplan.model import Operation, Problem
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

#: Name of the stream on which a recording starts.
MAIN = "main"

#: What marks say that they are.
MARK = "symmplan::mark"

#: Name of the mark at which an iteration ends.
_STEP = "mark:step"


@define(eq=False)
class Timeline:
    """The streams of a recording. See [Note: what is seen of streams]."""

    device: DeviceStreams | None = None  # whose streams are seen; None where there are none
    #: ``{name of a node: when it ran}``, counted from the start.
    at: dict[str, int] = field(factory=dict)
    streams: dict[str, str] = field(factory=dict)  # ``{name of a node: name of its stream}``
    #: When each mark was made, and its operation, in the order of the program.
    marks: list[tuple[int, Operation]] = field(factory=list)
    edges: list[tuple[str, str]] = field(factory=list)  # pairs of names of marks
    _names: dict[int, str] = field(factory=dict)
    _host: list[str] = field(factory=list)
    _clock: int = 0

    def current(self) -> str:
        """Name of the current stream."""
        return MAIN if self.device is None else self.name(self.device.number())

    def name(self, stream: int) -> str:
        """Name of a stream; streams are numbered as they appear."""
        name = self._names.get(stream)
        if name is None:
            name = MAIN if not self._names else f"stream{len(self._names)}"
            self._names[stream] = name
            for mark in self._host:  # what the host waited for is over
                self.edges.append((mark, self._mark(name)))
        return name

    def now(self) -> int:
        """A moment after all others."""
        self._clock += 1
        return self._clock

    def ran(self, node: str) -> None:
        """A node ran on the current stream."""
        self.streams[node] = self.current()
        self.at[node] = self.now()

    def _mark(self, stream: str) -> str:
        at = self.now()
        mark = Operation(f"mark:{at}", stream=stream, op=MARK)
        self.marks.append((at, mark))
        return mark.name

    def record(self, stream: int | None = None) -> str:
        """An event is recorded on a stream, the current one if None. Returns its mark."""
        return self._mark(self.current() if stream is None else self.name(stream))

    def wait(self, mark: str, stream: int | None = None) -> None:
        """A stream, the current one if None, waits for a mark."""
        self.edges.append((mark, self.record(stream)))

    def host_waits(self, mark: str) -> None:
        """The host waits for a mark: whatever it starts from now on comes after."""
        self._host.append(mark)
        for name in list(self._names.values()):
            self.edges.append((mark, self._mark(name)))

    def device_waits(self) -> None:
        """The host waits for all streams."""
        for mark in [self._mark(name) for name in list(self._names.values())]:
            self.host_waits(mark)


class DeviceStreams:
    """The streams of an accelerator, for a session and its recording.

    Attributes:
        number: Gives the current stream as a number.
        number_of: Gives a stream as a number; None if it is none of an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self.number = self._device.stream_number
        self.number_of = self._device.number_of

    def current(self) -> Any:
        """The current stream."""
        return self._device.current_stream()

    def wait(self, stream: Any, other: Any) -> None:
        """Let ``stream`` wait for ``other``."""
        stream.wait_stream(other)

    @contextlib.contextmanager
    def watching(self, timeline: Timeline) -> Iterator[None]:
        """Look at the device's events and streams while inside."""

        def number(stream: Any) -> int | None:
            return self.number() if stream is None else self.number_of(stream)

        def mark_of(event: Any) -> str | None:
            owner, mark = getattr(event, "_symmplan", None) or (None, None)
            return mark if owner is timeline else None

        def recorded(event: Any, stream: Any = None) -> None:
            at = number(stream)
            event._symmplan = None if at is None else (timeline, timeline.record(at))

        def waited(event: Any, stream: Any = None) -> None:
            mark, at = mark_of(event), number(stream)
            if mark is not None and at is not None:
                timeline.wait(mark, at)

        def synchronized(event: Any) -> None:
            mark = mark_of(event)
            if mark is not None:
                timeline.host_waits(mark)

        def finished(stream: Any) -> None:
            at = self.number_of(stream)
            assert at is not None
            timeline.host_waits(timeline.record(at))

        with self._device.followed(
            {
                "Event.record": recorded,
                "Event.wait": waited,
                "Event.synchronize": synchronized,
                "Stream.synchronize": finished,
                "cuda.synchronize": lambda *_, **__: timeline.device_waits(),
            }
        ):
            yield


def with_streams(
    problem: Problem, timeline: Timeline, placed: Sequence[tuple[int, str]], declared: set[str]
) -> Problem:
    """The problem with each operation on its stream, and the marks among them.

    Args:
        problem: Its operations are in the order of the program.
        timeline: What was seen of streams.
        placed: When each operation ran, and on which stream, in the order of operations.
        declared: Names of the streams that `step` joins.
    """
    if len({stream for _, stream in placed}) <= 1:
        return problem
    operations = [
        evolve(operation, stream=stream)
        for operation, (_, stream) in zip(problem.operations, placed, strict=True)
    ]
    # An operation is no earlier than those before it; of one moment marks are first.
    moments = itertools.accumulate((at for at, _ in placed), max)
    timed = [*timeline.marks, *zip(moments, operations, strict=True)]
    timed.sort(key=operator.itemgetter(0))
    ends = [Operation(f"{_STEP}.{name}", stream=name, op=MARK) for name in sorted(declared)]
    step = Operation(_STEP, stream=_STEP, op=MARK)
    edges = [*timeline.edges, *((end.name, _STEP) for end in ends)]
    return evolve(problem, operations=[*(o for _, o in timed), *ends, step], edges=edges)


def unordered(problem: Problem) -> dict[str, str]:
    """Buffers that must be left out, as far as streams can be seen, and why."""
    if all(o.op != MARK for o in problem.operations):
        return {}
    order = order_of(problem)
    rank = {o.name: i for i, o in enumerate(problem.operations)}
    touches: dict[str, list[tuple[int, str, bool]]] = {}
    for access in problem.accesses:
        mine = touches.setdefault(access.buffer, [])
        mine.append((rank[access.operation], access.operation, access.write))
    found: dict[str, str] = {}
    for buffer, mine in touches.items():
        mine.sort()
        for i, (_, later, writes) in enumerate(mine):
            at = order.index[later]
            if not order.precedes(at, order.index[_STEP]):
                found[buffer] = (
                    f"{later} uses it on a stream that nothing waits for before session.step()"
                )
            for _, earlier, wrote in mine[:i]:
                if (writes or wrote) and not order.precedes(order.index[earlier], at):
                    found[buffer] = (
                        "no stream, event or wait that symmplan sees orders "
                        f"{earlier} before {later}"
                    )
    return found
