"""Which items conflict, that is, may never share a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Clocks = NDArray[np.int32]

__all__ = ["Conflicts", "conflicts_of", "count_candidates"]

#: Pairs examined at a time, so that memory stays bounded however many there are.
CHUNK = 1 << 21


@frozen(eq=False)
class Conflicts:
    """The conflict graph in compressed rows.

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

    def pairs(self) -> tuple[Ints, Ints]:
        """Every conflict once, as (lower, higher)."""
        rows = np.repeat(np.arange(len(self)), np.diff(self.bounds))
        keep = rows < self.neighbours
        return rows[keep], self.neighbours[keep].astype(np.int64)

    def matrix(self) -> NDArray[np.bool_]:
        """The same as a dense matrix; only for small graphs."""
        dense = np.zeros((len(self), len(self)), dtype=bool)
        rows = np.repeat(np.arange(len(self)), np.diff(self.bounds))
        dense[rows, self.neighbours] = True
        return dense


def count_candidates(start: Ints, stop: Ints) -> int:
    """How many pairs of hulls overlap; conflicts are at most as many.

    Args:
        start: First instant of each hull, ascending.
        stop: First instant after each hull.
    """
    ends = np.searchsorted(start, stop)
    return int(np.maximum(ends - np.arange(1, len(start) + 1), 0).sum())


def conflicts_of(start: Ints, stop: Ints, entry: Clocks, last: Clocks) -> Conflicts:
    """All conflicts among items sorted by the start of their hulls.

    See [Note: comparing live ranges] in `symmplan.planner.items`. Of two items the one that starts
    earlier in a linear extension cannot come after the other, so one comparison settles a pair.

    Args:
        start: First instant of each hull, ascending.
        stop: First instant after each hull.
        entry: [items, chains] clocks.
        last: [items, chains] clocks.
    """
    count = len(start)
    ends = np.searchsorted(start, stop)
    later = np.maximum(ends - np.arange(1, count + 1), 0)
    if entry.shape[1] <= 1:
        return _from_ranges(later)
    totals = np.append(0, np.cumsum(later))
    firsts, seconds = [], []
    at = 0
    while at < count:
        to = int(np.searchsorted(totals, totals[at] + CHUNK, side="right")) - 1
        to = min(max(to, at + 1), count)
        a = np.repeat(np.arange(at, to, dtype=np.int32), later[at:to])
        b = a + 1 + (np.arange(len(a)) - (totals[a] - totals[at])).astype(np.int32)
        clash = np.zeros(len(a), dtype=bool)
        for c in range(entry.shape[1]):
            clash |= last[a, c] > entry[b, c]
        firsts.append(a[clash])
        seconds.append(b[clash])
        at = to
    none = [np.zeros(0, dtype=np.int32)]
    return _symmetric(count, np.concatenate(firsts or none), np.concatenate(seconds or none))


def _from_ranges(later: Ints) -> Conflicts:
    """On one chain the later neighbours of an item are the ``later`` items right after it."""
    count = len(later)
    a = np.repeat(np.arange(count, dtype=np.int32), later)
    skip = np.repeat((np.cumsum(later) - later).astype(np.int32), later)
    b: NDArray[np.int32] = (a + 1 + np.arange(len(a), dtype=np.int32) - skip).astype(np.int32)
    return _symmetric(count, a, b)


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
