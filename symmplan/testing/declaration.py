"""Does an op do what its declaration says? Real ranks run it, and one is always late.

[Note: how a declaration is contradicted]
    The op runs on real ranks in shared memory, all its tensors in placements. Each rank notes when
    it began and ended a call, and when it touched which bytes of whom, by one clock that all
    processes of the machine share. In each call one rank is late: before it begins, or before each
    access of a peer's bytes; it goes on when the others have ended the call, or when nothing has
    moved for a while, because they wait for it. So a rank that does not wait runs ahead, and its
    accesses then contradict a declared fact. A fact that no call contradicted is not proven, but an
    op that waits does so in every schedule.

    Accesses are seen as by the race detector (`symmplan.runtime.watching`): those of ops that an op
    calls. Accesses of kernels through bare pointers are not seen.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from symmplan.errors import DeclarationError, PeerTimeoutError, RunError
from symmplan.registry import requirements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from symmplan.launcher.ranks import RankOutcome
    from symmplan.registry.schema import OpRef
    from symmplan.testing.late_ranks import Job, RankCall

__all__ = ["Contradiction", "DeclarationReport", "Fact", "check_declaration"]

#: What each fact says.
_SAYS = {
    "synchronizes": "a rank's call ends only after all ranks have begun theirs",
    "handshake": "no rank touches a symmetric byte before all ranks have begun the call",
    "release": "no rank ends the call before all ranks' accesses are over",
    "enters": "a rank's bytes are touched by peers only after that rank has begun the call",
    "releases": "a rank's bytes are not touched by peers after that rank has ended the call",
    "reads": "peers' bytes are touched of declared tensors only",
    "writes": "tensors are written that the schema says are written, and no others",
}
#: The facts that follow from ``handshake=True`` and ``release=True``; the last two always hold.
_OF_HANDSHAKE = ("handshake", "synchronizes", "enters")
_OF_RELEASE = ("release", "synchronizes", "releases")


@frozen
class Contradiction:
    """An observation that contradicts a fact.

    Attributes:
        text: What happened.
        rank: The rank that made the access; the one that ended its call, for ``"synchronizes"``.
        peer: Whose bytes it touched; the rank that had not begun, or had ended, if they were its
            own.
        tensor: Name of the argument or result; empty for ``"synchronizes"``.
        low: First byte of it that was touched.
        high: One behind the last byte.
        write: Whether they were written.
        op: In which op.
        line: Where, ``"file:line"``.
    """

    text: str
    rank: int
    peer: int
    tensor: str = ""
    low: int = 0
    high: int = 0
    write: bool = False
    op: str = ""
    line: str = ""


@frozen
class Fact:
    """One thing that can be said of an op.

    Attributes:
        name: ``"synchronizes"``, ``"handshake"``, ``"release"``, ``"enters"``, ``"releases"``,
            ``"reads"`` or ``"writes"``.
        says: What it says.
        declared: Whether the declaration says so.
        contradiction: What contradicts it; None if nothing did.
    """

    name: str
    says: str
    declared: bool
    contradiction: Contradiction | None = None

    @property
    def holds(self) -> bool:
        """Whether nothing contradicted it."""
        return self.contradiction is None


@frozen
class DeclarationReport:
    """What `check_declaration` found.

    Attributes:
        op: Qualified name of the op, with overload.
        ranks: How many ranks ran it.
        calls: How often each did.
        accesses: How many accesses of symmetric bytes were seen, of all ranks.
        facts: See `Fact`.
    """

    op: str
    ranks: int
    calls: int
    accesses: int
    facts: tuple[Fact, ...] = field(repr=False)

    @property
    def holds(self) -> bool:
        """Whether nothing contradicted what is declared."""
        return all(fact.holds for fact in self.facts if fact.declared)

    def fact(self, name: str) -> Fact:
        """The fact with that name."""
        return next(fact for fact in self.facts if fact.name == name)

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "is contradicted"
        count = f"{self.ranks} ranks, {self.calls} calls, {self.accesses} accesses seen"
        lines = [f"the declaration of {self.op} {verdict} ({count})"]
        if not self.accesses:
            lines.append("  nothing was seen of what it does: only ops that it calls can be")
        for fact in self.facts:
            if fact.declared:
                lines.append(f"  {'ok   ' if fact.holds else 'FALSE'} {fact.name}: {fact.says}")
            else:
                seen = "not contradicted" if fact.holds else "not so"
                lines.append(f"  -     {fact.name}: not declared, {seen}")
            if fact.declared and fact.contradiction is not None:
                lines.append(f"        but {fact.contradiction.text}")
        return "\n".join(lines)


def check_declaration(
    op: OpRef,
    inputs: Sequence[Any] | Mapping[str, Any] | Callable[..., Any],
    ranks: int = 3,
    *,
    setup: str | None = None,
    rounds: int = 2,
    timeout: float = 120.0,
) -> DeclarationReport:
    """Run a declared op on real ranks of this machine, and see whether its declaration holds.

    Processes are started for the ranks; this one takes no part. In each call another rank is late,
    at the start or before each access of a peer's bytes, so that whoever does not wait runs ahead.

    Args:
        op: What is declared: a name, an overload, a packet or a custom op.
        inputs: The op's arguments but for its group: in the order of the schema, or by name.
            Tensors on the CPU are examples: floating ones get other values on each rank and in
            each call. Or a function of ``(rank, ranks, call)`` that returns the arguments.
        ranks: How many ranks, 2 or more.
        setup: Name of a module that defines and declares the op, for ranks that are started anew.
            By default they are forked from this process, which knows it already.
        rounds: How often each rank is late in each way.
        timeout: Seconds for everything.

    Returns:
        The facts, and for each the first access that contradicts it.

    Raises:
        DeclarationError: The op is not declared, or there are fewer than two ranks.
        RunError: The op raised on a rank, which the message names, or a rank ended.
        PeerTimeoutError: The ranks did not finish in time; ``missing`` names them.

    Collective: no. It may be called where there is not a process group, and where there is one.
    """
    spec = requirements(op)
    if spec is None:
        raise DeclarationError(
            f"{op} is not declared",
            expected="an op with a declaration",
            got="none",
            fix="declare it with symmplan.symm_args or symmplan.register_symm_mem_args",
        )
    if ranks < 2:
        raise DeclarationError(
            f"a check needs several ranks, but {spec.op} was to run on {ranks}",
            expected="2 or more ranks",
            got=ranks,
            fix="pass ranks=3",
            op=spec.op,
        )
    from symmplan.testing.late_ranks import Job

    calls = _run(Job(spec.op, inputs, ranks, rounds, setup, 2 * timeout), timeout)
    return _judge(spec, calls, ranks)


def _run(job: Job, timeout: float) -> list[list[RankCall]]:
    """What each rank did, call by call."""
    from symmplan.launcher.ranks import RankPool
    from symmplan.testing.late_ranks import run_rank

    with tempfile.TemporaryDirectory(prefix="symmplan-progress-") as folder:
        progress = Path(folder) / "progress"
        progress.write_bytes(bytes(2 * 8 * job.ranks))
        pool = RankPool(
            job.ranks,
            call=(run_rank, job, str(progress)),
            method="fork" if job.setup is None else "spawn",
            timeout=timeout,
            grace=0.0,
            group_timeout=2 * timeout,
        )
        with pool:
            outcomes = pool.collect()
    for outcome in outcomes:
        if outcome.error is not None or outcome.exitcode is not None:
            raise _failed(job, outcome)
    late = [outcome.rank for outcome in outcomes if outcome.hung is not None]
    if late:
        raise _late(job, late, timeout)
    return [outcome.value for outcome in outcomes]


def _failed(job: Job, outcome: RankOutcome) -> RunError:
    error = outcome.error
    got = "it ended without a word"
    if error is not None:
        got = f"{error.kind}: {error.text}" + (f" at {error.where}" if error.where else "")
    return RunError(
        f"rank {outcome.rank} could not run {job.op}",
        expected="an op that runs on symmetric tensors",
        got=got,
        fix="correct the op, or its inputs",
        op=job.op,
        failed_rank=outcome.rank,
    )


def _late(job: Job, missing: list[int], timeout: float) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"{job.op} did not end within {timeout:g} s on rank {', '.join(map(str, missing))}",
        expected=f"all calls of {job.ranks} ranks",
        got=f"those of {job.ranks - len(missing)}",
        fix="check whether the op waits for something that no peer does, or increase timeout=",
        op=job.op,
        missing=tuple(missing),
        timeout=timeout,
    )


# What the calls say. Times are of one clock; an access is at least as late as it was noted.


def _judge(spec: Any, ranks: list[list[RankCall]], size: int) -> DeclarationReport:
    declared = {"reads", "writes"}
    declared |= set(_OF_HANDSHAKE) if spec.handshake else set()
    declared |= set(_OF_RELEASE) if spec.release else set()
    found: dict[str, Contradiction] = {}
    for number, calls in enumerate(zip(*ranks, strict=True)):
        for name, contradiction in _contradictions(calls):
            text = f"{contradiction.text} (call {number})"
            found.setdefault(name, evolve(contradiction, text=text))
    facts = tuple(Fact(n, says, n in declared, found.get(n)) for n, says in _SAYS.items())
    seen = sum(len(call.accesses) for calls in ranks for call in calls)
    return DeclarationReport(spec.op, size, len(ranks[0]), seen, facts)


def _contradictions(calls: Sequence[RankCall]) -> Iterator[tuple[str, Contradiction]]:
    """What contradicts which fact in one call of all ranks, in the order of time."""
    last = max(range(len(calls)), key=lambda r: calls[r].began)
    first = min(range(len(calls)), key=lambda r: calls[r].ended)
    if calls[first].ended < calls[last].began:
        text = f"rank {first} ended the call before rank {last} had begun it"
        yield "synchronizes", Contradiction(text, first, last)
    made = [(a.time, rank, a) for rank, call in enumerate(calls) for a in call.accesses]
    for when, rank, a in sorted(made, key=lambda m: m[:2]):
        mine, owner = a.owner == rank, calls[a.owner]
        what = f"rank {rank} {'wrote' if a.write else 'read'} bytes [{a.low}, {a.high}) of "
        what += "its own " if mine else f"rank {a.owner}'s "
        what += f"{a.tensor!r} in {a.op}" + (f" at {a.line}" if a.line else "")
        not_begun, over = " before rank {} had begun the call", " after rank {} had ended the call"
        for is_so, fact, how, peer in (
            (when < calls[last].began, "handshake", not_begun.format(last), last),
            (when > calls[first].ended, "release", over.format(first), first),
            (a.write and not a.mutable, "writes", ", which the schema does not say", a.owner),
            (not mine and when < owner.began, "enters", not_begun.format(a.owner), a.owner),
            (not mine and when > owner.ended, "releases", over.format(a.owner), a.owner),
            (not mine and not a.declared, "reads", ", which is not declared", a.owner),
        ):
            if is_so:
                whose = a.owner if not mine else peer
                where = (a.tensor, a.low, a.high, a.write, a.op, a.line)
                yield fact, Contradiction(what + how, rank, whose, *where)
