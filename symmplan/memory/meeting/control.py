"""Counters in shared memory: how ranks of one host meet.

[Note: one writer]
    Each rank's shared file ends with a control area. Only its owner writes there, peers read:
    one counter for each group (how often the owner has arrived) and what the owner says about its
    current call. There is no lock that a killed process could keep, and nothing to reset.

    Beside its counter a rank publishes how far its program is (see `Meeting.tell`). These words are
    in the same cache line and cost nothing until a peer waits long enough to look at them.

    A call's notes have two slots, used alternately. A rank that is one arrival ahead writes the
    other slot, and it cannot be two ahead, because it waits for everyone in between.

[Note: memory order]
    "Arrived" must become visible after all bytes written before, and bytes must be read after
    "arrived" was seen. Counters are aligned 8-byte words, stored and loaded by numpy in one piece.
    On x86-64 that is enough: the processor neither reorders stores with stores nor
    loads with loads, glibc fences the streaming stores of its memcpy, and the compiler cannot see
    through Python. Elsewhere (AArch64) both sides take and give back a lock of their own: the
    release store followed by the acquiring load of the same word orders everything before against
    everything after. Plain Python has no cheaper fence.
"""

from __future__ import annotations

import itertools
import os
import platform
import threading
import time
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from symmplan.coordination.groups import ProcessIdentity, is_gone, listed
from symmplan.errors import PeerLostError, RunError
from symmplan.memory.segment import Rendezvous

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    import torch

    from symmplan.coordination.groups import Group
    from symmplan.memory.races import WatchedSegment

__all__ = ["ControlArea", "Meeting", "layout", "wait_until"]

_LINE = 8  # words of 8 bytes: a cache line, so that one rank's stores do not disturb another's
_PROGRESS = slice(1, 5)  # of a group's part, behind the counter
_NOTE = 64  # bytes of a call's note; the last 8 number the arrival, so that none passes for another
_STATUS, _HEADER = 0, _LINE
_WELL, _BROKEN, _RELEASED = 0, 1, 2

_SPINS = 300
_YIELD_SECONDS = 0.002
_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.00002, 0.0005
_LIVENESS_PERIOD = 0.05

_STRONG_ORDER = platform.machine() in {"x86_64", "AMD64"}


def _memory_barrier() -> Callable[[], None]:
    """A full memory barrier, for one thread at a time. See [Note: memory order]."""
    lock = threading.Lock()
    lock.acquire()

    def fence() -> None:
        if not _STRONG_ORDER:
            lock.release()
            lock.acquire()

    return fence


def _group_words(size: int) -> int:
    """Words of one group's part: its counter, then two slots."""
    return _LINE + 2 * _slot_words(size)


def _slot_words(size: int) -> int:
    """Words of a slot: a note, then two free words for each rank."""
    return _NOTE // 8 + -(-2 * size // _LINE) * _LINE


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The word at which each group's part of a control area starts, and the area's bytes."""
    *starts, end = itertools.accumulate(map(_group_words, sizes), initial=_HEADER)
    return starts, 8 * end


def wait_until(done: Callable[[], bool], look: Callable[[], None], timeout: float) -> bool:
    """Give the processor to others, first a little, then more; whether it was done in time.

    Args:
        done: Whether there is nothing to wait for any more.
        look: Called now and then; what it raises ends the wait.
        timeout: Seconds that it may take.
    """
    began = time.monotonic()
    next_look, pause = began + _LIVENESS_PERIOD, _SHORTEST_SLEEP
    while not done():
        now = time.monotonic()
        if now - began < _YIELD_SECONDS:
            os.sched_yield()
            continue
        if now >= next_look:
            look()
            next_look = now + _LIVENESS_PERIOD
        if now - began >= timeout:
            return False
        time.sleep(pause)
        pause = min(pause * 1.2, _LONGEST_SLEEP)
    return True


class ControlArea:
    """One rank's control area, mine or a peer's. See [Note: one writer]."""

    def __init__(self, memory: mmap.mmap, start: int, nbytes: int) -> None:
        self._words = np.frombuffer(memory, dtype=np.int64, offset=start, count=nbytes // 8)

    @property
    def status(self) -> int:
        """Whether the owner is well, gave up, or released."""
        return int(self._words[_STATUS])

    @property
    def because(self) -> list[int]:
        """Keys of the processes for which the owner gave up, if it was for others."""
        return [key for key in self._words[_STATUS + 1 : _HEADER].tolist() if key]

    def mark_broken(self, because: Sequence[int] = ()) -> None:
        """Tell the peers not to wait for this rank any more.

        Args:
            because: Keys of the processes that did not arrive; some of them, if there are many.
        """
        if self.status == _WELL:
            for i, key in enumerate(because[: _HEADER - 1]):
                self._words[_STATUS + 1 + i] = key
            self._words[_STATUS] = _BROKEN

    def mark_released(self) -> None:
        """Tell the peers that this rank has released its arena after an orderly end."""
        if self.status == _WELL:
            self._words[_STATUS] = _RELEASED

    def close(self) -> None:
        """Let go of the memory."""
        self._words = np.zeros(_HEADER, dtype=np.int64)

    def part(self, start: int, size: int) -> np.ndarray:
        """The words of a group of ``size`` ranks, from word ``start``.

        Raises:
            ValueError: The area ends before.
        """
        end = start + _group_words(size)
        if not 0 <= start < end <= len(self._words):
            raise ValueError(f"words [{start}, {end}) of {len(self._words)}")
        return self._words[start:end]


class Meeting(Rendezvous):
    """A meeting in shared memory: of every rank its bytes, its control area and its process.

    Of a group on several hosts those of this host meet, with the ranks ``near``. In
    each area the group's part begins at the word that ``starts`` says.
    ``on_failure`` is called with the error of a failed barrier, and with the keys of the processes
    that did not arrive. ``watched`` is told of arrivals and meetings, with the ranks
    ``world`` in the default process group, if the segment is watched for races.
    """

    memory = "shm"

    def __init__(
        self,
        group: Group,
        peers: Sequence[torch.Tensor],
        areas: Sequence[ControlArea],
        starts: Sequence[int],
        processes: Sequence[ProcessIdentity],
        *,
        segment: str,
        timeout: float,
        on_failure: Callable[[BaseException, Sequence[int]], None],
        watched: WatchedSegment | None = None,
        world: Sequence[int] = (),
        near: tuple[int, ...] = (),
    ) -> None:
        super().__init__(group, tuple(peers), near)
        near, size = self.near, group.size
        parts = [area.part(start, size) for area, start in zip(areas, starts, strict=True)]
        self._areas = dict(zip(near, areas, strict=True))
        self._processes = dict(zip(near, processes, strict=True))
        self._segment = segment
        self._timeout = timeout
        self._on_failure = on_failure
        self._because: list[int] = []
        self._looks: list[Callable[[], None]] = []
        self._watched, self._world = watched, world
        self._mine = parts[self.place]
        self._progress = [part[_PROGRESS] for part in parts]
        self._said = [0] * len(self._progress[self.place])
        counters = zip(near, (part[:1] for part in parts), strict=True)
        self._others = [(rank, counter) for rank, counter in counters if rank != group.rank]
        slots = [[part[_LINE + i * _slot_words(size) :] for part in parts] for i in range(2)]
        notes = [[memoryview(p[: _NOTE // 8].data).cast("B") for p in slot] for slot in slots]
        self._notes = [list(zip(near, of, strict=True)) for of in notes]
        self._free = [[p[_NOTE // 8 : _NOTE // 8 + 2 * size] for p in slot] for slot in slots]
        self._count = int(self._mine[0])
        self._fence = _memory_barrier()

    def barrier(self, timeout: float | None = None) -> None:
        """See `Rendezvous.barrier`: wait until every rank arrived as often as this one."""
        self._meet(timeout)

    def _meet(self, timeout: float | None = None) -> None:
        self._arrive()
        self._wait(self._timeout if timeout is None else timeout)
        if self._watched is not None:
            self._watched.met(self.group.torch_name, self._count, self._world)

    def enter(self, call: bytes, free: Sequence[int] = (), site: str = "") -> None:
        """See `Rendezvous.enter`.

        Raises:
            RunError: A rank says that it runs something else. Raised on every rank.
        """
        slot = (self._count + 1) & 1
        padded = self._write(call)
        if free:
            self._free[slot][self.place][: len(free)] = free
        self._meet()
        for other, theirs in self._notes[slot]:
            if theirs != padded:
                raise self._mismatch(other, padded, bytes(theirs), site)

    def refuse(self, call: bytes) -> None:
        """See `Rendezvous.refuse`."""
        self._write(call)
        self._arrive()

    def _write(self, note: bytes) -> bytes:
        count = self._count + 1
        padded = note.ljust(_NOTE - 8, b"\0") + count.to_bytes(8, "little")
        self._notes[count & 1][self.place][1][:] = padded
        return padded

    def tell(self, progress: Sequence[int]) -> None:
        """See `Rendezvous.tell`. The numbers become visible in order."""
        mine = self._progress[self.place]
        for i, value in enumerate(progress):
            if value != self._said[i]:
                self._fence()
                mine[i] = self._said[i] = value

    def told(self) -> list[tuple[int, ...]]:
        """See `Rendezvous.told`."""
        found = []
        for words in self._progress:
            last = []
            for i in reversed(range(len(words))):
                last.append(int(words[i]))
                self._fence()
            found.append(tuple(reversed(last)))
        return found

    def most_told(self, which: int) -> int:
        """See `Rendezvous.most_told`."""
        return max((int(words[which]) for words in self._progress), default=0)

    def free_words(self) -> list[list[int]]:
        """See `Rendezvous.free_words`."""
        return [words.tolist() for words in self._free[self._count & 1]]

    def watch(self, look: Callable[[], None]) -> None:
        """See `Rendezvous.watch`."""
        self._looks.append(look)

    def unwatch(self, look: Callable[[], None]) -> None:
        """See `Rendezvous.unwatch`."""
        if look in self._looks:
            self._looks.remove(look)

    def release(self) -> None:
        """Let go of the memory, mine and the peers'."""
        super().release()
        self._close()

    def forked(self) -> None:
        """This process was forked from the rank: its counter and notes are the rank's."""
        self._close()
        # Not looked for in each barrier: in the rank itself they stay what they are.
        for name in ("_arrive", "_write"):
            setattr(self, name, self._refuse)

    def _close(self) -> None:
        self._mine = np.zeros(1, dtype=np.int64)
        for held in (self._areas, self._progress, self._others, self._notes, self._free):
            held.clear()
        self._looks.clear()
        self._watched = None

    def _refuse(self, *_: object) -> NoReturn:
        self.group.require_own()
        raise AssertionError("this process is the rank")

    def _arrive(self) -> None:
        self._count += 1
        if self._watched is not None:
            self._watched.arrive(self.group.torch_name, self._count)
        self._fence()
        self._mine[0] = self._count

    def _wait(self, timeout: float) -> None:
        count = self._count
        for _, counter in self._others:
            for _ in range(_SPINS):
                if counter[0] >= count:
                    break
            else:
                self._wait_long(timeout)
                break
        self._fence()

    def _wait_long(self, timeout: float) -> None:
        """If the wait ends early, also by Ctrl-C, the peers' accesses are unknown."""
        try:
            if not wait_until(lambda: not self._absent(), self._look_for_the_dead, timeout):
                self._give_up(timeout)
        except BaseException as error:
            self._on_failure(error, self._because)
            raise

    def _absent(self) -> list[int]:
        return [rank for rank, counter in self._others if counter[0] < self._count]

    def _look_for_the_dead(self) -> None:
        """Raise if the wait cannot succeed.

        A rank that gave up counts even if it had arrived: it no longer takes part. One that
        arrived and then released its arena, or ended, did all that was asked of it.
        """
        for look in tuple(self._looks):
            look()
        for rank, counter in self._others:
            process, lost, because = self._processes[rank], [rank], []
            status = self._areas[rank].status
            if status == _BROKEN:
                because = self._areas[rank].because
                what, lost = self._gave_up(rank)
                fix = f"see the error of rank {listed(lost)}"
            elif counter[0] >= self._count:
                continue
            elif status == _RELEASED:
                what = f"rank {rank} released its arena"
                fix = "make the same calls on every rank, and release after the last"
            elif is_gone(process):
                what = f"rank {rank} (process {process.pid}) ended"
                fix = "find out why that process ended; its own output says more"
            else:
                continue
            # It may have arrived just before it ended, after we looked.
            if status != _BROKEN and counter[0] >= self._count:
                continue
            self._because = because or [process.key]
            if self._watched is not None:
                self._watched.detector.check()  # that a race was found says more
            raise PeerLostError(
                f"{what} while this rank waited on segment {self._segment!r}",
                fix=fix,
                **self.group.here,
                lost_rank=lost[0],
                segment=self._segment,
            )

    def _gave_up(self, rank: int) -> tuple[str, list[int]]:
        """That a rank gave up, for whom, and which ranks that leaves to be looked at."""
        names = {process.key: r for r, process in self._processes.items()}
        because = self._areas[rank].because
        named = {names[key] for key in because if key in names} - {rank}
        lost = sorted(named - {self.group.rank})
        if not because or named == {self.group.rank}:
            return f"rank {rank} gave up{' waiting for this one' if named else ''}", [rank]
        if not lost:
            return f"rank {rank} gave up waiting for a rank of another group", [rank]
        return f"rank {listed(lost)} did not come, rank {rank} gave up", lost

    def _give_up(self, timeout: float) -> None:
        missing = self._absent()
        if not missing:
            return
        self._because = [self._processes[rank].key for rank in missing]
        # Raised without a name: a frame that holds its own error would hold the memory, too.
        where = f"on segment {self._segment!r}"
        raise self.group.timed_out(missing, where, timeout, segment=self._segment)

    def _mismatch(self, other: int, mine: bytes, theirs: bytes, site: str) -> RunError:
        from symmplan.memory.meeting.callers import both_callers
        from symmplan.memory.meeting.calls import describe, is_refused

        where = ""
        if not is_refused(theirs):
            meeting = f"{self._segment}/{self._count}"
            where = f": {both_callers(self.group, other, meeting, site)}"
        return RunError(
            f"ranks {self.group.rank} and {other} make different calls on segment "
            f"{self._segment!r}{where}",
            expected=f"{describe(mine)} (rank {self.group.rank})",
            got=f"{describe(theirs)} (rank {other})",
            fix="make the same calls with the same sizes and offsets on every rank",
            **self.group.here,
            ranks=(self.group.rank, other),
            segment=self._segment,
        )
