"""Threads that take small steps on the memory cells of several ranks, in every order that matters.

A thread is a list of steps: it reads a cell, writes a cell, posts a flag, or waits for flags. The
machine knows nothing else. `behaviours` says which steps an op consists of.

[Note: values]
    A value is a symbol, written as a number. Equal numbers mean the same label applied to the same
    values. So a written value tells everything that its thread had read, and two different
    histories never look alike by chance.

[Note: flags carry values]
    A flag is posted once and stays. A thread that waits for a flag may read the values that the
    poster had: this models bytes that travel over a wire or through a scratch buffer that no plan
    knows.

[Note: which orders]
    Two orders give every read the same value if they differ only in the order of accesses of
    different cells, or of reads of one cell. So one order of each such class is run: dynamic
    partial-order reduction with source sets and sleep sets (Abdulla, Aronis, Jonsson, Sagonas:
    Optimal Dynamic Partial Order Reduction, POPL 2014). After a run, each pair of accesses of one
    cell that nothing had ordered is also run in the opposite order. Steps are never disabled by
    others and no thread branches, which makes the rules short.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeAlias

from attrs import define, field, frozen

__all__ = [
    "Cell",
    "Explored",
    "Interleaver",
    "Post",
    "Read",
    "Step",
    "Symbols",
    "Thread",
    "Transition",
    "Wait",
    "Write",
    "lockstep",
    "search",
]

#: A byte cell: the rank whose memory it is in, and which of its cells.
Cell: TypeAlias = tuple[int, Hashable]

#: Something that is said once: any hashable value.
Flag: TypeAlias = Hashable


@frozen
class Read:
    """Add the value of a cell to what the thread knows."""

    cell: Cell


@frozen
class Write:
    """Put a value into a cell: a label and what it is made of, or the only one as it is.

    ``of`` says which of the values that the thread knows, counted from the first; None for all.
    """

    cell: Cell
    label: Hashable = None
    of: tuple[int, ...] | None = None


@frozen
class Post:
    """Say something, once and for good."""

    flag: Flag


@frozen
class Wait:
    """Go on when all flags have been said; ``takes``: and know what those knew who said them."""

    flags: tuple[Flag, ...]
    takes: bool = False


Step: TypeAlias = Read | Write | Post | Wait
#: The number of each value, which is a label and the values that it is applied to. They are counted
#: in this order. See [Note: values].
Symbols: TypeAlias = dict[Hashable, int]


@frozen
class Thread:
    """Steps that a rank runs in this order; for people, of which call, run and part they are."""

    rank: int
    call: str
    iteration: int
    part: str
    steps: tuple[Step, ...]


@frozen
class Transition:
    """One access that was made: by which step of which thread, and what was read or written.

    Attributes:
        past: Which events came before on any account: bit i for event i.
        led: The same without what it owes to accesses of this cell alone.
    """

    thread: int
    at: int
    cell: Cell
    write: bool
    value: int
    past: int
    led: int


@define(eq=False)
class Interleaver:
    """One run of some threads. Flags cost nothing: a thread posts and waits as soon as it can.

    That loses no interleaving: a flag once posted stays posted, so to post it earlier only lets
    others run, and they need not.

    Attributes:
        threads: What runs.
        symbols: The numbers of values, shared by runs whose values are compared.
        events: The accesses made so far, in order.
        ready: The threads that could make an access now.
    """

    threads: tuple[Thread, ...]
    symbols: Symbols
    events: list[Transition] = field(init=False, factory=list)
    ready: set[int] = field(init=False, factory=set)
    _at: list[int] = field(init=False)
    _known: list[tuple[int, ...]] = field(init=False)
    _past: list[int] = field(init=False)
    _memory: dict[Cell, int] = field(init=False, factory=dict)
    _touched: dict[Cell, list[int]] = field(init=False, factory=dict)
    _flags: dict[Flag, tuple[tuple[int, ...], int]] = field(init=False, factory=dict)
    _blocked: dict[Flag, list[int]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        count = len(self.threads)
        self._at = [0] * count
        self._known = [()] * count
        self._past = [0] * count
        self._settle(list(range(count)))

    @property
    def stuck(self) -> list[int]:
        """The threads that wait for what nobody has said."""
        return sorted(t for waiting in self._blocked.values() for t in waiting)

    def upcoming(self, thread: int) -> Read | Write:
        """The access that a ready thread makes next."""
        step = self.threads[thread].steps[self._at[thread]]
        assert isinstance(step, Read | Write)
        return step

    def step(self, thread: int) -> Transition:
        """Let a ready thread make its next access, and all threads their posts and waits."""
        step = self.upcoming(thread)
        write = isinstance(step, Write)
        led = past = self._past[thread]
        others = self._touched.setdefault(step.cell, [])
        for other in others:
            if write or self.events[other].write:
                past |= self.events[other].past | 1 << other
        if isinstance(step, Write):
            known = self._known[thread]
            parts = known if step.of is None else tuple(known[i] for i in step.of)
            if step.label is None:
                (value,) = parts
            else:
                value = self._number((step.label, parts))
            self._memory[step.cell] = value
        else:
            unwritten = self._number(("unwritten", step.cell))
            value = self._memory.get(step.cell, unwritten)
            self._known[thread] += (value,)
        event = Transition(thread, self._at[thread], step.cell, write, value, past, led)
        if write:
            others.clear()  # whoever follows the write follows what it followed
        others.append(len(self.events))
        self._past[thread] = past | 1 << len(self.events)
        self.events.append(event)
        self._at[thread] += 1
        self._settle([thread])
        return event

    def _number(self, meaning: Hashable) -> int:
        """The number of a value; a new one where it was never seen."""
        return self.symbols.setdefault(meaning, len(self.symbols))

    def _settle(self, threads: list[int]) -> None:
        while threads:
            thread = threads.pop()
            self.ready.discard(thread)
            steps = self.threads[thread].steps
            while self._at[thread] < len(steps):
                step = steps[self._at[thread]]
                if isinstance(step, Read | Write):
                    self.ready.add(thread)
                    break
                if isinstance(step, Post):
                    self._flags[step.flag] = (self._known[thread], self._past[thread])
                    threads += self._blocked.pop(step.flag, [])
                else:
                    missing = next((f for f in step.flags if f not in self._flags), None)
                    if missing is not None:
                        self._blocked.setdefault(missing, []).append(thread)
                        break
                    for flag in step.flags:
                        known, past = self._flags[flag]
                        self._known[thread] += known if step.takes else ()
                        self._past[thread] |= past
                self._at[thread] += 1


#: A read of a program, whatever memory it runs in: thread and step.
Site: TypeAlias = tuple[int, int]


@frozen
class Explored:
    """The result of all runs.

    Attributes:
        kind: ``"right"``, ``"wrong"``, ``"stuck"`` (some thread waits for ever) or ``"gave up"``.
        runs: How many orders were run.
        events: The run that is wrong or stuck, to its last access.
        expected: The value that the last read of a wrong run should have had.
        stuck: Indices of the threads that wait for ever.
    """

    kind: str
    runs: int
    events: tuple[Transition, ...] = ()
    expected: int | None = None
    stuck: tuple[int, ...] = ()


def lockstep(threads: tuple[Thread, ...], symbols: Symbols) -> dict[Site, int]:
    """The value of each read in threads whose order is fixed.

    Raises:
        ValueError: They do leave something to chance: accesses of one cell come in no fixed order.
    """
    machine = Interleaver(threads, symbols)
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
) -> Explored:
    """Run threads in all orders that matter; stop at the first wrong read.

    Args:
        threads: What runs.
        expected: The value that each read must have.
        symbols: Those that ``expected`` was made with.
        limit: How many runs before giving up.
    """
    frames: list[_Frame] = []
    for runs in range(1, limit + 1):
        machine = Interleaver(threads, symbols)
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
                return Explored("wrong", runs, tuple(machine.events), right)
        if not machine.ready and machine.stuck:
            stuck = tuple(machine.stuck)
            return Explored("stuck", runs, tuple(machine.events), stuck=stuck)
        for later, earlier_ones in enumerate(_races(machine.events, fresh), fresh):
            for earlier in earlier_ones:
                frames[earlier].want(_first_of(machine.events, earlier, later))
        while frames and not frames[-1].turn():
            frames.pop()
        if not frames:
            return Explored("right", runs)
    return Explored("gave up", limit)


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

    def passed(self, event: Transition) -> dict[int, Read | Write]:
        """The threads that still sleep after the chosen one's access."""
        return {
            thread: step
            for thread, step in self.asleep.items()
            if step.cell != event.cell or not (event.write or isinstance(step, Write))
        }


def _races(events: list[Transition], fresh: int = 0) -> list[list[int]]:
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


def _first_of(events: list[Transition], earlier: int, later: int) -> list[int]:
    """Threads of which one must go first where the earlier was, so that the later overtakes it."""
    behind = [i for i in range(earlier + 1, later) if not events[i].past >> earlier & 1]
    behind.append(later)
    mask = sum(1 << i for i in behind)
    return [events[i].thread for i in behind if not events[i].past & mask]
