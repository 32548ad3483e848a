"""The conformance kit: strategies for problems, through which any packer can be run.

It alone needs Hypothesis (extra ``test``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from symmplan.errors import VerificationError
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.testing.oracles import conflicts

__all__ = [
    "Packer",
    "check_offsets",
    "check_packer",
    "interval_lists",
    "interval_problems",
    "problems",
]


@st.composite
def interval_lists(
    draw: st.DrawFn, *, max_buffers: int = 12, max_time: int = 12, max_bytes: int = 16
) -> list[tuple[str, int, int, int]]:
    """Lists for `Problem.from_intervals`: names, half-open intervals, sizes in bytes."""
    count = draw(st.integers(1, max_buffers))
    rows = []
    for i in range(count):
        begin = draw(st.integers(0, max_time - 1))
        end = draw(st.integers(begin + 1, max_time))
        rows.append((f"b{i}", begin, end, draw(st.integers(1, max_bytes))))
    return rows


def interval_problems(
    *, max_buffers: int = 12, max_time: int = 12, max_bytes: int = 16
) -> st.SearchStrategy[Problem]:
    """Totally ordered problems with alignment 1; arguments as for `interval_lists`."""
    return interval_lists(max_buffers=max_buffers, max_time=max_time, max_bytes=max_bytes).map(
        Problem.from_intervals
    )


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    max_operations: int = 6,
    max_buffers: int = 6,
    max_streams: int = 3,
    max_bytes: int = 12,
    aligns: tuple[int, ...] = (1, 2, 4),
    groups: tuple[str, ...] = ("g", "h"),
    remote: bool = True,
    constraints: bool = True,
    pins: bool = True,
) -> Problem:
    """Problems on a partial order: streams, edges, peers, and every kind of constraint.

    Constraints may contradict each other; then planning raises `PlanningError`.

    Args:
        draw: Given by Hypothesis.
        max_operations: Most operations.
        max_buffers: Most buffers.
        max_streams: Most streams.
        max_bytes: Largest size.
        aligns: Alignments in bytes to choose from.
        groups: Process groups to choose from.
        remote: Whether peers take part.
        constraints: Whether buffers are together, apart, persistent or use signal pads.
        pins: Whether some buffers have fixed offsets.
    """
    flags = st.booleans() if remote else st.just(False)
    streams = draw(st.integers(1, max_streams))
    count = draw(st.integers(1, max_operations))
    on = [draw(st.integers(0, streams - 1)) for _ in range(count)]
    operations = tuple(
        Operation(
            name=f"o{i}",
            stream=f"s{on[i]}",
            group=draw(st.sampled_from((None, *groups))) if remote else None,
            handshake=draw(flags),
            release=draw(flags),
            synchronizes=draw(flags),
            ends=draw(_ends(on, i)) if remote else (),
        )
        for i in range(count)
    )
    operations = _once(operations)
    forward = list(combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(forward), max_size=count)) if forward else []
    buffers: list[Buffer] = []
    accesses: list[Access] = []
    for i in range(draw(st.integers(1, max_buffers))):
        buffers.append(draw(_buffer(f"b{i}", max_bytes, aligns, groups, constraints, pins)))
        touched = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True))
        accesses.extend(
            Access(
                f"o{o}",
                f"b{i}",
                write=draw(st.booleans()),
                remote=draw(flags),
                enters=draw(flags),
                releases=draw(flags),
            )
            for o in touched
        )
    accesses += _at_ends(operations, accesses)
    together: list[tuple[str, str]] = []
    apart: list[tuple[str, str]] = []
    if constraints and len(buffers) > 1:
        pairs = [(a.name, b.name) for a, b in combinations(buffers, 2)]
        alike = [(a.name, b.name) for a, b in combinations(buffers, 2) if a.group == b.group]
        if alike and draw(st.integers(0, 3)) == 0:
            together = draw(st.lists(st.sampled_from(alike), max_size=2))
        if draw(st.integers(0, 3)) == 0:
            apart = draw(st.lists(st.sampled_from(pairs), max_size=2))
    shared = [groups] if len(groups) > 1 and draw(st.booleans()) else []
    return Problem(
        buffers=buffers,
        operations=operations,
        accesses=accesses,
        edges=[(f"o{a}", f"o{b}") for a, b in edges],
        together=together,
        apart=apart,
        shared_groups=shared,
    )


def _ends(on: list[int], at: int) -> st.SearchStrategy[tuple[str, ...]]:
    """Calls of the same stream that may end at an operation."""
    earlier = [f"o{i}" for i in range(at) if on[i] == on[at]]
    if not earlier:
        return st.just(())
    return st.one_of(st.just(()), st.sampled_from(earlier).map(lambda name: (name,)))


def _once(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """Each call ends once, and what ends one is none itself."""
    ended: set[str] = set()
    kept: list[Operation] = []
    for operation in operations:
        ending = {o.name for o in kept if o.ends}
        ends = tuple(name for name in operation.ends if name not in ended | ending)
        ended.update(ends)
        plain = evolve(operation, handshake=False, release=False, synchronizes=False)
        kept.append(evolve(plain if ends else operation, ends=ends))
    return tuple(kept)


def _at_ends(operations: tuple[Operation, ...], accesses: list[Access]) -> list[Access]:
    """What calls touch they touch until they end."""
    ends = {name: o.name for o in operations for name in o.ends}
    listed = {(a.operation, a.buffer) for a in accesses}
    missing = {(ends[o], b): None for o, b in sorted(listed) if o in ends}
    return [Access(o, b) for o, b in missing if (o, b) not in listed]


@st.composite
def _buffer(
    draw: st.DrawFn,
    name: str,
    max_bytes: int,
    aligns: tuple[int, ...],
    groups: tuple[str, ...],
    constraints: bool,
    pins: bool,
) -> Buffer:
    align = draw(st.sampled_from(aligns))
    rare = st.integers(0, 5).map(lambda k: k == 0) if constraints else st.just(False)
    pinned = pins and draw(st.integers(0, 9)) == 0
    return Buffer(
        name=name,
        nbytes=draw(st.integers(1, max_bytes)),
        group=draw(st.sampled_from(groups)),
        align=align,
        offset=align * draw(st.integers(0, 6)) if pinned else None,
        persistent=draw(rare),
        signal_pad=draw(rare),
    )


#: Gives byte offsets by buffer name for a problem with one group.
Packer = Callable[[Problem], Mapping[str, int]]


def check_offsets(problem: Problem, offsets: Mapping[str, int]) -> int:
    """Check byte offsets in one segment and return their peak in bytes.

    Args:
        problem: One group, at most some hundred operations and buffers.
        offsets: Offset in bytes by buffer name.

    Raises:
        VerificationError: A buffer is missing, unknown, misaligned, not where it is pinned or
            below zero, or two that conflict share bytes; ``kind`` says which.
    """
    buffers = {b.name: b for b in problem.buffers}
    clashes = conflicts(problem)

    def wrong(kind: str, what: str) -> VerificationError:
        return VerificationError(what, kind=kind, fix="correct the packer")

    for name in sorted(buffers.keys() ^ offsets.keys()):
        kind = "missing_buffer" if name in buffers else "unknown_buffer"
        raise wrong(kind, f"buffer {name!r} is in only one of problem and packing")
    for name, b in buffers.items():
        at = offsets[name]
        if at < 0:
            raise wrong("out_of_segment", f"buffer {name!r} begins at byte {at}")
        if at % b.align:
            raise wrong("misaligned", f"buffer {name!r} at byte {at} is not {b.align}-aligned")
        if b.offset not in (None, at):
            raise wrong("pin", f"buffer {name!r} at byte {at} is pinned at {b.offset}")
    for x, y in combinations(sorted(buffers), 2):
        low = max(offsets[x], offsets[y])
        high = min(offsets[x] + buffers[x].nbytes, offsets[y] + buffers[y].nbytes)
        if low < high and frozenset((x, y)) in clashes:
            raise wrong("overlap", f"buffers {x!r} and {y!r} share bytes [{low}, {high})")
    return max((offsets[n] + b.nbytes for n, b in buffers.items()), default=0)


def check_packer(pack: Packer, *, examples: int = 100) -> None:
    """Run a packer through the conformance kit.

    It must place every buffer, aligned, without a conflict; never need more than all buffers side
    by side; not depend on the order in which a problem lists its buffers; and reach the optimum of
    instances that any reasonable packer solves.

    Args:
        pack: Gives byte offsets by buffer name for a problem with one group and no constraints.
        examples: Generated problems of each kind.

    Raises:
        VerificationError: A packing is wrong.
        AssertionError: It is right but depends on the listing, or is absurdly large.
    """
    options = settings(max_examples=examples, deadline=None, database=None, derandomize=True)

    @options
    @given(interval_problems())
    def total(problem: Problem) -> None:
        _check_one(pack, problem)

    @options
    @given(problems(groups=("g",), remote=False, constraints=False, pins=False))
    def partial(problem: Problem) -> None:
        _check_one(pack, problem)

    total()
    partial()
    stairs = [(f"b{i}", i, i + 2, 8 + i) for i in range(40)]
    stack = [(f"b{i}", 0, 3, 1 + i) for i in range(20)]
    alone = [(f"b{i}", i, i + 1, 1 + i) for i in range(20)]
    for rows, best in ((stack, 210), (alone, 20)):
        problem = Problem.from_intervals(rows)
        assert check_offsets(problem, pack(problem)) == best
    problem = Problem.from_intervals(stairs)
    assert check_offsets(problem, pack(problem)) <= 4 * (8 + 39)


def _check_one(pack: Packer, problem: Problem) -> None:
    offsets = dict(pack(problem))
    peak = check_offsets(problem, offsets)
    padding = max(b.align for b in problem.buffers) - 1
    assert peak <= sum(b.nbytes + padding for b in problem.buffers)
    again = Problem(
        buffers=problem.buffers[::-1],
        operations=problem.operations,
        accesses=problem.accesses[::-1],
        edges=problem.edges[::-1],
    )
    assert dict(pack(again)) == offsets
