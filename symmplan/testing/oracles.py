"""Oracles: short, slow, obvious. For problems small enough to try everything."""

from __future__ import annotations

from itertools import combinations, permutations, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from symmplan.model import Plan, Problem

__all__ = [
    "conflicts",
    "happens_before",
    "heaviest_set",
    "linear_extensions",
    "lowest_peak",
    "unsynchronised",
]


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
    writers: dict[str, set[str]] = {}
    for access in problem.accesses:
        ops = remote.setdefault(access.buffer, {})
        ops[access.operation] = ops.get(access.operation, False) or access.remote
        writers.setdefault(access.buffer, set())
        if access.write:
            writers[access.buffer].add(access.operation)
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
    for names in sorted(dict.fromkeys(map(tuple, map(sorted, _pools(problem))))):
        ops = {}
        for name in names:
            for op, far in remote[name].items():
                ops[op] = ops.get(op, False) or far
        writes = set().union(*(writers[name] for name in names))
        for (a, a_far), (b, b_far) in product(ops.items(), repeat=2):
            changed = a in writes or (a_far and b in writes)
            apart = a_far != b_far and changed and (a, b) in before
            if apart and not _meets(plan, before, a, b, group[names[0]], 0):
                found.append((a, b, group[names[0]]))
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
