"""Oracles: short, slow, obvious. For problems small enough to try everything."""

from __future__ import annotations

import functools
from itertools import combinations, permutations, product
from typing import TYPE_CHECKING, Any

import networkx as nx

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
        problem: Its `Problem.graph` is used.
    """
    return map(tuple, nx.all_topological_sorts(problem.graph()))


def happens_before(problem: Problem) -> set[tuple[str, str]]:
    """Pairs (earlier, later) of operations that are in this order in every linear extension.

    Args:
        problem: Its `Problem.graph` is used.
    """
    return set(nx.transitive_closure_dag(problem.graph()).edges)


def conflicts(problem: Problem) -> set[frozenset[str]]:
    """Pairs of buffers that may not share a byte.

    Buffers that must share their offset count as one: their accesses are pooled, and they do not
    conflict with each other.

    Args:
        problem: At most some hundred operations and buffers.
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
    graph = nx.Graph(problem.together)
    graph.add_nodes_from(b.name for b in problem.buffers)
    return [frozenset(pool) for pool in nx.connected_components(graph)]


def heaviest_set(sizes: Mapping[str, int], clashes: set[frozenset[str]]) -> int:
    """Largest sum of sizes of buffers that conflict pairwise.

    Args:
        sizes: Bytes by name; about a hundred buffers.
        clashes: Conflicting pairs.
    """
    graph = nx.Graph(tuple(p) for p in clashes)
    for name, nbytes in sizes.items():
        graph.add_node(name, nbytes=nbytes)
    return int(nx.max_weight_clique(graph, "nbytes")[1])


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


#: Who are the groups of a plan, by name, among four ranks: rows, columns and all; or one peer each
#: of rank 0, the others alone. In rows and columns several paths join two ranks.
_MEMBERS = (
    (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)),
    (((0, 1), (2,), (3,)), ((0, 2), (1,), (3,)), ((0, 3), (1,), (2,))),
)


def unsynchronised(plan: Plan) -> list[tuple[str, str, int, tuple[int, int]]]:
    """Accesses of common bytes that nothing orders: (operation, operation, rank, makers).

    The program is written down for four ranks, twice in a row, with the plan's barriers, for each
    of two divisions of the ranks into groups. Its moments are the starts and ends of calls on each
    rank, and of each rank's accesses of each rank's bytes; what must come before what is followed
    from moment to moment.

    Args:
        plan: A plan of a small problem with at most three groups.
    """
    before = happens_before(plan.problem)
    return [found for members in _MEMBERS for found in _unordered(plan, before, members)]


def _unordered(
    plan: Plan, before: set[tuple[str, str]], members: Sequence[Sequence[tuple[int, ...]]]
) -> list[tuple[str, str, int, tuple[int, int]]]:
    world = _World(plan, before, members)
    pool = {n: p for p in _pools(plan.problem) for n in p}
    found: list[tuple[str, str, int, tuple[int, int]]] = []
    for (x, a), (y, b) in product(world.touches, repeat=2):
        p, q = plan.placements[x], plan.placements[y]
        if p.segment != q.segment or p.offset >= q.end or q.offset >= p.end:
            continue
        one = y in pool[x]
        if one and not (world.writes(a, pool[x]) or world.writes(b, pool[x])):
            continue
        for runs in (0, 1):
            if not runs and (world.end(a), b) not in before:
                continue
            makers = product(world.makers(x, a), world.makers(y, b))
            for (maker, rank), (other, same) in makers:
                first = ("done", 0, a, x, maker, rank)
                second = ("touch", runs, b, y, other, same)
                if rank == same and second not in world.after(first):
                    found.append((a, b, rank, (maker, other)))
    return found


class _World:
    """The moments of a plan's program on four ranks. See `unsynchronised`."""

    def __init__(
        self, plan: Plan, before: set[tuple[str, str]], members: Sequence[Sequence[tuple[int, ...]]]
    ) -> None:
        self.plan = plan
        self.calls = {o.name: o for o in plan.problem.operations}
        names = sorted({b.group for b in plan.problem.buffers})
        self.members = dict(zip(names, members, strict=False))
        self.group = {b.name: b.group for b in plan.problem.buffers}
        listed = {(a.buffer, a.operation) for a in plan.problem.accesses}
        #: Buffers and the calls that touch them; the end of a call is no touch of its own.
        self.touches = sorted(
            (n, o) for n, o in listed if not any((n, s) in listed for s in self.calls[o].ends)
        )
        #: What comes before what. From an access nothing follows: whether it happens is not known.
        self.order = nx.DiGraph()
        self.after: Any = functools.cache(functools.partial(nx.descendants, self.order))
        for rank, runs in product(range(4), (0, 1)):
            self._program(rank, runs, before)
        for runs, (name, op) in product((0, 1), self.touches):
            self._accesses(runs, name, op)

    def end(self, op: str) -> str:
        return next((o.name for o in self.calls.values() if op in o.ends), op)

    def writes(self, op: str, names: frozenset[str]) -> bool:
        own = {(n, o) for n in names if (n, op) in self.touches for o in (op, self.end(op))}
        accesses = self.plan.problem.accesses
        return any(a.write for a in accesses if (a.buffer, a.operation) in own)

    def peers(self, group: str | None, rank: int) -> tuple[int, ...]:
        sets = self.members.get(group or "", ())
        return next((s for s in sets if rank in s), (rank,))

    def makers(self, buffer: str, op: str) -> list[tuple[int, int]]:
        """(who, whose bytes) of the accesses of a buffer by a call."""
        found = [a for a in self.plan.problem.accesses if (a.buffer, a.operation) == (buffer, op)]
        far = any(a.remote for a in found)
        if not far:
            return [(r, r) for r in range(4)]
        return [(m, r) for r in range(4) for m in self.peers(self.group[buffer], r)]

    def _program(self, rank: int, run: int, before: set[tuple[str, str]]) -> None:
        """Order on one rank, and where it meets others."""
        for name, op in self.calls.items():
            start, over = ("start", run, name, rank), ("over", run, self.end(name), rank)
            self.order.add_edge(start, ("over", run, name, rank))
            self.order.add_edge(start, over)
            if op.synchronizes or op.handshake or op.release:
                for peer in self.peers(op.group, rank):
                    self.order.add_edge(("start", run, name, peer), over)
            reached: tuple[object, ...] = ("barred", run, name, rank)
            for k, barrier in enumerate(b for b in self.plan.barriers if b.before == name):
                for peer in self.peers(barrier.group, rank):
                    self.order.add_edge(
                        ("barrier", run, name, k, peer), ("behind", run, name, k, rank)
                    )
                self.order.add_edge(reached, ("barrier", run, name, k, rank))
                reached = ("behind", run, name, k, rank)
            self.order.add_edge(reached, start)
            for other in self.calls:
                self.order.add_edge(("over", 0, other, rank), ("barred", 1, name, rank))
        for a, b in before:
            self.order.add_edge(("over", run, a, rank), ("barred", run, b, rank))

    def _accesses(self, run: int, name: str, op: str) -> None:
        call = self.calls[op]
        facts = [a for a in self.plan.problem.accesses if (a.buffer, a.operation) == (name, op)]
        enters = all(a.enters for a in facts if a.remote)
        releases = all(a.releases for a in facts if a.remote)
        ours = call.group == self.group[name]
        for maker, rank in self.makers(name, op):
            touch = ("touch", run, op, name, maker, rank)
            done = ("done", run, op, name, maker, rank)
            begun, ended = {maker}, {maker}
            begun |= {rank} if enters else set()
            ended |= {rank} if releases else set()
            begun |= set(self.peers(call.group, maker)) if call.handshake and ours else set()
            ended |= set(self.peers(call.group, maker)) if call.release and ours else set()
            for r in begun:
                self.order.add_edge(("start", run, op, r), touch)
            for r in ended:
                self.order.add_edge(done, ("over", run, self.end(op), r))
