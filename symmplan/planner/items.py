"""What is packed: buffers that must share bytes become one item, and which items conflict.

[Note: comparing live ranges]
    An item keeps, per chain, ``last``: the place of its last access there (0 if none), and
    ``entry``: how many of the chain's operations strictly precede *all* its accesses. All accesses
    of A precede all of B iff ``last[A] <= entry[B]`` on every chain. ``[start, stop)`` is its hull
    in the canonical linear extension: whatever starts at ``stop`` or later comes after all of it,
    so items whose hulls are disjoint never conflict. On one chain the hull is the live range
    itself and nothing else needs to be compared.

    Conflicts are kept in numpy's arrays: 100,000 items easily have ten million, which take 80 MB
    there and gigabytes as a `networkx.Graph`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import networkx as nx
import numpy as np
from attrs import asdict, frozen

from symmplan.errors import PlanningError
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from symmplan.model import Buffer, Problem
    from symmplan.planner.order import Order

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]
    Clocks = NDArray[np.int32]
    Members = tuple[tuple[str, ...], ...]

__all__ = [
    "Conflicts",
    "Items",
    "Ranges",
    "conflicts_among",
    "conflicts_of",
    "count_candidates",
    "items_of",
]

#: Pairs examined at a time, so that memory stays bounded however many there are.
CHUNK = 1 << 21


@frozen(eq=False)
class Ranges:
    """Live ranges, one per item. See [Note: comparing live ranges].

    Attributes:
        start: First instant of the hull.
        stop: First instant after the hull.
        end: First instant after the last access; items whose [start, end) overlap do conflict.
        entry: [items, chains] clocks.
        last: [items, chains] clocks.
    """

    start: Ints
    stop: Ints
    end: Ints
    entry: Clocks
    last: Clocks

    def __len__(self) -> int:
        return len(self.start)


@frozen(eq=False)
class Items(Ranges):
    """Buffers to be placed, those that must share their offset merged, in canonical order.

    Attributes:
        members: Names of the buffers of each item, sorted; items are sorted by their first.
        nbytes: Bytes of the largest member.
        align: Largest alignment of a member, in bytes.
        pin: Fixed offset in bytes, or -1.
        group: Number of the process group, by first use.
        pad: Uses the signal pad.
        groups: Names of the process groups by number.
    """

    members: Members
    nbytes: Ints
    align: Ints
    pin: Ints
    group: Ints
    pad: Bools
    groups: tuple[str, ...]


def items_of(problem: Problem) -> Items:
    """Merge, sort and clock the buffers of a problem.

    Raises:
        PlanningError: Buffers that must share their offset are pinned to different ones.
    """
    buffers = sorted(problem.buffers, key=lambda b: b.name)
    owner, members = _classes(problem, buffers)
    count = len(members)
    group_no: dict[str, int] = {}
    for b in buffers:
        group_no.setdefault(b.group, len(group_no))
    nbytes = np.zeros(count, dtype=np.int64)
    np.maximum.at(nbytes, owner, _column(b.nbytes for b in buffers))
    align = np.ones(count, dtype=np.int64)
    np.maximum.at(align, owner, _column(b.align for b in buffers))
    group = np.zeros(count, dtype=np.int64)
    group[owner] = _column(group_no[b.group] for b in buffers)
    persistent = np.zeros(count, dtype=bool)
    persistent[owner[[b.persistent for b in buffers]]] = True
    pad = np.zeros(count, dtype=bool)
    pad[owner[[b.signal_pad for b in buffers]]] = True
    pin = _pins(buffers, owner, align, members)
    item_of = dict(zip((b.name for b in buffers), owner.tolist(), strict=True))
    ranges = _ranges(problem, order_of(problem), item_of, persistent)
    return Items(
        **asdict(ranges, recurse=False),
        members=members,
        nbytes=nbytes,
        align=align,
        pin=pin,
        group=group,
        pad=pad,
        groups=tuple(group_no),
    )


def _column(values: object) -> Ints:
    return np.fromiter(values, dtype=np.int64)  # type: ignore[call-overload,no-any-return]


def _classes(problem: Problem, buffers: list[Buffer]) -> tuple[Ints, Members]:
    """Item of each buffer, and the names in each item."""
    if not problem.together:
        return np.arange(len(buffers)), tuple((b.name,) for b in buffers)
    graph = nx.Graph(problem.together)
    graph.add_nodes_from(b.name for b in buffers)
    members = tuple(sorted(tuple(sorted(names)) for names in nx.connected_components(graph)))
    owner = {name: i for i, names in enumerate(members) for name in names}
    return _column(owner[b.name] for b in buffers), members


def _pins(buffers: list[Buffer], owner: Ints, align: Ints, members: Members) -> Ints:
    pin = np.full(len(members), -1, dtype=np.int64)
    for i, b in enumerate(buffers):
        if b.offset is None:
            continue
        item = int(owner[i])
        if pin[item] not in (-1, b.offset):
            raise PlanningError(
                f"buffer {b.name!r} is pinned at byte {b.offset} but must share its offset with "
                f"{members[item][0]!r}, pinned at byte {pin[item]}",
                expected=f"one offset for {', '.join(members[item])}",
                got=f"{pin[item]} and {b.offset}",
                fix="remove one of the pins, or the pair from together",
                buffers=members[item],
            )
        pin[item] = b.offset
    bad = np.flatnonzero((pin >= 0) & (pin % align != 0))
    if len(bad):
        item = int(bad[0])
        raise PlanningError(
            f"buffers {', '.join(members[item])} must share the offset {pin[item]}, which does "
            f"not suit all of them",
            expected=f"a multiple of {align[item]}",
            got=int(pin[item]),
            fix="move the pin, or remove the pair from together",
            buffers=members[item],
        )
    return pin


def _ranges(problem: Problem, order: Order, item_of: dict[str, int], persistent: Bools) -> Ranges:
    item = _column(item_of[a.buffer] for a in problem.accesses)
    op = _column(order.index[a.operation] for a in problem.accesses)
    by_item = np.lexsort((op, item))
    item, op = item[by_item], op[by_item]
    count, chains = len(persistent), order.chains
    if not count:
        none = np.zeros((0, chains), dtype=np.int32)
        return Ranges(op, op, op, none, none)
    fresh = np.flatnonzero(np.append(True, item[1:] != item[:-1]))
    start, end = op[fresh], op[np.append(fresh[1:], len(op)) - 1] + 1
    entry = np.minimum.reduceat(order.entry(op), fresh, axis=0)
    leave = np.maximum.reduceat(order.exit(op), fresh, axis=0)
    place = np.zeros((len(op), chains), dtype=np.int32)
    place[np.arange(len(op)), order.chain[op]] = order.pos[op]
    last = np.maximum.reduceat(place, fresh, axis=0)
    stop = np.zeros(count, dtype=np.int64)
    for c, members in enumerate(order.members):
        # The last operation of this chain that is not after all of the item's accesses.
        behind = leave[:, c] - 2
        reach = np.where(behind >= 0, members[behind] + 1, 0) if len(members) else 0
        np.maximum(stop, reach, out=stop)
    ends = len(order.names)
    start[persistent] = 0
    stop[persistent] = ends
    end[persistent] = ends
    entry[persistent] = -1
    last[persistent] = ends + 1
    return Ranges(start, stop, end, entry, last)


@frozen(eq=False)
class Conflicts:
    """Which items may never share a byte, as a graph in compressed rows.

    Attributes:
        bounds: [items + 1] where each item's neighbours begin.
        neighbours: Neighbours of item 0, then of item 1, and so on, each ascending.
    """

    bounds: Ints
    neighbours: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def of(self, item: int) -> NDArray[np.int32]:
        """Neighbours of an item, ascending."""
        return self.neighbours[self.bounds[item] : self.bounds[item + 1]]

    def rows(self) -> Ints:
        """Per entry of ``neighbours``, whose neighbour it is."""
        return np.repeat(np.arange(len(self)), np.diff(self.bounds))

    def pairs(self) -> tuple[Ints, Ints]:
        """Every conflict once, as (lower, higher)."""
        rows = self.rows()
        keep = rows < self.neighbours
        return rows[keep], self.neighbours[keep].astype(np.int64)

    def weigh(self, size: Ints) -> Ints:
        """Sum of the sizes of each item's neighbours."""
        near = np.bincount(self.rows(), weights=size[self.neighbours], minlength=len(self))
        return near.astype(np.int64)

    def matrix(self) -> NDArray[np.bool_]:
        """The graph as a dense matrix; only for small ones."""
        dense = np.zeros((len(self), len(self)), dtype=bool)
        dense[self.rows(), self.neighbours] = True
        return dense


def _candidates(ranges: Ranges) -> Ints:
    """How many of the items behind each begin before its hull is over."""
    ends = np.searchsorted(ranges.start, ranges.stop)
    later: Ints = np.maximum(ends - np.arange(1, len(ranges) + 1), 0)
    return later


def count_candidates(ranges: Ranges) -> int:
    """How many pairs of hulls overlap, of items sorted by start; conflicts are at most as many."""
    return int(_candidates(ranges).sum())


def conflicts_of(ranges: Ranges) -> Conflicts:
    """All conflicts among items sorted by the start of their hulls.

    Of two items the one that starts earlier in a linear extension cannot come after the other, so
    one comparison settles a pair. See [Note: comparing live ranges].
    """
    count, chains = len(ranges), ranges.entry.shape[1]
    later = _candidates(ranges)
    totals = np.append(0, np.cumsum(later))
    none = np.zeros(0, dtype=np.int32)
    firsts, seconds = [none], [none]
    at = 0
    while at < count:
        to = int(np.searchsorted(totals, totals[at] + CHUNK, side="right")) - 1
        to = min(max(to, at + 1), count)
        a = np.repeat(np.arange(at, to, dtype=np.int32), later[at:to])
        begin = np.repeat((totals[at:to] - totals[at]).astype(np.int32), later[at:to])
        b = a + 1 + (np.arange(len(a), dtype=np.int32) - begin)
        if chains > 1:
            clash = np.zeros(len(a), dtype=bool)
            for c in range(chains):
                clash |= ranges.last[a, c] > ranges.entry[b, c]
            a, b = a[clash], b[clash]
        firsts.append(a)
        seconds.append(b)
        at = to
    return _symmetric(count, np.concatenate(firsts), np.concatenate(seconds))


def conflicts_among(count: int, first: Ints, second: Ints) -> Conflicts:
    """The conflicts of ``count`` items, given as pairs in any order, some of them again."""
    low, high = np.minimum(first, second), np.maximum(first, second)
    pairs = np.unique((low * count + high)[low != high])
    low, high = np.divmod(pairs, max(1, count))
    return _symmetric(count, low.astype(np.int32), high.astype(np.int32))


def _symmetric(count: int, first: NDArray[np.int32], second: NDArray[np.int32]) -> Conflicts:
    """Rows of both directions from pairs ``first < second``, sorted by first, then second."""
    degree = np.bincount(first, minlength=count) + np.bincount(second, minlength=count)
    bounds = np.append(0, np.cumsum(degree))
    neighbours = np.empty(2 * len(first), dtype=np.int32)
    back = np.bincount(second, minlength=count)
    # Earlier neighbours fill the front of each row, later ones the back; a stable sort keeps both
    # ascending.
    by_second = np.argsort(second, kind="stable")
    counter = np.arange(len(first), dtype=np.int32)
    front = np.repeat((bounds[:-1] - (np.cumsum(back) - back)).astype(np.int32), back)
    neighbours[front + counter] = first[by_second]
    ahead = degree - back
    rear = np.repeat((bounds[:-1] + back - (np.cumsum(ahead) - ahead)).astype(np.int32), ahead)
    neighbours[rear + counter] = second
    return Conflicts(bounds=bounds, neighbours=neighbours)
