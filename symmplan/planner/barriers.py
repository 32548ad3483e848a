"""Which barriers a plan needs because peers touch the bytes. See [Note: peers count].

[Note: needs]
    Of two accesses of common bytes the calls are ordered on every rank, which says nothing about
    peers. Whoever touches rank r's bytes in the earlier call is done when *its* call has ended, or
    r's, or all, by the facts; the later call's access begins after its maker's start, or r's, or
    all. What is missing is a *path*: over the earlier buffer's group, from the peers that may still
    be at it to r; then over the later buffer's group, from r to the peers that may be at it
    already. One meeting of a group leads from everybody to everybody, so two steps over one group
    are one. A *need* (a, b, path) asks for meetings that lead along the path, each begun behind
    the end of the one before, the first behind a, the last ended before b.

    Needs are between an item's own accesses, one of them a write; between those of an item and the
    next that has its bytes (a byte's users are totally ordered, and each touches it here, so the
    next ones follow); and from the last users in one run of the program to the first in the next.

    They are met as late as possible, right before b, in the canonical order: on one chain and for
    one group that gives the fewest barriers there are.

[Note: levels]
    A table for each path holds, where the program is, how many operations of each chain are over
    at its end: on all ranks that its last group leads to this rank. The table of the empty path is
    the order itself. A meeting raises a path's table to what its beginning's table was when the
    meeting began: that is what asynchronous calls need, whose meeting begins at their start and
    has happened only at their end. One more column stands for the whole run before this one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field, frozen

from symmplan.model import Barrier
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from symmplan.model import Placement, Problem
    from symmplan.planner.items import Items
    from symmplan.planner.order import Order

    Ints = NDArray[np.int64]
    Row = NDArray[np.int32]

__all__ = ["barriers_of", "in_turn"]

#: Groups that must meet one after the other, by number.
Path = tuple[int, ...]


@frozen
class _Use:
    """A call touches an item: from one operation to another.

    Attributes:
        start: Number of the operation at which the call begins.
        end: And of the one at which it ends.
        write: Whether bytes may change.
        early: Whether peers may touch this rank's bytes before this rank has started the call.
        late: Whether they may after it has ended.
        handshake: Nobody touches a byte before all ranks have started the call.
        release: All are done when it ends.
    """

    start: int
    end: int
    write: bool
    early: bool
    late: bool
    handshake: bool
    release: bool


@frozen
class _Need:
    """Two items' uses of common bytes, and the meetings that must lie between them."""

    earlier: _Use
    later: _Use
    items: tuple[int, int]
    path: Path


def barriers_of(
    problem: Problem, items: Items, placements: Mapping[str, Placement]
) -> tuple[Barrier, ...]:
    """Barriers that make the use of bytes safe across ranks.

    Args:
        problem: What the program does.
        items: Its items.
        placements: Where its buffers lie.
    """
    if not _counts(problem):
        return ()
    order = order_of(problem)
    uses = _uses(problem, items, order)
    within, across = _passing(problem, items, placements, uses)
    inside = [n for i, j in within for n in _between(uses, items, i, j)]
    inside += (n for i in range(len(items)) for n in _own(uses[i], items, i, order))
    around = [n for i, j in across for n in _between(uses, items, i, j)]
    if not inside and not around:
        return ()
    meetings = _Meetings(problem, order, items.groups, {n.path for n in (*inside, *around)})
    meetings.meet(inside, around)
    meetings.meet_around(around)
    return tuple(
        Barrier(
            order.names[op],
            items.groups[group],
            tuple(sorted({name for i in concerned for name in items.members[i]})),
        )
        for op in sorted(meetings.added)
        for group, concerned in meetings.added[op]
    )


def in_turn(
    *wanted: Iterable[tuple[str, str]],
) -> tuple[tuple[str, str], ...]:
    """Barriers of several plans of one program as one list that does for each what its own did.

    Args:
        wanted: ``(operation, group)`` of the barriers of each, those of one operation in the order
            in which they run.
    """
    merged: dict[str, list[str]] = {}
    for points in wanted:
        asked: dict[str, list[str]] = {}
        for before, group in points:
            asked.setdefault(before, []).append(group)
        for before, groups in asked.items():
            have = merged.setdefault(before, [])
            have += groups[_met(have, groups) :]
    return tuple((before, group) for before, groups in merged.items() for group in groups)


def _met(have: Sequence[object], path: Sequence[object]) -> int:
    """How many steps of a path lie, in order, in a list of meetings."""
    count = 0
    for group in have:
        if count < len(path) and group == path[count]:
            count += 1
    return count


def _counts(problem: Problem) -> bool:
    """Whether peers touch bytes at times that only meetings order."""
    calls = {o.name: o for o in problem.operations}
    group = {b.name: b.group for b in problem.buffers}
    for a in problem.accesses:
        if a.remote and not (a.enters and a.releases):
            call = calls[a.operation]
            strong = call.handshake and call.release and call.group == group[a.buffer]
            if not strong:
                return True
    return False


# -- who touches what ----------------------------------------------------------------------------


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
    problem: Problem,
    items: Items,
    placements: Mapping[str, Placement],
    uses: list[list[_Use]],
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


def _path(a: _Use, b: _Use, group_a: int, group_b: int) -> Path:
    """What must lie between two uses besides the order of each rank. See [Note: needs]."""
    same = group_a == group_b
    if same and (a.release or b.handshake):
        return ()
    path = (group_a,) if a.late else ()
    return (*path, group_b) if b.early and not (same and path) else path


def _between(uses: list[list[_Use]], items: Items, i: int, j: int) -> Iterable[_Need]:
    """Needs of bytes that item j has after item i; after itself, from run to run."""
    groups = int(items.group[i]), int(items.group[j])
    for a, b in product(uses[i], uses[j]):
        path = _path(a, b, *groups)
        if path and (i != j or a.write or b.write):
            yield _Need(a, b, (i, j), path)


def _own(uses: list[_Use], items: Items, item: int, order: Order) -> Iterable[_Need]:
    """Needs between ordered uses of one item, one of which writes."""
    if not any(u.early or u.late for u in uses):
        return
    group = int(items.group[item])
    before: list[_Use] = []
    for b in uses:
        for a in before:
            path = _path(a, b, group, group)
            if path and (a.write or b.write) and order.precedes(a.end, b.start):
                yield _Need(a, b, (item, item), path)
        # In a total order, who follows a meeting follows what was over before it.
        if order.chains == 1 and b.start == b.end and (b.handshake or b.release):
            before = [a for a in before if a.end >= b.start]
        before.append(b)


# -- where groups meet ---------------------------------------------------------------------------


class _Meetings:
    """Where groups meet, and the barriers added. See [Note: levels].

    Attributes:
        added: ``{operation: [(group, items)]}``: barriers before it, in the order they run.
    """

    def __init__(
        self, problem: Problem, order: Order, groups: Sequence[str], paths: set[Path]
    ) -> None:
        self.order = order
        number = {name: g for g, name in enumerate(groups)}
        parts = {p[i:j] for p in paths for i in range(len(p)) for j in range(i + 1, len(p) + 1)}
        self.paths = sorted(parts, key=lambda p: (len(p), p))
        self.calls: dict[int, int] = {}  # where a meeting begins: its group
        self.ends: dict[int, list[int]] = {}  # where calls end: where those begin
        ended: set[int] = set()
        for o in problem.operations:
            at = order.index[o.name]
            if o.group in number and (o.meets or o.handshake or o.release):
                self.calls[at] = number[o.group]
            if o.ends:
                self.ends[at] = sorted(order.index[name] for name in o.ends)
                ended.update(self.ends[at])
        self.later = ended & self.calls.keys()
        self.added: dict[int, list[tuple[int, set[int]]]] = {}
        self.last: dict[Path, Row] = {}  # when the run is over
        self.ahead: dict[int, dict[Path, bool]] = {}  # what a run has led along before it

    def meet(self, needs: Iterable[_Need], around: Iterable[_Need]) -> None:
        """Add a barrier before each operation that needs one and has none in time.

        Args:
            needs: Within one run of the program.
            around: From one run to the next; where they end is looked at.
        """
        order = self.order
        asked: dict[int, list[_Need]] = {need.later.start: [] for need in around}
        watched = {*asked}
        for need in sorted(needs, key=lambda n: (n.later.start, n.earlier.end, n.items, n.path)):
            asked.setdefault(need.later.start, []).append(need)
        by_run: dict[int, list[int]] = {}
        for op in sorted({*asked, *self.calls, *self.ends}):
            by_run.setdefault(int(order.run[op]), []).append(op)
        bounds = np.searchsorted(order.links[:, 1], np.arange(len(order.before) + 1)).tolist()
        sources = order.links[:, 0].tolist()
        runs, width = order.before.shape[0], order.chains + 1
        done = {p: np.zeros((runs, width), dtype=np.int32) for p in self.paths}
        begun: dict[int, dict[Path, Row]] = {}
        for run in range(runs):
            rows = {p: done[p][run] for p in self.paths}
            for source in sources[bounds[run] : bounds[run + 1]]:
                for p in self.paths:
                    np.maximum(rows[p], done[p][source], out=rows[p])
            for op in by_run.get(run, ()):
                rows[()] = self._local(op)
                self._pass(op, rows, asked.get(op, ()), begun)
                if op in watched:
                    self.ahead[op] = {p: bool(rows[p][-1]) for p in self.paths}
                self._follow(op, rows, begun)
        self.last = {p: table.max(axis=0, initial=0) for p, table in done.items()}

    def _local(self, op: int) -> Row:
        """What is over on this rank when an operation starts."""
        entry = self.order.entry(np.asarray([op], dtype=np.int64))[0]
        return np.append(entry, 1).astype(np.int32)

    def _pass(
        self,
        op: int,
        rows: dict[Path, Row],
        needs: Iterable[_Need],
        begun: dict[int, dict[Path, Row]],
    ) -> None:
        """An operation is about to start: what it needs, and what it begins."""
        for need in needs:
            for group in need.path[self._level(need, rows) :]:
                self._add(op, group, need)
                self._raise(group, rows, rows)
        if op in self.later:
            begun[op] = {p: row.copy() for p, row in rows.items()}

    def _follow(self, op: int, rows: dict[Path, Row], begun: dict[int, dict[Path, Row]]) -> None:
        """It is over: who has met in it."""
        if op in self.calls and op not in self.later:
            self._raise(self.calls[op], rows, rows)
        for start in self.ends.get(op, ()):
            if start in begun:
                self._raise(self.calls[start], rows, begun[start])

    def _raise(self, group: int, rows: dict[Path, Row], since: Mapping[Path, Row]) -> None:
        """A group has met: it began the meeting when things were as in ``since``."""
        for p in self.paths:
            if p[-1] == group:
                np.maximum(rows[p], since[p[:-1]], out=rows[p])

    def _level(self, need: _Need, rows: Mapping[Path, Row]) -> int:
        """How far along its path the earlier use of a need is over."""
        chain, place = self.order.chain[need.earlier.end], self.order.pos[need.earlier.end]
        levels = range(len(need.path), 0, -1)
        return next((k for k in levels if rows[need.path[:k]][chain] >= place), 0)

    def _add(self, op: int, group: int, need: _Need) -> None:
        self.added.setdefault(op, []).append((group, set()))
        self._concern(op, need)

    def _concern(self, op: int, need: _Need) -> None:
        for group, items in self.added[op]:
            if group in need.path:
                items.update(need.items)

    def meet_around(self, needs: Iterable[_Need]) -> None:
        """The same from one run of the program to the next.

        Any meetings after the earlier use, in the old run, or before the later one, in the new run,
        will do.

        Args:
            needs: Those that `meet` has looked at.
        """
        order, fresh = self.order, list[int]()
        for need in sorted(needs, key=lambda n: (n.later.start, n.earlier.end, n.items, n.path)):
            level = self._level(need, self.last)
            rest, op, end = need.path[level:], need.later.start, need.earlier.end
            if not rest or self.ahead[op].get(rest):
                continue
            have = {f: [g for g, _ in self.added[f]] for f in fresh}
            settled = next(
                (
                    f
                    for f in fresh
                    if ((f == op or order.precedes(f, op)) and _met(have[f], rest) == len(rest))
                    or (order.precedes(end, f) and _met(have[f], need.path) == len(need.path))
                ),
                None,
            )
            if settled is None:
                settled = op
                if op not in fresh:
                    fresh.append(op)
                groups = [g for g, _ in self.added.get(op, ())]
                for group in rest[_met(groups, rest) :]:
                    self._add(op, group, need)
            self._concern(settled, need)
