"""Find races: accesses of the same bytes, one of them a write, that nothing orders.

[Note: how races are found]
    Each rank counts the moments at which it told others how far it is (its own *component*), and
    knows of each other rank the last such moment that precedes what it does now: a vector clock.
    All arenas of a process have one clock: what orders accesses may be a meeting on another one.
    Clocks travel where ranks meet: with every arrival at a barrier or handshake on a watched
    segment, and with every start of a process group's collective. Who has met a peer joins the
    clock that the peer published there, and no later one, even if the peer is already ahead.

    Every access is first written down in shared memory (`symmplan.memory.race_log`), with the
    component at which it ends, and then compared with what the other ranks have written down: an
    access of a peer whose end this rank has not heard of is not ordered before this one. Of two
    racing ranks at least the one that comes second sees the other, whichever that is: a race is
    found also where its bytes happened to come out right. What an asynchronous collective accesses
    has no end until it was waited for.

    What is ordered by something that is not seen, such as a message through a store, is reported
    all the same if the bytes are touched; a plan does not count on such an order either.

[Note: who hears of a race]
    Who finds a race breaks all arenas that are watched, leaves word in their logs and raises. Peers
    that wait on an arena notice that it is broken; peers that go on look into the logs at their
    next access.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field

from symmplan.errors import RaceAccess, RaceError
from symmplan.memory.race_log import OPEN, Extent, RaceLog, Record
from symmplan.memory.touches import LIVE, RANGES, source_line

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from symmplan.memory.segment import Health
    from symmplan.model import Placement

    Listener = Callable[[str, int, Extent, str, bool], None]

__all__ = ["Meetings", "RaceDetector", "Touch", "WatchedSegment"]


@define(eq=False)
class Touch:
    """An access that lasts: that of an asynchronous collective, until its wait."""

    segment: WatchedSegment
    record: Record


@define(eq=False)
class WatchedSegment:
    """A segment whose accesses are written down.

    Attributes:
        name: The segment's.
        detector: Of its arena.
        log: This rank's log of it.
        health: Of its arena.
        placements: ``(first byte, end, buffer)`` of what the plan puts there.
        peers: The logs of the others, by rank.
    """

    name: str
    detector: RaceDetector
    log: RaceLog
    health: Health
    placements: Sequence[tuple[int, int, str]] = ()
    peers: dict[int, RaceLog] = field(factory=dict)
    _settled: dict[int, int] = field(factory=dict)
    _seen: set[Any] = field(factory=set)  # what was noted already, ...
    _seen_at: int = 0  # ... to end at this component
    _open: dict[int, Record] = field(factory=dict)

    def add_peer(self, rank: int, log: RaceLog, address: int, nbytes: int) -> None:
        """``rank`` has its bytes of the segment mapped here at ``address``."""
        if rank != self.detector.rank:
            self.peers[rank] = log
        RANGES.add(address, nbytes, self, rank)

    def touch(
        self, owner: int, extent: Extent, op: str, *, write: bool, lasting: bool = False
    ) -> Touch | None:
        """Write an access down, and see that it is ordered behind what the others did.

        Args:
            owner: Whose bytes.
            extent: Which.
            op: In which op.
            write: Whether they are written.
            lasting: Whether it goes on until `close`.

        Raises:
            RaceError: It is not. Or another rank found a race.
        """
        if self.detector.listener is not None:
            self.detector.listener(self.name, owner, extent, op, write)
            return None
        if self._seen_at != self.detector.now:
            self._seen.clear()
            self._seen_at = self.detector.now
        key = (owner, extent, write)
        if not lasting and key in self._seen:
            return None
        self.detector.check()
        text = (op, source_line(), self._buffers(extent))
        end = OPEN if lasting else self.detector.now
        number = self.log.append(owner, extent, end, text, write=write)
        self.detector.fence()
        for rank, log in self.peers.items():
            until = self.detector.knows(rank)
            first = log.settled(self._settled.get(rank, 0), until)
            self._settled[rank] = first
            for record in log.conflicts(first, until, owner, extent, write=write):
                self._race(owner, extent, text, rank, record, write=write)
        for record in self._open.values():  # of this rank
            if record.owner == owner and (write or record.write) and extent.overlap(record.extent):
                self._race(owner, extent, text, self.detector.rank, record, write=write)
        if not lasting:
            self._seen.add(key)
            return None
        return Touch(self, Record(number, owner, extent, write, text))

    def begin(self, record: Record) -> None:
        """A lasting access has begun: what this rank does by itself may race with it, too."""
        self._open[record.number] = record

    def close(self, record: Record) -> None:
        """It is over."""
        self._open.pop(record.number, None)
        self.log.close(record.number, self.detector.now)

    def _buffers(self, extent: Extent) -> str:
        names = [n for low, high, n in self.placements if low < extent.high and high > extent.low]
        return " or ".join(repr(n) for n in names[:3]) + (" or others" if len(names) > 3 else "")

    def _race(
        self,
        owner: int,
        extent: Extent,
        text: tuple[str, str, str],
        rank: int,
        record: Record,
        *,
        write: bool,
    ) -> None:
        both = extent.overlap(record.extent)
        assert both is not None
        mine = _access(self, self.detector.rank, owner, extent, text, write=write)
        theirs = _access(self, rank, owner, record.extent, record.text, write=record.write)
        self.detector.fail(mine, theirs, both)


def _access(
    segment: WatchedSegment,
    rank: int,
    owner: int,
    extent: Extent,
    text: tuple[str, str, str],
    *,
    write: bool,
) -> RaceAccess:
    op, line, buffer = text
    low, high = extent.low, extent.high
    return RaceAccess(rank, op, line, segment.name, owner, low, high, buffer, write)


class RaceDetector:
    """Finds the races on the segments of an arena. See [Note: how races are found].

    Args:
        rank: This process's rank in the default process group.
        size: How many ranks that has.

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

    # The segments.

    def watch(self, name: str, memory: mmap.mmap, start: int, health: Health) -> WatchedSegment:
        """A segment of this rank, in the file ``memory``, whose log begins at byte ``start``."""
        segment = WatchedSegment(name, self, RaceLog(memory, start, self.size), health)
        self.segments.append(segment)
        return segment

    def follow(self, placements: Mapping[str, Placement]) -> None:
        """What lies where from now on."""
        for segment in self.segments:
            segment.placements = [
                (p.offset, p.end, name)
                for name, p in placements.items()
                if p.segment == segment.name
            ]

    def begin(self) -> None:
        """All segments are there: accesses count from now on."""
        LIVE.append(self)

    def end(self) -> None:
        """The arena is gone. Idempotent."""
        if self in LIVE:
            LIVE.remove(self)
        RANGES.drop(self)
        self.segments.clear()

    # The clock.

    @property
    def now(self) -> int:
        """This rank's own component."""
        return int(self._clock[self.rank])

    def knows(self, rank: int) -> int:
        """Until when what ``rank`` did precedes what this rank does now."""
        return int(self._clock[rank])

    def fence(self) -> None:
        """What was written before is seen by all before what is read behind it."""
        with self._lock:  # taking a lock is a full barrier of memory
            pass

    def publish(self, segments: Iterable[WatchedSegment], key: int, number: int) -> None:
        """All that this rank did so far precedes what those do who join this."""
        for segment in segments:
            segment.log.publish(key, number, self._clock)
        self._clock[self.rank] += 1

    def join(self, log: RaceLog, key: int, number: int) -> None:
        """What a peer did until that meeting precedes what this rank does now."""
        found = log.published(key, number)
        # Too long ago: at most what it did since is taken for ordered, too.
        np.maximum(self._clock, log.clock if found is None else found, out=self._clock)

    # Collectives of a process group.

    def start(self, group: str) -> int:
        """This rank starts a collective of ``group``; returns which one that is."""
        number = self._counts[group] = self._counts.get(group, 0) + 1
        self.publish(self.segments, _key("group", group), number)
        return number

    def started(self, group: str, number: int, rank: int) -> bool:
        """Whether ``rank`` has started it, as far as one can see."""
        logs = self._logs_of(rank)
        return not logs or any(
            log.published(_key("group", group), number) is not None for log in logs
        )

    def met(self, group: str, number: int, ranks: Iterable[int]) -> None:
        """This rank's part in it ended after ``ranks`` started theirs."""
        for rank in ranks:
            for log in self._logs_of(rank)[:1]:
                self.join(log, _key("group", group), number)

    def _logs_of(self, rank: int) -> list[RaceLog]:
        return [s.peers[rank] for s in self.segments if rank in s.peers]

    # Races.

    def check(self) -> None:
        """See whether a race was found.

        Raises:
            RaceError: It was, here or on another rank.
        """
        for segment in _watched() if self._error is None else ():
            for rank, log in segment.peers.items():
                if log.failed:
                    self._error = _told(rank, log.failure)
        if self._error is not None:
            raise _again(self._error)

    def fail(self, mine: RaceAccess, theirs: RaceAccess, both: tuple[int, int]) -> None:
        """Raise, here and on the others. See [Note: who hears of a race].

        Raises:
            RaceError: Always.
        """
        low, high = both
        who = f"ranks {theirs.rank} and {mine.rank}"
        if mine.rank == theirs.rank:
            who = f"rank {mine.rank}, twice,"
        error = RaceError(
            f"{who} access bytes [{low}, {high}) of rank {mine.owner}'s segment "
            f"{mine.segment!r} with no order between them",
            expected="a barrier, or a collective that meets, behind the one and before the other",
            got=f"none\n    {theirs}\n    {mine}",
            fix="declare what the op does (handshake=, release=, what it mutates), wait for the "
            "collective in time, or call symmplan.handle(x).barrier() between the two",
            failed_rank=self.rank,
            segment=mine.segment,
            low=low,
            high=high,
            accesses=(mine, theirs),
        )
        self._error = error
        told = json.dumps({"what": error.what, "got": error.got, "accesses": (mine, theirs)})
        for segment in _watched():
            segment.log.fail(told.encode())
        for segment in _watched():
            segment.health.break_(error)
        raise _again(error)


def _watched() -> list[WatchedSegment]:
    """All watched segments of this process."""
    return [segment for detector in LIVE for segment in detector.segments]


#: By this process's rank and the number of ranks: its clock, for as long as it lives.
_CLOCKS: dict[tuple[int, int], NDArray[np.int64]] = {}


def _clock(rank: int, size: int) -> NDArray[np.int64]:
    clock = _CLOCKS.get((rank, size))
    if clock is None:
        clock = _CLOCKS[rank, size] = np.zeros(size, dtype=np.int64)
        # Later than that of a process that had this rank before, of which peers may still know.
        clock[rank] = time.time_ns() // 1000
    return clock


class Meetings:
    """Carries clocks through the barriers of one group on one segment.

    Args:
        segment: The segment.
        group: Torch's name of the group.
        ranks: Its ranks.
    """

    def __init__(self, segment: WatchedSegment, group: str, ranks: Sequence[int]) -> None:
        self._segment = segment
        self._key = _key("segment", group)
        self._ranks = [r for r in ranks if r != segment.detector.rank]

    def arrive(self, number: int) -> None:
        """This rank is about to arrive for the ``number``-th time."""
        self._segment.detector.publish([self._segment], self._key, number)

    def met(self, number: int) -> None:
        """All ranks have arrived."""
        for rank in self._ranks:
            log = self._segment.peers.get(rank)
            if log is not None:
                self._segment.detector.join(log, self._key, number)

    def check(self) -> None:
        """See `RaceDetector.check`."""
        self._segment.detector.check()


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
        expected="a barrier, or a collective that meets, behind the one and before the other",
        fix="see the error of that rank",
        failed_rank=rank,
        accesses=accesses,
    )


def _again(error: RaceError) -> RaceError:
    """The same error, without the frames that it has been through: they hold memory."""
    kind, arguments = error.__reduce__()
    again: RaceError = kind(*arguments)
    return again
