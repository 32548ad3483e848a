"""Threads that take one small step at a time on the memory cells of several ranks.

A thread is a list of steps: it reads a cell, writes a cell, posts a flag, or waits for flags. That
is all the machine knows; what an op does as such steps is said in `behaviours`.

[Note: values]
    A value is a symbol, as a number: equal numbers mean the same label applied to the same values.
    So what a thread writes tells all that it had read, and two different histories never look
    alike by chance.

[Note: flags carry values]
    A flag is posted once and stays. Who waits for it may take what the poster knew: this is how
    bytes travel through a wire or a scratch buffer that no plan knows.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

from attrs import define, field, frozen

__all__ = [
    "Cell",
    "Event",
    "Machine",
    "Post",
    "Read",
    "Step",
    "Symbols",
    "Thread",
    "Wait",
    "Write",
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
    """Put a value into a cell.

    Attributes:
        cell: The cell.
        label: With the values that it is made of, what the value is; None to copy the only one.
        of: Which of the values that the thread knows, counted from the first, it is made of; None
            for all.
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
    """Go on when all of these have been said.

    Attributes:
        flags: What has to be said.
        takes: Whether the thread now knows what those knew who said it.
    """

    flags: tuple[Flag, ...]
    takes: bool = False


Step: TypeAlias = Read | Write | Post | Wait


@frozen
class Thread:
    """Steps that run in this order.

    Attributes:
        rank: The rank that runs it.
        call: Name of the call that it belongs to, for people.
        iteration: Which run of the program, from 0.
        part: Which part of the call, for people.
        steps: What it does.
    """

    rank: int
    call: str
    iteration: int
    part: str
    steps: tuple[Step, ...]


@define(eq=False)
class Symbols:
    """Numbers for values. See [Note: values]."""

    numbers: dict[Hashable, int] = field(factory=dict)
    meanings: list[Hashable] = field(factory=list)

    def number(self, meaning: Hashable) -> int:
        """The number of a value; a new one where it was never seen."""
        found = self.numbers.setdefault(meaning, len(self.meanings))
        if found == len(self.meanings):
            self.meanings.append(meaning)
        return found


@frozen
class Event:
    """One access that was made.

    Attributes:
        thread: Index of the thread.
        at: Index of the step in its thread.
        cell: The cell.
        write: Whether it was written.
        value: What was read or written.
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
class Machine:
    """One run of some threads. Flags cost nothing: a thread posts and waits as soon as it can.

    That loses no interleaving: a flag once posted stays posted, so to post it earlier only lets
    others run, and they need not.

    Attributes:
        threads: What runs.
        symbols: The numbers of values, shared by runs whose values are compared.
        events: The accesses made so far, in order.
    """

    threads: tuple[Thread, ...]
    symbols: Symbols
    events: list[Event] = field(init=False, factory=list)
    _at: list[int] = field(init=False)
    _known: list[tuple[int, ...]] = field(init=False)
    _past: list[int] = field(init=False)
    _memory: dict[Cell, int] = field(init=False, factory=dict)
    _touched: dict[Cell, list[int]] = field(init=False, factory=dict)
    _flags: dict[Flag, tuple[tuple[int, ...], int]] = field(init=False, factory=dict)
    _blocked: dict[Flag, list[int]] = field(init=False, factory=dict)
    _ready: set[int] = field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        count = len(self.threads)
        self._at = [0] * count
        self._known = [()] * count
        self._past = [0] * count
        self._settle(list(range(count)))

    @property
    def ready(self) -> set[int]:
        """The threads that could make an access now."""
        return self._ready

    @property
    def stuck(self) -> list[int]:
        """The threads that wait for what nobody has said."""
        return sorted(t for waiting in self._blocked.values() for t in waiting)

    def upcoming(self, thread: int) -> Read | Write:
        """The access that a ready thread makes next."""
        step = self.threads[thread].steps[self._at[thread]]
        assert isinstance(step, Read | Write)
        return step

    def step(self, thread: int) -> Event:
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
                value = self.symbols.number((step.label, parts))
            self._memory[step.cell] = value
        else:
            unwritten = self.symbols.number(("unwritten", step.cell))
            value = self._memory.get(step.cell, unwritten)
            self._known[thread] += (value,)
        event = Event(thread, self._at[thread], step.cell, write, value, past, led)
        if write:
            others.clear()  # whoever follows the write follows what it followed
        others.append(len(self.events))
        self._past[thread] = past | 1 << len(self.events)
        self.events.append(event)
        self._at[thread] += 1
        self._settle([thread])
        return event

    def _settle(self, threads: list[int]) -> None:
        while threads:
            thread = threads.pop()
            self._ready.discard(thread)
            steps = self.threads[thread].steps
            while self._at[thread] < len(steps):
                step = steps[self._at[thread]]
                if isinstance(step, Read | Write):
                    self._ready.add(thread)
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
