"""For tests of planners, ours and others': strategies, oracles and a conformance kit.

This is the only module that needs Hypothesis (extra ``test``).

>>> from symmplan.planner import plan
>>> from symmplan.testing import check_packer
>>> check_packer(lambda p: {n: x.offset for n, x in plan(p).placements.items()}, examples=5)
"""

from __future__ import annotations

from itertools import combinations, permutations, product
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from symmplan.errors import VerificationError
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner.instances import (
    cut_rectangle,
    fsdp_program,
    loosened,
    moe_program,
    steady_stream,
    stream_program,
    tensor_parallel_program,
    waves,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from symmplan.model import Plan

    Packer = Callable[[Problem], Mapping[str, int]]

__all__ = [
    "check_offsets",
    "check_packer",
    "conflicts",
    "cut_rectangle",
    "fsdp_program",
    "happens_before",
    "heaviest_set",
    "interval_lists",
    "interval_problems",
    "linear_extensions",
    "loosened",
    "lowest_peak",
    "moe_program",
    "problems",
    "steady_stream",
    "stream_program",
    "tensor_parallel_program",
    "unsynchronised",
    "waves",
]


# Strategies ---------------------------------------------------------------------------------------


@st.composite
def interval_lists(
    draw: st.DrawFn, *, max_buffers: int = 12, max_time: int = 12, max_bytes: int = 16
) -> list[tuple[str, int, int, int]]:
    """Lists for `Problem.from_intervals`: names, half-open intervals, sizes in bytes.

    Args:
        draw: Given by Hypothesis.
        max_buffers: Most buffers.
        max_time: Latest end.
        max_bytes: Largest size.
    """
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
        aligns: Alignments to choose from.
        groups: Process groups to choose from.
        remote: Whether peers take part.
        constraints: Whether buffers are together, apart, persistent or use signal pads.
        pins: Whether some buffers have fixed offsets.
    """
    flags = st.booleans() if remote else st.just(False)
    streams = draw(st.integers(1, max_streams))
    count = draw(st.integers(1, max_operations))
    operations = tuple(
        Operation(
            name=f"o{i}",
            stream=f"s{draw(st.integers(0, streams - 1))}",
            group=draw(st.sampled_from((None, *groups))) if remote else None,
            handshake=draw(flags),
            release=draw(flags),
        )
        for i in range(count)
    )
    forward = list(combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(forward), max_size=count)) if forward else []
    buffers: list[Buffer] = []
    accesses: list[Access] = []
    for i in range(draw(st.integers(1, max_buffers))):
        buffers.append(draw(_buffer(f"b{i}", max_bytes, aligns, groups, constraints, pins)))
        touched = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True))
        accesses.extend(
            Access(f"o{o}", f"b{i}", write=draw(st.booleans()), remote=draw(flags)) for o in touched
        )
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


@st.composite
def _buffer(  # noqa: PLR0917 - one caller
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


# Oracles: short, slow, obvious --------------------------------------------------------------------


def linear_extensions(problem: Problem) -> Iterator[tuple[str, ...]]:
    """All orders in which the operations may run; feasible for about eight operations.

    Args:
        problem: Its operations and edges are used.
    """
    earlier: dict[str, set[str]] = {o.name: set() for o in problem.operations}
    latest: dict[str, str] = {}
    for o in problem.operations:
        if o.stream in latest:
            earlier[o.name].add(latest[o.stream])
        latest[o.stream] = o.name
    for a, b in problem.edges:
        earlier[b].add(a)

    def extend(done: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if len(done) == len(earlier):
            yield done
        for name, needed in earlier.items():
            if name not in done and needed <= set(done):
                yield from extend((*done, name))

    return extend(())


def happens_before(problem: Problem) -> set[tuple[str, str]]:
    """Pairs (earlier, later) of operations that are in this order in every linear extension.

    Args:
        problem: Small enough for `linear_extensions`.
    """
    always: set[tuple[str, str]] | None = None
    for extension in linear_extensions(problem):
        ordered = set(combinations(extension, 2))
        always = ordered if always is None else always & ordered
    return always or set()


def conflicts(problem: Problem) -> set[frozenset[str]]:
    """Pairs of buffers that may not share a byte.

    Buffers that must share their offset count as one: their accesses are pooled, and they do not
    conflict with each other.

    Args:
        problem: Small enough for `linear_extensions`.
    """
    before = happens_before(problem)
    pools = _pools(problem)
    ops = {names: {a.operation for a in problem.accesses if a.buffer in names} for names in pools}
    persistent = {b.name for b in problem.buffers if b.persistent}
    found: set[frozenset[str]] = set()
    for x, y in combinations(pools, 2):
        ordered = all(p in before for p in product(ops[x], ops[y])) or all(
            p in before for p in product(ops[y], ops[x])
        )
        if not ordered or persistent & (x | y):
            found.update(frozenset(p) for p in product(x, y))
    return found


def _pools(problem: Problem) -> list[frozenset[str]]:
    pools = [frozenset((b.name,)) for b in problem.buffers]
    for a, b in problem.together:
        joined = frozenset().union(*(p for p in pools if a in p or b in p))
        pools = [p for p in pools if not p & joined] + [joined]
    return pools


def heaviest_set(sizes: Mapping[str, int], clashes: set[frozenset[str]]) -> int:
    """Largest sum of sizes of buffers that conflict pairwise, by trying all sets.

    Args:
        sizes: Bytes by name; about ten buffers.
        clashes: Conflicting pairs.
    """
    best = 0
    names = sorted(sizes)
    for count in range(1, len(names) + 1):
        for chosen in combinations(names, count):
            if all(frozenset(p) in clashes for p in combinations(chosen, 2)):
                best = max(best, sum(sizes[n] for n in chosen))
    return best


def lowest_peak(
    sizes: Mapping[str, int], clashes: set[frozenset[str]], aligns: Mapping[str, int] | None = None
) -> int:
    """The lowest peak there is, by trying all orders; about seven buffers.

    In some best packing nothing can be lowered, so placing its buffers by ascending offset, each
    on top of what it conflicts with, makes it again.

    Args:
        sizes: Bytes by name.
        clashes: Conflicting pairs.
        aligns: Alignments by name; 1 where left out.
    """
    best = sum(sizes.values()) + sum((aligns or {}).values())
    for order in permutations(sorted(sizes)):
        ends: dict[str, int] = {}
        for name in order:
            floor = max((e for m, e in ends.items() if frozenset((name, m)) in clashes), default=0)
            align = (aligns or {}).get(name, 1)
            ends[name] = -(-floor // align) * align + sizes[name]
            if ends[name] >= best:
                break
        else:
            best = max(ends.values())
    return best


def unsynchronised(plan: Plan) -> list[tuple[str, str, str]]:
    """Reuses of bytes that peers may still or already touch, as (operation, operation, group).

    The program is written down twice in a row with the plan's barriers, and every pair of accesses
    to common bytes is looked at.

    Args:
        plan: A plan of a small problem.
    """
    problem = plan.problem
    before = happens_before(problem)
    remote: dict[str, dict[str, bool]] = {}
    for access in problem.accesses:
        ops = remote.setdefault(access.buffer, {})
        ops[access.operation] = ops.get(access.operation, False) or access.remote
    group = {b.name: b.group for b in problem.buffers}
    pool = {n: p for p in _pools(problem) for n in p}
    found = []
    for x, y in product(sorted(remote), repeat=2):
        p, q = plan.placements[x], plan.placements[y]
        if p.segment != q.segment or p.offset >= q.end or q.offset >= p.end:
            continue
        for (a, a_remote), (b, b_remote) in product(remote[x].items(), remote[y].items()):
            wanted = ({group[x]} if a_remote else set()) | ({group[y]} if b_remote else set())
            for g in sorted(wanted):
                if y not in pool[x] and (a, b) in before and not _meets(plan, before, a, b, g, 0):
                    found.append((a, b, g))
                if not _meets(plan, before, a, b, g, 1):
                    found.append((a, b, g))
    return found


def _meets(plan: Plan, before: set[tuple[str, str]], a: str, b: str, group: str, runs: int) -> bool:
    """Whether the group meets after operation a and before the bytes of b, ``runs`` runs later."""

    def precedes(x: tuple[int, str], y: tuple[int, str]) -> bool:
        return x[0] < y[0] or (x[0] == y[0] and (x[1], y[1]) in before)

    barred = {x.before for x in plan.barriers if x.group == group}
    first, last = (0, a), (runs, b)
    for run in range(runs + 1):
        for o in plan.problem.operations:
            at = (run, o.name)
            starts = (o.handshake and o.group == group) or o.name in barred
            if starts and precedes(first, at) and (at == last or precedes(at, last)):
                return True
            if (
                o.release
                and o.group == group
                and (at == first or precedes(first, at))
                and precedes(at, last)
            ):
                return True
    return False


# Conformance --------------------------------------------------------------------------------------


def check_offsets(problem: Problem, offsets: Mapping[str, int]) -> int:
    """Check byte offsets in one segment and return their peak in bytes.

    Args:
        problem: One group, a small partial order or any total order.
        offsets: Offset in bytes by buffer name.

    Raises:
        VerificationError: A buffer is missing, unknown, misaligned, not where it is pinned or
            below zero, or two that conflict share bytes; ``kind`` says which.
    """
    buffers = {b.name: b for b in problem.buffers}

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
        if low < high and frozenset((x, y)) in _conflicts_of(problem):
            raise wrong("overlap", f"buffers {x!r} and {y!r} share bytes [{low}, {high})")
    return max((offsets[n] + b.nbytes for n, b in buffers.items()), default=0)


def _conflicts_of(problem: Problem) -> set[frozenset[str]]:
    if len({o.stream for o in problem.operations}) > 1 or problem.together:
        return conflicts(problem)
    place = {o.name: i for i, o in enumerate(problem.operations)}
    live: dict[str, list[int]] = {}
    for a in problem.accesses:
        live.setdefault(a.buffer, []).append(place[a.operation])
    persistent = {b.name for b in problem.buffers if b.persistent}
    return {
        frozenset((x, y))
        for x, y in combinations(sorted(live), 2)
        if {x, y} & persistent or (max(live[x]) >= min(live[y]) and max(live[y]) >= min(live[x]))
    }


def check_packer(
    pack: Packer, *, examples: int = 100, alignment: bool = True, partial_order: bool = True
) -> None:
    """Run a packer through the conformance kit.

    It must place every buffer, aligned, without a conflict; never need more than all buffers side
    by side; not depend on the order in which a problem lists its buffers; and reach the optimum of
    instances that any reasonable packer solves.

    Args:
        pack: Gives byte offsets by buffer name for a problem with one group and no constraints.
        examples: Generated problems of each kind.
        alignment: Whether the packer supports alignments other than 1.
        partial_order: Whether it supports more than one stream.

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
    @given(
        problems(
            max_streams=3 if partial_order else 1,
            aligns=(1, 2, 4) if alignment else (1,),
            groups=("g",),
            remote=False,
            constraints=False,
            pins=False,
        )
    )
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
    assert check_offsets(problem, pack(problem)) <= 2 * (8 + 38) + 40


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
