"""Runs threads in every order that matters, until a read sees what it should not.

[Note: which orders]
    Two orders that differ only in how accesses of different cells, or reads of one cell, lie
    between each other give every read the same value. So one of each such class is run: dynamic
    partial-order reduction with source sets and sleep sets (Abdulla, Aronis, Jonsson, Sagonas:
    Optimal Dynamic Partial Order Reduction, POPL 2014). After a run, each pair of accesses of one
    cell that nothing had kept in this order is run the other way round, too. Steps are never
    disabled by others and no thread branches, which makes the rules short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field, frozen

from symmplan.testing.explorer.machine import Event, Machine, Symbols, Write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from symmplan.testing.explorer.machine import Cell, Read, Thread

__all__ = ["Outcome", "Site", "lockstep", "search"]

#: A read of a program, whatever memory it runs in: thread and step.
Site = tuple[int, int]


@frozen
class Outcome:
    """What all runs together show.

    Attributes:
        kind: ``"right"``, ``"wrong"``, ``"stuck"`` (some thread waits for ever) or ``"gave up"``.
        runs: How many orders were run.
        events: The run that is wrong or stuck, to its last access.
        expected: What the last read of a wrong run should have seen.
        stuck: Indices of the threads that wait for ever.
    """

    kind: str
    runs: int
    events: tuple[Event, ...] = ()
    expected: int | None = None
    stuck: tuple[int, ...] = ()


def lockstep(threads: tuple[Thread, ...], symbols: Symbols) -> dict[Site, int]:
    """What each read sees in threads that leave nothing to chance.

    Raises:
        ValueError: They do leave something to chance: accesses of one cell come in no fixed order.
    """
    machine = Machine(threads, symbols)
    while machine.ready:
        machine.step(min(machine.ready))
    assert not machine.stuck
    for later, earlier_ones in enumerate(_races(machine.events)):
        event = machine.events[later]
        for earlier in earlier_ones:
            calls = [threads[t].call for t in (machine.events[earlier].thread, event.thread)]
            raise ValueError(f"{calls[0]!r} and {calls[1]!r} race for cell {event.cell} by nature")
    return {(e.thread, e.at): e.value for e in machine.events if not e.write}


def search(
    threads: tuple[Thread, ...], expected: Mapping[Site, int], symbols: Symbols, limit: int
) -> Outcome:
    """Run threads in all orders that matter; stop at the first wrong read.

    Args:
        threads: What runs.
        expected: What each read must see.
        symbols: Those that ``expected`` was made with.
        limit: How many runs before giving up.
    """
    frames: list[_Frame] = []
    for runs in range(1, limit + 1):
        machine = Machine(threads, symbols)
        fresh = max(len(frames) - 1, 0)
        taken = 0
        while True:
            if taken == len(frames):
                asleep = frames[-1].passed(machine.events[-1]) if frames else {}
                choice = min((t for t in machine.ready if t not in asleep), default=None)
                if choice is None:
                    break
                frames.append(_Frame(asleep, choice))
            frame = frames[taken]
            frame.step = machine.upcoming(frame.chosen)
            event = machine.step(frame.chosen)
            taken += 1
            right = event.value if event.write else expected[event.thread, event.at]
            if event.value != right:
                return Outcome("wrong", runs, tuple(machine.events), right)
        if not machine.ready and machine.stuck:
            stuck = tuple(machine.stuck)
            return Outcome("stuck", runs, tuple(machine.events), stuck=stuck)
        for later, earlier_ones in enumerate(_races(machine.events, fresh), fresh):
            for earlier in earlier_ones:
                frames[earlier].want(_first_of(machine.events, earlier, later))
        while frames and not frames[-1].turn():
            frames.pop()
        if not frames:
            return Outcome("right", runs)
    return Outcome("gave up", limit)


@define(eq=False)
class _Frame:
    """One choice of a run.

    Attributes:
        asleep: Threads that need not go first here, as an order that was run shows the same, with
            their next access.
        chosen: The thread that goes now.
        step: Its access.
        wanted: Threads that are to go first in some order.
    """

    asleep: dict[int, Read | Write]
    chosen: int
    step: Read | Write | None = field(init=False, default=None)
    wanted: set[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.wanted = {self.chosen}

    def want(self, threads: list[int]) -> None:
        """Let one of these go first, too, unless one of them has or will."""
        if not self.wanted.intersection(threads):
            self.wanted.add(threads[0])

    def turn(self) -> bool:
        """Choose another thread; False where there is none left."""
        assert self.step is not None
        self.asleep[self.chosen] = self.step
        left = sorted(self.wanted - self.asleep.keys())
        if left:
            self.chosen = left[0]
        return bool(left)

    def passed(self, event: Event) -> dict[int, Read | Write]:
        """The threads that still sleep after the chosen one's access."""
        return {
            thread: step
            for thread, step in self.asleep.items()
            if step.cell != event.cell or not (event.write or isinstance(step, Write))
        }


def _races(events: list[Event], fresh: int = 0) -> list[list[int]]:
    """For each access from ``fresh`` on, those of the same cell that only happened to be before."""
    found: list[list[int]] = []
    touched: dict[Cell, list[int]] = {}
    for later, event in enumerate(events):
        others = touched.setdefault(event.cell, [])
        if later >= fresh:
            found.append([])
            known = event.led
            for i in reversed(others):
                other = events[i]
                if other.write or event.write:
                    if not known >> i & 1:
                        found[-1].append(i)
                    known |= other.past | 1 << i
                if other.write:
                    break  # all before it came before it
        others.append(later)
    return found


def _first_of(events: list[Event], earlier: int, later: int) -> list[int]:
    """Threads of which one must go first where the earlier was, so that the later overtakes it."""
    behind = [i for i in range(earlier + 1, later) if not events[i].past >> earlier & 1]
    behind.append(later)
    mask = sum(1 << i for i in behind)
    return [events[i].thread for i in behind if not events[i].past & mask]
