"""Finds the uses of bytes between which ranks must meet. See [Note: peers count].

[Note: needs]
    Two calls that access common bytes are ordered on every rank, but this says nothing about peers.
    An access to rank r's bytes in the earlier call is over when the accessing rank's call has
    ended, or r's call, or the calls of all ranks, depending on the facts. An access of the later
    call begins after the start of the accessing rank, of r, or of all ranks. The order between the
    two needs a *path*: over the earlier buffer's group, from the peers that may still access it to
    r; then over the later buffer's group, from r to the peers that may access it already. One
    meeting of a group leads from every rank to every rank, so two steps over one group are one. A
    *need* (a, b, path) asks for meetings along the path. Each begins after the end of the previous
    one, the first after a, and the last ends before b.

    Needs are between an item's own accesses, one of them a write; between those of an item and the
    next that has its bytes (a byte's users are totally ordered, and each touches it here, so the
    next ones follow); and from the last users in one run of the program to the first in the next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from attrs import define, field, frozen

from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from symmplan.model import Placement, Problem
    from symmplan.planner.items import Items
    from symmplan.planner.order import Order

__all__ = ["Need", "Path", "needs_of"]

#: Groups that must meet one after the other, by number.
Path: TypeAlias = tuple[int, ...]


@frozen
class _Use:
    """A call touches an item: from one operation to another, given by number."""

    start: int
    end: int
    write: bool
    early: bool  # peers may touch this rank's bytes before this rank has started the call
    late: bool  # and after it has ended
    handshake: bool  # no rank touches a byte before all ranks have started the call
    release: bool  # all are done when it ends


@frozen
class Need:
    """Two items' uses of common bytes, and the meetings that must lie between them."""

    earlier: _Use
    later: _Use
    items: tuple[int, int]
    path: Path


def needs_of(
    problem: Problem, items: Items, placements: Mapping[str, Placement]
) -> tuple[list[Need], list[Need]]:
    """What must be ordered by meetings: within a run of the program, from one run to the next."""
    if not any(a.remote for a in problem.accesses):
        return [], []
    order = order_of(problem)
    uses = _uses(problem, items, order)
    if not any(u.early or u.late for mine in uses for u in mine):
        return [], []
    within, across = _passing(problem, items, placements, uses)
    inside = [n for i, j in within for n in _between(uses, items, i, j)]
    inside += (n for i in range(len(items)) for n in _own(uses[i], items, i, order))
    return inside, [n for i, j in across for n in _between(uses, items, i, j)]


def _uses(problem: Problem, items: Items, order: Order) -> list[list[_Use]]:
    """Per item, the calls that touch it, by their starts."""
    owner = {name: i for i, names in enumerate(items.members) for name in names}
    calls = {o.name: o for o in problem.operations}
    index = order.index
    ends = {s: index[o.name] for o in problem.operations for s in o.ends}
    listed = {(a.operation, a.buffer) for a in problem.accesses}
    found: list[dict[str, tuple[bool, bool, bool]]] = [{} for _ in items.members]
    for a in problem.accesses:
        mine = found[owner[a.buffer]]
        begun = [s for s in calls[a.operation].ends if (s, a.buffer) in listed]
        for name in begun:  # the end of calls that are listed where they begin
            write, early, late = mine.get(name, (False, False, False))
            mine[name] = write or a.write, early, late
        if not begun:
            write, early, late = mine.get(a.operation, (False, False, False))
            mine[a.operation] = (
                write or a.write,
                early or (a.remote and not a.enters),
                late or (a.remote and not a.releases),
            )
    result: list[list[_Use]] = []
    for i, names in enumerate(found):
        uses: list[_Use] = []
        for name, (write, early, late) in names.items():
            call = calls[name]
            member = call.group == items.groups[items.group[i]]
            uses.append(
                _Use(
                    start=index[name],
                    end=ends.get(name, index[name]),
                    write=write,
                    early=early and not (member and call.handshake),
                    late=late and not (member and call.release),
                    handshake=member and call.handshake,
                    release=member and call.release,
                )
            )
        result.append(sorted(uses, key=lambda u: (u.start, u.end)))
    return result


def _passing(
    problem: Problem, items: Items, placements: Mapping[str, Placement], uses: list[list[_Use]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of items of which the second takes bytes over from the first: within a run, across."""
    nbytes = {b.name: b.nbytes for b in problem.buffers}
    tracks: dict[str, _Track] = {}
    within: set[tuple[int, int]] = set()
    for i in sorted(range(len(items)), key=lambda i: (uses[i][0].start, i)):
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
        new = [(low, high, item)]
        at = low
        for a, b, _ in old:
            self.firsts += _bytes(at, a, item)
            at = max(at, b)
        self.firsts += _bytes(at, high, item)
        if old:
            (begin, _, first), (_, end, last) = old[0], old[-1]
            new = [*_bytes(begin, low, first), *new, *_bytes(high, end, last)]
        self.ranges[i:j] = new
        self.lows[i:j] = [r[0] for r in new]
        return {r[2] for r in old}

    def around(self) -> Iterable[tuple[int, int]]:
        """(last, first) item of every byte."""
        for low, high, first in self.firsts:
            begin, end = bisect_right(self.lows, low) - 1, bisect_left(self.lows, high)
            for _, _, last in self.ranges[begin:end]:
                yield last, first


def _bytes(low: int, high: int, item: int) -> list[tuple[int, int, int]]:
    """Bytes [low, high) of an item, if there are any."""
    return [(low, high, item)] if low < high else []


def _path(a: _Use, b: _Use, group_a: int, group_b: int) -> Path:
    """What must lie between two uses besides the order of each rank. See [Note: needs]."""
    same = group_a == group_b
    if same and (a.release or b.handshake):
        return ()
    path = (group_a,) if a.late else ()
    return (*path, group_b) if b.early and not (same and path) else path


def _between(uses: list[list[_Use]], items: Items, i: int, j: int) -> Iterable[Need]:
    """Needs of bytes that item j has after item i; after itself, from run to run."""
    groups = int(items.group[i]), int(items.group[j])
    for a, b in product(uses[i], uses[j]):
        path = _path(a, b, *groups)
        if path and (i != j or a.write or b.write):
            yield Need(a, b, (i, j), path)


def _own(uses: list[_Use], items: Items, item: int, order: Order) -> Iterable[Need]:
    """Needs between ordered uses of one item, one of which writes."""
    if not any(u.early or u.late for u in uses):
        return
    group = int(items.group[item])
    before: list[_Use] = []
    for b in uses:
        for a in before:
            path = _path(a, b, group, group)
            if path and (a.write or b.write) and order.precedes(a.end, b.start):
                yield Need(a, b, (item, item), path)
        # In a total order, who follows a meeting follows what was over before it.
        if order.chains == 1 and b.start == b.end and (b.handshake or b.release):
            before = [a for a in before if a.end >= b.start]
        before.append(b)
