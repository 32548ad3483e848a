"""Find races: accesses of the same bytes, one of them a write, that nothing orders.

Code that accesses bytes calls `touch`. The call does nothing unless the bytes lie in a watched
segment.

[Note: how races are found]
    Each rank has a vector clock. It counts the moments at which it told others how far it is (its
    own *component*). For each other rank it knows the last such moment that precedes what it does
    now. All arenas of a process have one clock, because accesses in one arena may be ordered by a
    meeting in another. Clocks are passed on where ranks meet: at every arrival at a barrier or
    handshake on a watched segment, and at every start of a process group's collective. A rank that
    has met a peer joins the clock that the peer published for that meeting, and no later one, even
    if the peer is already ahead.

    Every access is first written down in shared memory (`symmplan.memory.race_log`), with the
    component at which it ends, and then compared with what the other ranks have written down: an
    access of a peer whose end this rank does not know of is not ordered before this one. Of two
    racing ranks, the one that comes second sees the other. So a race is also found when the bytes
    happened to come out right. The accesses of an asynchronous collective do not end before its
    wait.

    The detector does not see every kind of order, such as a message through a store. It reports
    accesses that are ordered only in that way. A plan does not count on such an order either.

[Note: who learns of a race]
    A rank that finds a race breaks all watched arenas, writes the race into their logs, and raises.
    Peers that wait on an arena notice that it is broken; peers that go on look into the logs at
    their next access.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib
from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from attrs import define, field

from symmplan.errors import RaceAccess, RaceError
from symmplan.memory.race_log import OPEN, AccessRecord, Extent, RaceLog
from symmplan.process import PROCESS

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from symmplan.memory.health import Health
    from symmplan.model import Placement

    Listener = Callable[[str, int, Extent, str, bool], None]

__all__ = ["RaceDetector", "WatchedSegment", "source_line", "touch", "touch_bytes"]

_EXPECTED = "a barrier, or a collective that synchronizes, behind the one and before the other"


#: Modules whose frames are not the program's.
_UNSEEN = ("symmplan", "torch", "contextlib")


def source_line() -> str:
    """The innermost frame that is neither torch's nor symmplan's; ``"file:line"``.

    Inside a compiled graph that runs op by op, the line that the node came from.
    """
    frame: Any = sys._getframe(1)
    code, line = PROCESS.thread.node or (None, "")
    while frame is not None:
        if frame.f_code is code:
            return line
        module = frame.f_globals.get("__name__", "torch")
        name = frame.f_code.co_filename
        if module.partition(".")[0] not in _UNSEEN and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@define(eq=False)
class WatchedSegment:
    """A segment whose accesses are written down."""

    name: str  # the segment's
    detector: RaceDetector  # of its arena
    log: RaceLog  # this rank's log of it
    health: Health  # of its arena
    #: ``(first byte, end, buffer)`` of what the plan puts there.
    placements: Sequence[tuple[int, int, str]] = ()
    peers: dict[int, RaceLog] = field(factory=dict)  # the logs of the others, by rank
    open: dict[int, AccessRecord] = field(factory=dict)  # this rank's accesses that last, by number
    _settled: dict[int, int] = field(factory=dict)
    _seen: set[Any] = field(factory=set)  # what was noted already, ...
    _seen_at: int = 0  # ... to end at this component

    def add_peer(self, rank: int, log: RaceLog, address: int, nbytes: int) -> None:
        """``rank`` has its bytes of the segment mapped here at ``address``."""
        if rank != self.detector.rank:
            self.peers[rank] = log
        self.detector.add_range(address, nbytes, self, rank)

    def touch(
        self, owner: int, extent: Extent, op: str, *, write: bool, lasting: bool = False
    ) -> AccessRecord | None:
        """Write an access of ``owner``'s bytes down; see that it is ordered behind what others did.

        Returns:
            The access, for `begin` and `end`, if it is ``lasting``, as that of an asynchronous
            collective until its wait; else None.

        Raises:
            RaceError: It is not. Or another rank found a race.
        """
        detector = self.detector
        if detector.listener is not None:
            detector.listener(self.name, owner, extent, op, write)
            return None
        if self._seen_at != detector.now:
            self._seen.clear()
            self._seen_at = detector.now
        key = (owner, extent, write)
        if not lasting and key in self._seen:
            return None
        detector.check()
        text = (op, source_line(), self._buffers(extent))
        end = OPEN if lasting else detector.now
        number = self.log.append(owner, extent, end, text, write=write)
        mine = AccessRecord(number, owner, extent, write, text)
        detector.fence()
        for rank, log in self.peers.items():
            until = detector.knows(rank)
            first = log.settled(self._settled.get(rank, 0), until)
            self._settled[rank] = first
            for record in log.conflicts(first, until, owner, extent, write=write):
                detector.fail(self, mine, rank, record)
        for record in self.open.values():  # of this rank
            if record.owner == owner and (write or record.write) and extent.overlap(record.extent):
                detector.fail(self, mine, detector.rank, record)
        if not lasting:
            self._seen.add(key)
            return None
        return mine

    def begin(self, lasting: AccessRecord) -> None:
        """Count this rank's own accesses as concurrent with it from now on."""
        self.open[lasting.number] = lasting

    def end(self, lasting: AccessRecord) -> None:
        """It is over."""
        self.open.pop(lasting.number, None)
        self.log.close(lasting.number, self.detector.now)

    def arrive(self, group: str, number: int) -> None:
        """This rank is about to arrive at a barrier of ``group`` for the ``number``-th time."""
        self.detector.publish([self], _key("segment", group), number)

    def met(self, group: str, number: int, ranks: Iterable[int]) -> None:
        """Those ranks, of the default process group, have arrived there, too."""
        for rank in ranks:
            if rank in self.peers:
                self.detector.join(self.peers[rank], _key("segment", group), number)

    def _buffers(self, extent: Extent) -> str:
        names = [n for low, high, n in self.placements if low < extent.high and high > extent.low]
        return " or ".join(repr(n) for n in names[:3]) + (" or others" if len(names) > 3 else "")


class RaceDetector:
    """Finds the races on the segments of an arena. See [Note: how races are found].

    ``rank`` and ``size`` are those of the default process group.

    Attributes:
        listener: Called with each access instead of comparing it, if it is set: with the segment's
            name, whose bytes, which, the op, and whether they are written.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.listener: Listener | None = None
        self.segments: list[WatchedSegment] = []
        self._clock = _clock(rank, size)
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._error: RaceError | None = None
        self._ranges: tuple[tuple[int, int, WatchedSegment, int], ...] = ()  # replaced as a whole

    def watch(self, name: str, memory: mmap.mmap, start: int, health: Health) -> WatchedSegment:
        """A segment of this rank, in the file ``memory``, whose log begins at byte ``start``."""
        segment = WatchedSegment(name, self, RaceLog(memory, start, self.size), health)
        self.segments.append(segment)
        return segment

    def follow(self, placements: Mapping[str, Placement]) -> None:
        """Set the placements that count from now on."""
        for segment in self.segments:
            named = ((p, name) for name, p in placements.items() if p.segment == segment.name)
            segment.placements = [(p.offset, p.end, name) for p, name in named]

    def begin(self) -> None:
        """Begin to count accesses: all segments exist."""
        PROCESS.detectors.append(self)

    def end(self) -> None:
        """The arena is gone. Idempotent."""
        if self in PROCESS.detectors:
            PROCESS.detectors.remove(self)
        self.segments.clear()

    def add_range(self, address: int, nbytes: int, segment: WatchedSegment, owner: int) -> None:
        """Some bytes of this process are those of rank ``owner`` in ``segment``."""
        if self.find(address) is None:
            one = (address, address + nbytes, segment, owner)
            self._ranges = tuple(sorted([*self._ranges, one], key=itemgetter(0)))

    def find(self, address: int) -> tuple[WatchedSegment, int, int] | None:
        """The segment in which a byte of this process lies, whose it is there, and its offset."""
        ranges = self._ranges
        at = bisect_right(ranges, address, key=itemgetter(0)) - 1
        if at < 0 or address >= ranges[at][1]:
            return None
        start, _, segment, owner = ranges[at]
        return segment, owner, address - start

    @property
    def now(self) -> int:
        """This rank's own component."""
        return int(self._clock[self.rank])

    def knows(self, rank: int) -> int:
        """Until when what ``rank`` did precedes what this rank does now."""
        return int(self._clock[rank])

    def fence(self) -> None:
        """Order writes before this call before reads after it, for all ranks."""
        with self._lock:  # taking a lock is a full barrier of memory
            pass

    def publish(self, segments: Iterable[WatchedSegment], key: int, number: int) -> None:
        """All that this rank did so far precedes what those do who join this."""
        for segment in segments:
            segment.log.publish(key, number, self._clock)
        self._clock[self.rank] += 1

    def join(self, log: RaceLog, key: int, number: int) -> None:
        """Join a peer's clock: its accesses until that meeting precede this rank's next ones."""
        found = log.published(key, number)
        # Too long ago: at most what it did since is taken for ordered, too.
        np.maximum(self._clock, log.clock if found is None else found, out=self._clock)

    def start(self, group: str) -> int:
        """This rank starts a collective of ``group``; returns which one that is."""
        number = self._counts[group] = self._counts.get(group, 0) + 1
        self.publish(self.segments, _key("group", group), number)
        return number

    def started(self, group: str, number: int, rank: int) -> bool:
        """Whether ``rank`` has started it, as far as one can see."""
        logs, key = self._logs_of(rank), _key("group", group)
        return not logs or any(log.published(key, number) is not None for log in logs)

    def met(self, group: str, number: int, ranks: Iterable[int]) -> None:
        """This rank's part in it ended after ``ranks`` started theirs."""
        for rank in ranks:
            for log in self._logs_of(rank)[:1]:
                self.join(log, _key("group", group), number)

    def _logs_of(self, rank: int) -> list[RaceLog]:
        return [s.peers[rank] for s in self.segments if rank in s.peers]

    def check(self) -> None:
        """See whether a race was found.

        Raises:
            RaceError: It was, here or on another rank.
        """
        if self._error is None:
            for segment in _watched():
                for rank, log in segment.peers.items():
                    if log.failure:
                        self._error = _told(rank, log.failure)
        if self._error is not None:
            raise _again(self._error)

    def fail(
        self, segment: WatchedSegment, mine: AccessRecord, rank: int, theirs: AccessRecord
    ) -> NoReturn:
        """Raise, here and on the others: a race of this rank with ``rank``, maybe with itself.

        See [Note: who learns of a race].

        Raises:
            RaceError: Always.
        """
        both = mine.extent.overlap(theirs.extent)
        assert both is not None
        low, high = both
        accesses = [_access(segment, *pair) for pair in ((self.rank, mine), (rank, theirs))]
        who = f"ranks {rank} and {self.rank}" if rank != self.rank else f"rank {rank}, twice,"
        error = RaceError(
            f"{who} access bytes [{low}, {high}) of rank {mine.owner}'s segment "
            f"{segment.name!r} with no order between them",
            expected=_EXPECTED,
            got=f"none\n    {accesses[1]}\n    {accesses[0]}",
            fix="declare what the op does (handshake=, release=, what it mutates), wait for the "
            "collective in time, or call symmplan.placed.handle(x).barrier() between the two",
            failed_rank=self.rank,
            segment=segment.name,
            low=low,
            high=high,
            accesses=tuple(accesses),
        )
        self._error = error
        told = json.dumps({"what": error.what, "got": error.got, "accesses": accesses})
        for watched in _watched():
            watched.log.fail(told.encode())
        for watched in _watched():
            watched.health.break_(error)
        raise _again(error)


def _access(segment: WatchedSegment, rank: int, record: AccessRecord) -> RaceAccess:
    (op, line, buffer), extent = record.text, record.extent
    where = (segment.name, record.owner, extent.low, extent.high, buffer)
    return RaceAccess(rank, op, line, *where, record.write)


def _watched() -> list[WatchedSegment]:
    """All watched segments of this process."""
    return [segment for detector in PROCESS.detectors for segment in detector.segments]


def _clock(rank: int, size: int) -> NDArray[np.int64]:
    clock: NDArray[np.int64] | None = PROCESS.clocks.get((rank, size))
    if clock is None:
        clock = PROCESS.clocks[rank, size] = np.zeros(size, dtype=np.int64)
        # Later than that of a process that had this rank before, of which peers may still know.
        clock[rank] = time.time_ns() // 1000
    return clock


def _key(kind: str, group: str) -> int:
    """Names the meetings of a group; never 0."""
    return 1 + zlib.crc32(f"{kind} {group}".encode())


def _told(rank: int, text: bytes) -> RaceError:
    """The race that a peer found. What it says is data."""
    try:
        data = json.loads(text)
        what, got = str(data["what"]), str(data["got"])
        accesses = [RaceAccess(*pair) for pair in data["accesses"]]
    except (ValueError, TypeError, KeyError):
        what, got, accesses = "a race was found", None, []
    return RaceError(
        f"rank {rank} found: {what}",
        got=got,
        expected=_EXPECTED,
        fix="look at the error of that rank",
        failed_rank=rank,
        accesses=accesses,
    )


def _again(error: RaceError) -> RaceError:
    """A copy of an error without the frames that it has been through: they hold memory."""
    kind, arguments = error.__reduce__()
    again: RaceError = kind(*arguments)
    return again


def touch(
    tensor: torch.Tensor, *, write: bool, op: str = "", lasting: bool = False
) -> tuple[WatchedSegment, AccessRecord] | None:
    """``tensor``, on the CPU, is accessed. Nothing if it lies in no watched segment.

    Args:
        tensor: What is accessed.
        write: Whether it is written.
        op: In which op; the one that runs if empty.
        lasting: Whether the access lasts until it is ended.

    Returns:
        An access that lasts, with the segment that is told of its end; else None.

    Raises:
        RaceError: The access is not ordered behind that of another rank.
    """
    found = _find(tensor.data_ptr())
    extent = None if found is None else Extent.of(tensor, found[2])
    if found is None or extent is None:
        return None
    segment, owner, _ = found
    record = segment.touch(owner, extent, op or _running(), write=write, lasting=lasting)
    return None if record is None else (segment, record)


def touch_bytes(address: int, nbytes: int, *, write: bool) -> None:
    """Bytes at an address are accessed. Nothing if they lie in no watched segment."""
    found = _find(address)
    if found is not None and nbytes:
        segment, owner, low = found
        segment.touch(owner, Extent(low, low + nbytes, nbytes), _running(), write=write)


def _find(address: int) -> tuple[WatchedSegment, int, int] | None:
    found = (detector.find(address) for detector in PROCESS.detectors)
    return next((one for one in found if one is not None), None)


def _running() -> str:
    ops = PROCESS.thread.ops
    return ops[-1] if ops else ""
