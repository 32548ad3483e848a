"""Whether a tiny program can compute a wrong value, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from symmplan.testing.explorer.machine import Symbols
from symmplan.testing.explorer.program import TinyPlan, threads_of
from symmplan.testing.explorer.search import lockstep, search

if TYPE_CHECKING:
    from collections.abc import Hashable

    from symmplan.testing.explorer.machine import Cell, Event, Thread
    from symmplan.testing.explorer.program import TinyProgram
    from symmplan.testing.explorer.search import Outcome

__all__ = ["Verdict", "WrongRead", "explore"]


@frozen
class WrongRead:
    """A read that sees what it should not.

    Attributes:
        rank: Who reads.
        call: Name of the call that reads.
        iteration: In which run of the program, from 0.
        owner: The rank whose memory is read.
        cell: Which of its cells.
        buffers: Names of the buffers that lie there.
        saw: What is read.
        expected: What should be.
        schedule: How it comes about: who does what, in order; what has no part in it is left out.
    """

    rank: int
    call: str
    iteration: int
    owner: int
    cell: Hashable
    buffers: tuple[str, ...]
    saw: str
    expected: str
    schedule: tuple[str, ...]

    def __str__(self) -> str:
        where = f"cell {self.cell} of rank {self.owner} ({', '.join(self.buffers)})"
        return "\n".join(
            [
                f"rank {self.rank}, {self.call!r}, iteration {self.iteration} reads {where}",
                f"  expected {self.expected}",
                f"  got {self.saw}",
                *(f"  {line}" for line in self.schedule),
            ]
        )


@frozen
class Verdict:
    """What the explorer found.

    Attributes:
        kind: ``"right"``: no order of steps lets a read see a wrong value. ``"wrong"``: one does.
            ``"stuck"``: in some order a rank waits for ever. ``"gave up"``: not known.
        runs: How many orders were run; all others differ from these in nothing that counts.
        wrong: The wrong read, if there is one.
    """

    kind: str
    runs: int
    wrong: WrongRead | None = None

    def __str__(self) -> str:
        return str(self.wrong) if self.wrong else f"{self.kind} after {self.runs} runs"


def explore(
    program: TinyProgram,
    plan: TinyPlan | None = None,
    *,
    reference: TinyPlan | None = None,
    limit: int = 1000,
) -> Verdict:
    """Run a tiny program in every order that its calls allow.

    What is right is what the program computes with every buffer in memory of its own, all ranks
    meeting before and after each call, and no call under way while another runs.

    Args:
        program: The program; up to 3 ranks, about 6 calls and 2 iterations are quick.
        plan: Where its buffers lie and which barriers are run besides it; by default, each has
            memory of its own and there are none.
        reference: Where buffers lie instead when what is right is computed.
        limit: How many orders to run before giving up.

    Raises:
        ValueError: A call reads what nobody has written, or its own parts race.

    Collective: no.

    >>> from symmplan.testing import TinyBuffer, TinyCall, TinyPlan, TinyProgram, explore
    >>> program = TinyProgram(
    ...     ranks=2,
    ...     buffers=(TinyBuffer("x"), TinyBuffer("y"), TinyBuffer("out")),
    ...     calls=(
    ...         TinyCall("mul", "local", writes="x"),
    ...         TinyCall("peer_max", "read", reads="x", writes="y", handshake=True),
    ...         TinyCall("add", "local", reads="y", writes="out"),
    ...     ),
    ...     iterations=1,
    ... )
    >>> shared = {"x": ("s0",), "out": ("s0",)}
    >>> print(explore(program, TinyPlan(shared)))
    rank 1, 'peer_max', iteration 0 reads cell s0 of rank 0 (x, out)
      expected what 'mul', iteration 0 made on rank 0
      got what 'add', iteration 0 made on rank 0
      rank 0: 'mul', iteration 0: writes s0
      rank 1: 'mul', iteration 0: writes s0
      rank 0: 'peer_max', iteration 0: reads s0, reads s0 of rank 1, writes ('y', 0)
      rank 0: 'add', iteration 0: reads ('y', 0), writes s0
      rank 1: 'peer_max', iteration 0: reads s0 of rank 0
    >>> print(explore(program, TinyPlan(shared, barriers=(("add", "all"),))))
    right after 1 runs
    """
    plan = plan or TinyPlan()
    symbols = Symbols()
    right = threads_of(program, reference or TinyPlan(), apart=True)
    expected = lockstep(right, symbols)
    for (thread, _), value in expected.items():
        meaning = symbols.meanings[value]
        assert isinstance(meaning, tuple)
        if meaning[0] == "unwritten":
            raise ValueError(f"{right[thread].call!r} reads what nobody has written: {meaning[1]}")
    threads = threads_of(program, plan)
    outcome = search(threads, expected, symbols, limit)
    if outcome.kind != "wrong":
        return Verdict(outcome.kind, outcome.runs)
    names: dict[Hashable, list[str]] = {}
    for buffer in program.buffers:
        for cell in plan.of(buffer):
            names.setdefault(cell, []).append(buffer.name)
    return Verdict("wrong", outcome.runs, _told(outcome, threads, symbols, names))


def _told(
    outcome: Outcome,
    threads: tuple[Thread, ...],
    symbols: Symbols,
    names: dict[Hashable, list[str]],
) -> WrongRead:
    last = outcome.events[-1]
    thread = threads[last.thread]
    owner, cell = last.cell
    assert outcome.expected is not None
    return WrongRead(
        thread.rank,
        thread.call,
        thread.iteration,
        owner,
        cell,
        tuple(names[cell]),
        _meaning(symbols, last.value),
        _meaning(symbols, outcome.expected),
        tuple(_schedule(outcome.events, threads)),
    )


def _meaning(symbols: Symbols, value: int) -> str:
    meaning = symbols.meanings[value]
    assert isinstance(meaning, tuple)
    if meaning[0] == "unwritten":
        return "what nobody has written"
    (made_by, kind, *where), _ = meaning
    named = isinstance(made_by, tuple) and len(made_by) == 2 and isinstance(made_by[1], int)
    who = f"{made_by[0]!r}, iteration {made_by[1]}" if named else str(made_by)
    what = {"made": "what {} made", "half done": "what {} had half done", "sum": "the sum of {}"}
    rank = f" on rank {where[0]}" if where and where[0] is not None else ""
    return what[kind].format(who) + rank


def _schedule(events: tuple[Event, ...], threads: tuple[Thread, ...]) -> list[str]:
    """What came before the last event, one line for what one call does in a row."""
    last = events[-1]
    kept = [e for i, e in enumerate(events[:-1]) if last.past >> i & 1] + [last]
    lines: list[tuple[str, list[str]]] = []
    for event in kept:
        thread = threads[event.thread]
        head = f"rank {thread.rank}: {thread.call!r}, iteration {thread.iteration}:"
        if not lines or lines[-1][0] != head:
            lines.append((head, []))
        lines[-1][1].append(f"{'writes' if event.write else 'reads'} {_name(event.cell, thread)}")
    return [f"{head} {', '.join(dict.fromkeys(acts))}" for head, acts in lines]


def _name(cell: Cell, thread: Thread) -> str:
    owner, name = cell
    return f"{name}" if owner == thread.rank else f"{name} of rank {owner}"
