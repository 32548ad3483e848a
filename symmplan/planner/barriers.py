"""Which barriers a placement needs because peers touch the bytes. See [Note: peers count].

[Note: needs]
    When bytes pass from A to B, every access of A precedes every access of B on this rank, but
    says nothing about peers. A *need* (a, b, group) asks for a synchronisation of the group after
    operation a and not after the first byte of b: for each remote access a of A over A's group,
    and for each remote access b of B over B's group. As a byte's users are totally ordered, only
    consecutive ones have to be looked at. The last users of one run of the program and the first
    of the next need the same.

    Bytes of one item need it, too, where they are written here before peers take part, and where
    peers took part before they are touched here; unless both only read.

    Needs are met as late as possible, right before b, in the canonical order: on one chain that
    gives the fewest barriers there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field

from symmplan.model import Barrier
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from symmplan.model import Placement, Problem
    from symmplan.planner.items import Items
    from symmplan.planner.order import Order

    Ints = NDArray[np.int64]

__all__ = ["barriers_of"]

#: Operation numbers a and b, and the items whose bytes pass from one to the other.
Need = tuple[int, int, int, int]


def barriers_of(
    problem: Problem, items: Items, placements: Mapping[str, Placement]
) -> tuple[Barrier, ...]:
    """Barriers that make the reuse of bytes safe across ranks.

    Args:
        problem: What the program does.
        items: Its items.
        placements: Where its buffers lie.
    """
    if not any(a.remote for a in problem.accesses):
        return ()
    order = order_of(problem)
    touches = _touches(problem, items, order)
    within, across = _passing(problem, items, placements, touches)
    barriers: list[tuple[int, int, Barrier]] = []
    for g, group in enumerate(items.groups):
        line = _Line(problem, order, group)
        own = _own_needs(problem, items, touches, line, g)
        inside = line.unsettled(sorted({*_needs(within, items, touches, g), *own}, key=_by_later))
        around = line.unsettled(_needs(across, items, touches, g))
        line.meet(inside)
        line.meet_around(around)
        for op, pairs in line.added.items():
            names = sorted({n for pair in pairs for i in pair for n in items.members[i]})
            barriers.append((op, g, Barrier(order.names[op], group, tuple(names))))
    return tuple(b for _, _, b in sorted(barriers, key=lambda e: e[:2]))


def _touches(problem: Problem, items: Items, order: Order) -> list[list[tuple[int, bool]]]:
    """Per item, its operations in canonical order and whether peers take part."""
    owner = {name: i for i, names in enumerate(items.members) for name in names}
    found: list[dict[int, bool]] = [{} for _ in items.members]
    for access in problem.accesses:
        ops = found[owner[access.buffer]]
        op = order.index[access.operation]
        ops[op] = ops.get(op, False) or access.remote
    return [sorted(ops.items()) for ops in found]


def _passing(
    problem: Problem,
    items: Items,
    placements: Mapping[str, Placement],
    touches: list[list[tuple[int, bool]]],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of items of which the second takes bytes over from the first: within a run, across."""
    nbytes = {b.name: b.nbytes for b in problem.buffers}
    tracks: dict[str, _Track] = {}
    within: set[tuple[int, int]] = set()
    for i in sorted(range(len(items)), key=lambda i: (touches[i][0][0], i)):
        names = items.members[i]
        place = placements[names[0]]
        end = place.offset + max(nbytes[n] for n in names)
        track = tracks.setdefault(place.segment, _Track())
        within.update((j, i) for j in track.give(place.offset, end, i))
    across = {pair for track in tracks.values() for pair in track.around()}
    return sorted(within), sorted(across)


@define
class _Track:
    """Who had each byte last, as disjoint ascending ranges, and who had it first."""

    lows: list[int] = field(factory=list)
    ranges: list[tuple[int, int, int]] = field(factory=list)
    firsts: list[tuple[int, int, int]] = field(factory=list)

    def give(self, low: int, high: int, item: int) -> set[int]:
        """Pass bytes [low, high) to an item; returns who had some of them."""
        i = max(0, bisect_right(self.lows, low) - 1)
        if i < len(self.ranges) and self.ranges[i][1] <= low:
            i += 1
        j = bisect_left(self.lows, high)
        old = self.ranges[i:j]
        new = []
        at = low
        for a, b, _ in old:
            if a > at:
                self.firsts.append((at, a, item))
            at = max(at, b)
        if at < high:
            self.firsts.append((at, high, item))
        if old and old[0][0] < low:
            new.append((old[0][0], low, old[0][2]))
        new.append((low, high, item))
        if old and old[-1][1] > high:
            new.append((high, old[-1][1], old[-1][2]))
        self.ranges[i:j] = new
        self.lows[i:j] = [r[0] for r in new]
        return {r[2] for r in old}

    def around(self) -> Iterable[tuple[int, int]]:
        """(last, first) item of every byte."""
        for low, high, first in self.firsts:
            i = max(0, bisect_right(self.lows, low) - 1)
            while i < len(self.ranges) and self.ranges[i][0] < high:
                if self.ranges[i][1] > low:
                    yield self.ranges[i][2], first
                i += 1


def _needs(
    pairs: list[tuple[int, int]],
    items: Items,
    touches: list[list[tuple[int, bool]]],
    group: int,
) -> list[Need]:
    needs: set[Need] = set()
    for a, b in pairs:
        for op, remote in touches[a]:
            from_peers = remote and items.group[a] == group
            for other, to_peers in touches[b]:
                if from_peers or (to_peers and items.group[b] == group):
                    needs.add((op, other, a, b))
    return sorted(needs, key=_by_later)


def _by_later(need: Need) -> tuple[int, Need]:
    return need[1], need


def _own_needs(
    problem: Problem,
    items: Items,
    touches: list[list[tuple[int, bool]]],
    line: _Line,
    group: int,
) -> set[Need]:
    """Needs between the operations of one item: from here to peers, and from peers to here."""
    order = line.order
    owner = {name: i for i, names in enumerate(items.members) for name in names}
    writes = {(owner[a.buffer], order.index[a.operation]) for a in problem.accesses if a.write}
    needs: set[Need] = set()
    for i, mine in enumerate(touches):
        if items.group[i] != group or not any(remote for _, remote in mine):
            continue
        written: list[int] = []
        shared: list[int] = []
        for op, remote in mine:
            if remote:
                needs.update((x, op, i, i) for x in written if order.precedes(x, op))
                # In a total order, who follows this operation follows its meetings, too.
                if order.chains == 1 and op in line.handshakes:
                    written.clear()
                if order.chains == 1 and op in line.releases:
                    shared.clear()
                else:
                    shared.append(op)
                continue
            needs.update(
                (x, op, i, i)
                for x in shared
                if order.precedes(x, op) and ((i, op) in writes or (i, x) in writes)
            )
            if (i, op) in writes:
                written.append(op)
    return needs


class _Line:
    """Where one group synchronises, and the barriers added to it."""

    def __init__(self, problem: Problem, order: Order, group: str) -> None:
        self.order = order
        self.handshakes: set[int] = set()
        self.releases: set[int] = set()
        for op in problem.operations:
            if op.group == group:
                if op.handshake:
                    self.handshakes.add(order.index[op.name])
                if op.release:
                    self.releases.add(order.index[op.name])
        self.added: dict[int, set[tuple[int, int]]] = {}

    def unsettled(self, needs: list[Need]) -> list[Need]:
        """Those that neither of the two operations meets itself."""
        return [n for n in needs if n[0] not in self.releases and n[1] not in self.handshakes]

    def meet(self, needs: list[Need]) -> None:
        """Add a barrier before each operation that needs one and has none in time.

        Args:
            needs: Within one run of the program, sorted by their later operation.
        """
        if not needs:
            return
        order = self.order
        asked: dict[int, list[Need]] = {}
        for need in needs:
            asked.setdefault(need[1], []).append(need)
        events = sorted(asked.keys() | self.handshakes | self.releases)
        runs = order.run[np.asarray(events, dtype=np.int64)]
        by_run: dict[int, list[int]] = {}
        for op, run in zip(events, runs.tolist(), strict=True):
            by_run.setdefault(run, []).append(op)
        bounds = np.searchsorted(order.links[:, 1], np.arange(len(order.before) + 1)).tolist()
        sources = order.links[:, 0].tolist()
        # Per run and chain, how many operations have finished on all ranks when the run ends.
        done = np.zeros_like(order.before)
        for run in range(len(done)):
            row = done[run]
            for p in sources[bounds[run] : bounds[run + 1]]:
                np.maximum(row, done[p], out=row)
            for op in by_run.get(run, ()):
                self._pass(op, row, asked.get(op, []))

    def _pass(self, op: int, row: NDArray[np.int32], needs: list[Need]) -> None:
        order = self.order
        start = order.entry(np.asarray([op], dtype=np.int64))[0]
        if op in self.handshakes:
            np.maximum(row, start, out=row)
        late = [n for n in needs if row[order.chain[n[0]]] < order.pos[n[0]]]
        if late:
            np.maximum(row, start, out=row)
            self.added.setdefault(op, set()).update((n[2], n[3]) for n in late)
        if op in self.releases:
            start[order.chain[op]] = order.pos[op]
            np.maximum(row, start, out=row)

    def meet_around(self, needs: list[Need]) -> None:
        """The same from one run of the program to the next.

        Any synchronisation after the earlier operation, in the old run, or before the later one,
        in the new run, will do.

        Args:
            needs: Sorted by their later operation.
        """
        if not needs:
            return
        order = self.order
        starts = sorted(self.handshakes | self.added.keys())
        meets = sorted({*starts, *self.releases})
        latest = _extreme(order, meets, last=True)
        first_start = _extreme(order, starts, last=False)
        first_end = _extreme(order, sorted(self.releases), last=False)
        earlier = np.asarray([n[0] for n in needs], dtype=np.int64)
        later = np.asarray([n[1] for n in needs], dtype=np.int64)
        # Operations of each chain at or before b, and strictly before b.
        strict = order.entry(later)
        upto = strict.copy()
        upto[np.arange(len(later)), order.chain[later]] += 1
        met = (order.exit(earlier) <= latest).any(axis=1)
        met |= (upto >= first_start).any(axis=1) | (strict >= first_end).any(axis=1)
        fresh: list[int] = []
        for k in np.flatnonzero(~met).tolist():
            a, b, x, y = needs[k]
            settled = next(
                (op for op in fresh if op == b or order.precedes(op, b) or order.precedes(a, op)),
                None,
            )
            if settled is None:
                fresh.append(b)
                settled = b
            self.added.setdefault(settled, set()).add((x, y))


def _extreme(order: Order, ops: list[int], *, last: bool) -> Ints:
    """Per chain, the place of the first or last of some operations; out of reach if none."""
    place = np.full(order.chains, 0 if last else np.iinfo(np.int64).max, dtype=np.int64)
    numbers = np.asarray(ops, dtype=np.int64)
    (np.maximum if last else np.minimum).at(place, order.chain[numbers], order.pos[numbers])
    return place
