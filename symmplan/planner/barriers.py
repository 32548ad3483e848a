"""Which barriers a plan needs because peers touch the bytes. See [Note: peers count].

`symmplan.planner.needs` finds the uses that need them. They are added as late as possible, right
before the later use, in the canonical order. On one chain and for one group no plan has fewer
barriers.

[Note: levels]
    At each point of the program a path has a table: how many operations of each chain are over at
    the path's end, that is, on all ranks from which its last group leads to this rank. The table of
    the empty path is the order itself. A meeting raises a path's table to the table of the shorter
    path at the time when the meeting began. Asynchronous calls need this, because their meeting
    begins at their start and is over only at their end. One more column stands for the whole
    previous run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from symmplan.model import Barrier
from symmplan.planner.needs import needs_of
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from symmplan.model import Placement, Problem
    from symmplan.planner.items import Items
    from symmplan.planner.needs import Need, Path
    from symmplan.planner.order import Order

    Row = NDArray[np.int32]

__all__ = ["barriers_of", "in_turn"]


def barriers_of(
    problem: Problem, items: Items, placements: Mapping[str, Placement]
) -> tuple[Barrier, ...]:
    """Barriers that make the use of bytes safe across ranks."""
    inside, around = needs_of(problem, items, placements)
    if not inside and not around:
        return ()
    order = order_of(problem)
    meetings = _Meetings(problem, order, items.groups, {n.path for n in (*inside, *around)})
    meetings.meet(inside, around)
    for op in meetings.meet_around(around):
        # It may have gone with one before.
        for group in dict.fromkeys(group for group, _ in meetings.added.get(op, ())):
            meetings.drop_behind(op, group, inside, around)
    return tuple(
        Barrier(
            order.names[op],
            items.groups[group],
            tuple(sorted({name for i in concerned for name in items.members[i]})),
        )
        for op in sorted(meetings.added)
        for group, concerned in meetings.added[op]
    )


def in_turn(*wanted: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Barriers of several plans of one program as one list that does for each what its own did.

    A barrier is ``(operation, group)``; those of one operation are in the order in which they run.
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
            if o.group in number and (o.synchronizes or o.handshake or o.release):
                self.calls[at] = number[o.group]
            if o.ends:
                self.ends[at] = sorted(order.index[name] for name in o.ends)
                ended.update(self.ends[at])
        self.later = ended & self.calls.keys()
        self.added: dict[int, list[tuple[int, set[int]]]] = {}
        self.last: dict[Path, Row] = {}  # when the run is over
        self.ahead: dict[int, dict[Path, bool]] = {}  # what a run has led along before it

    def meet(self, needs: Iterable[Need], around: Iterable[Need]) -> None:
        """Add a barrier before each operation that needs one and has none in time.

        Those that are there already stay. ``needs`` are within one run of the program; of those
        ``around``, from one run to the next, it is noted what the new run has led along before they
        end.
        """
        order = self.order
        asked: dict[int, list[Need]] = {need.later.start: [] for need in around}
        watched = {*asked}
        for need in sorted(needs, key=_by_time):
            asked.setdefault(need.later.start, []).append(need)
        by_run: dict[int, list[int]] = {}
        for op in sorted({*asked, *self.added, *self.calls, *self.ends}):
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
        needs: Iterable[Need],
        begun: dict[int, dict[Path, Row]],
    ) -> None:
        """An operation is about to start: what it needs, and what it begins."""
        for group, _ in self.added.get(op, ()):
            self._raise(group, rows, rows)
        for need in needs:
            for group in need.path[self._level(need, rows) :]:
                self.added.setdefault(op, []).append((group, set()))
                self._raise(group, rows, rows)
                self._concern(op, need)
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

    def _level(self, need: Need, rows: Mapping[Path, Row]) -> int:
        """How far along its path the earlier use of a need is over."""
        chain, place = self.order.chain[need.earlier.end], self.order.pos[need.earlier.end]
        levels = range(len(need.path), 0, -1)
        return next((k for k in levels if rows[need.path[:k]][chain] >= place), 0)

    def _concern(self, op: int, need: Need) -> None:
        for group, items in self.added[op]:
            if group in need.path:
                items.update(need.items)

    def meet_around(self, needs: Iterable[Need]) -> list[int]:
        """Add barriers for needs from one run of the program to the next.

        `meet` has looked at these needs.

        Any meetings after the earlier use, in the old run, or before the later one, in the new run,
        will do.

        Returns:
            The operations before which it has added barriers.
        """
        order, fresh = self.order, list[int]()
        for need in sorted(needs, key=_by_time):
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
                mine = self.added.setdefault(op, [])
                mine += ((g, set()) for g in rest[_met([g for g, _ in mine], rest) :])
            self._concern(settled, need)
        return fresh

    def drop_behind(
        self, op: int, group: int, needs: Iterable[Need], around: Iterable[Need]
    ) -> None:
        """Drop a group's next barrier behind one that `meet_around` added, if that does for both.

        No other can have become needless: the barriers in between are of `meet`, and what one of
        them is for began after the barrier before it.
        """
        behind = (later for later in sorted(self.added) if later > op)
        then = next((at for at in behind if any(g == group for g, _ in self.added[at])), None)
        if then is None:
            return
        before = self.added
        left = {at: [(g, set(i)) for g, i in of] for at, of in before.items()}
        place = next(k for k, (g, _) in enumerate(left[then]) if g == group)
        _, items = left[then].pop(place)
        if not left[then]:
            del left[then]
        next(i for g, i in left[op] if g == group).update(items)
        self.added = left
        count = sum(map(len, left.values()))
        self.meet(needs, around)
        self.meet_around(around)
        if sum(map(len, self.added.values())) > count:
            self.added = before


def _by_time(need: Need) -> tuple[int, int, tuple[int, int], Path]:
    return need.later.start, need.earlier.end, need.items, need.path
