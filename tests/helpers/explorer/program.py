"""Tiny programs, the threads that they become, and whether one can compute a wrong value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from explorer.behaviours import BEHAVIOURS, CallParts
from explorer.calls import TinyBuffer, TinyCall
from explorer.machine import Post, Thread, Wait, lockstep, search

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from explorer.machine import Flag, Step, Symbols, Transition

__all__ = [
    "TinyBuffer",
    "TinyCall",
    "TinyPlan",
    "TinyProgram",
    "Verdict",
    "WrongRead",
    "explore",
    "threads_of",
]


@frozen
class TinyProgram:
    """A program that all ranks run repeatedly.

    Attributes:
        ranks: How many.
        buffers: Their memory.
        calls: The steps, in order.
        groups: ``{name: ranks of each group of that name}``; ``"all"`` has all ranks and is there
            without being listed.
        iterations: How often it runs.

    Raises:
        ValueError: A name is unknown or used twice, or an asynchronous call has no wait.
    """

    ranks: int
    buffers: tuple[TinyBuffer, ...]
    calls: tuple[TinyCall, ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(factory=dict)
    iterations: int = 2

    def __attrs_post_init__(self) -> None:
        for kind, values in (("buffers", self.buffers), ("calls", self.calls)):
            names = [v.name for v in values]
            if len({*names}) < len(names):
                raise ValueError(f"two {kind} have one name: {sorted(names)}")
        known = {b.name for b in self.buffers}
        pending: set[str] = set()
        for call in self.calls:
            if call.kind == "wait":
                if call.of not in pending:
                    raise ValueError(f"{call.name!r} waits for {call.of!r}, which is not under way")
                pending.remove(call.of)
                continue
            self.members(call.group)
            if call.kind == "barrier":
                continue
            if call.kind not in BEHAVIOURS:
                raise ValueError(f"{call.name!r}: kind {call.kind!r} is none of {[*BEHAVIOURS]}")
            known_algorithms = BEHAVIOURS[call.kind].transports
            if call.transport not in known_algorithms:
                what = f"{call.name!r}: transport {call.transport!r}"
                raise ValueError(f"{what} is none of {[*known_algorithms]}")
            if unknown := {*call.reads, *call.writes} - known:
                raise ValueError(f"{call.name!r} names unknown buffers {sorted(unknown)}")
            if call.asynchronous:
                pending.add(call.name)
        if pending:
            raise ValueError(f"nobody waits for {sorted(pending)}")

    def members(self, group: str) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group of a name.

        Raises:
            ValueError: There is none of that name.
        """
        if group in self.groups:
            return self.groups[group]
        if group != "all":
            raise ValueError(f"there is no group {group!r}, only {['all', *self.groups]}")
        return (tuple(range(self.ranks)),)


@frozen
class TinyPlan:
    """Where buffers lie, and what is run besides the program.

    Attributes:
        cells: ``{buffer: its cells}``; cells may be anything hashable, and buffers share bytes
            where they name the same cell. Buffers left out have memory of their own.
        barriers: Pairs (call, group): the group's ranks meet right before that call.
    """

    cells: Mapping[str, tuple[Hashable, ...]] = field(factory=dict)
    barriers: tuple[tuple[str, str], ...] = ()

    def of(self, buffer: TinyBuffer) -> tuple[Hashable, ...]:
        """The cells of a buffer."""
        return self.cells.get(buffer.name) or tuple((buffer.name, i) for i in range(buffer.cells))


def threads_of(program: TinyProgram, plan: TinyPlan, *, apart: bool = False) -> tuple[Thread, ...]:
    """What the ranks run.

    Args:
        program: The program.
        plan: Where its buffers lie.
        apart: Whether all ranks meet before and after each call, and every asynchronous call is
            waited for where it starts.
    """
    cells = {b.name: plan.of(b) for b in program.buffers}
    mains: list[list[Step]] = [[] for _ in range(program.ranks)]
    threads: list[Thread] = []
    for iteration in range(program.iterations):
        ends: dict[str, list[CallParts]] = {}
        for call in program.calls:
            where = (call.name, iteration)
            if apart:
                _meet(mains, program.members("all"), ("before", *where))
            for i, (before, group) in enumerate(plan.barriers):
                if before == call.name:
                    _meet(mains, program.members(group), ("barrier", i, *where))
            if call.kind == "wait":
                for parts in ends.pop(call.of, ()):
                    parts.end(mains)
                continue
            if call.kind == "barrier":
                _meet(mains, program.members(call.group), where)
                continue
            behaviour = BEHAVIOURS[call.kind]
            for ranks in program.members(call.group):
                parts = CallParts(call, iteration, ranks, cells, behaviour)
                behaviour.run(parts)
                threads += parts.threads
                for rank in ranks:
                    mains[rank].append(Post(parts.start(rank)))
                ends.setdefault(call.name, []).append(parts)
            if apart or not call.asynchronous:
                for parts in ends.pop(call.name):
                    parts.end(mains)
            if apart:
                _meet(mains, program.members("all"), ("after", *where))
    own = (Thread(rank, "", 0, "main", tuple(steps)) for rank, steps in enumerate(mains))
    return (*threads, *own)


def _meet(
    mains: list[list[Step]], groups: tuple[tuple[int, ...], ...], name: tuple[Flag, ...]
) -> None:
    for ranks in groups:
        for rank in ranks:
            mains[rank].append(Post((name, rank)))
            mains[rank].append(Wait(tuple((name, r) for r in ranks)))


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
        first = f"rank {self.rank}, {self.call!r}, iteration {self.iteration} reads {where}"
        more = (f"expected {self.expected}", f"got {self.saw}", *self.schedule)
        return "\n".join([first, *(f"  {line}" for line in more)])


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
        runs = f"{self.runs} run{'' if self.runs == 1 else 's'}"
        return str(self.wrong) if self.wrong else f"{self.kind} after {runs}"


def explore(
    program: TinyProgram,
    plan: TinyPlan | None = None,
    *,
    reference: TinyPlan | None = None,
    limit: int = 1000,
) -> Verdict:
    """Run a tiny program in every order that its calls allow.

    The right values are those of the program with every buffer in memory of its own, if all ranks
    meet before and after each call and calls do not overlap.

    Args:
        program: The program; up to 3 ranks, about 6 calls and 2 iterations are quick.
        plan: Where its buffers lie and which barriers are run besides it; by default, each has
            memory of its own and there are none.
        reference: Where buffers lie instead when what is right is computed.
        limit: How many orders to run before giving up.

    Raises:
        ValueError: A call reads what nobody has written, or its own parts race.

    Collective: no.

    >>> from explorer import TinyBuffer, TinyCall, TinyPlan, TinyProgram, explore
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
    right after 1 run
    """
    plan = plan or TinyPlan()
    symbols: Symbols = {}
    right = threads_of(program, reference or TinyPlan(), apart=True)
    expected = lockstep(right, symbols)
    meanings: list[Any] = list(symbols)
    for (reader, _), value in expected.items():
        meaning = meanings[value]
        if meaning[0] == "unwritten":
            raise ValueError(f"{right[reader].call!r} reads what nobody has written: {meaning[1]}")
    threads = threads_of(program, plan)
    outcome = search(threads, expected, symbols, limit)
    if outcome.kind != "wrong":
        return Verdict(outcome.kind, outcome.runs)
    last = outcome.events[-1]
    thread = threads[last.thread]
    owner, cell = last.cell
    assert outcome.expected is not None
    wrong = WrongRead(
        thread.rank,
        thread.call,
        thread.iteration,
        owner,
        cell,
        tuple(b.name for b in program.buffers if cell in plan.of(b)),
        _told(list(symbols)[last.value]),
        _told(list(symbols)[outcome.expected]),
        tuple(_schedule(outcome.events, threads)),
    )
    return Verdict("wrong", outcome.runs, wrong)


def _told(meaning: Any) -> str:
    """A value, for people."""
    if meaning[0] == "unwritten":
        return "what nobody has written"
    (made_by, kind, *where), _ = meaning
    named = isinstance(made_by, tuple) and len(made_by) == 2 and isinstance(made_by[1], int)
    who = f"{made_by[0]!r}, iteration {made_by[1]}" if named else str(made_by)
    what = {"made": "what {} made", "half done": "what {} had half done", "sum": "the sum of {}"}
    rank = f" on rank {where[0]}" if where and where[0] is not None else ""
    return what[kind].format(who) + rank


def _schedule(events: tuple[Transition, ...], threads: tuple[Thread, ...]) -> list[str]:
    """What came before the last event, one line for what one call does in a row."""
    last = events[-1]
    kept = [e for i, e in enumerate(events[:-1]) if last.past >> i & 1] + [last]
    lines: list[tuple[str, list[str]]] = []
    for event in kept:
        thread = threads[event.thread]
        head = f"rank {thread.rank}: {thread.call!r}, iteration {thread.iteration}:"
        if not lines or lines[-1][0] != head:
            lines.append((head, []))
        owner, cell = event.cell
        where = f"{cell}" if owner == thread.rank else f"{cell} of rank {owner}"
        lines[-1][1].append(f"{'writes' if event.write else 'reads'} {where}")
    return [f"{head} {', '.join(dict.fromkeys(acts))}" for head, acts in lines]
