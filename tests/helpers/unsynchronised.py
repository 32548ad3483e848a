"""An oracle of barriers: the accesses of common bytes that nothing orders, on four ranks."""

from __future__ import annotations

import functools
from itertools import product
from typing import TYPE_CHECKING, Any

import networkx as nx

from symmplan.testing import happens_before
from symmplan.testing.oracles import _pools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.model import Plan

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
