"""Quick packers: first fit, in order or along time, and lowest offset first with the squeaky wheel.

First fit puts each item, in a given order, to the lowest place that is free for it. The squeaky
wheel gets oil: items that stick out come earlier in the next round.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from symmplan.planner.packing.task import FREE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from symmplan.planner.items import Conflicts
    from symmplan.planner.order import Ints
    from symmplan.planner.packing.task import Space, Task

__all__ = ["Random", "first_fit", "greedy_orders", "lowest_first", "rank_by", "squeak", "sweep_fit"]

#: Rounds without a better packing after which the best priorities are restored.
_PATIENCE = 25


def first_fit(task: Task, conflicts: Conflicts, order: Ints) -> Ints:
    """Offsets when items are placed in an order, each as low as those placed before allow.

    Pinned items come first whatever the order.
    """
    count = len(task)
    offset = np.full(count, FREE, dtype=np.int64)
    end = np.full(count, FREE, dtype=np.int64)
    pinned = task.pin >= 0
    offset[pinned] = task.pin[pinned]
    end[pinned] = task.pin[pinned] + task.size[pinned]
    bounds = conflicts.bounds.tolist()
    neighbours = conflicts.neighbours
    sizes, aligns = task.size.tolist(), task.align.tolist()
    for i in order[~pinned[order]].tolist():
        near = neighbours[bounds[i] : bounds[i + 1]].astype(np.intp)  # or each lookup casts
        below = offset[near]
        size, align = sizes[i], aligns[i]
        sort = below.argsort()
        below = below[sort]
        if not len(below) or below[0] >= size:
            offset[i], end[i] = 0, size
            continue
        ends = np.maximum.accumulate(end[near[sort]])
        if align > 1:
            ends = (ends + (align - 1)) & -align
        # Unplaced neighbours sort last and lie at FREE, so the first of them ends every search.
        fits = ends[:-1] + size <= below[1:]
        at = int(fits.argmax()) if len(fits) else 0
        place = int(ends[at]) if len(fits) and fits[at] else int(ends[-1])
        offset[i], end[i] = place, place + size
    return offset


def greedy_orders(task: Task, conflicts: Conflicts) -> Iterator[Ints]:
    """Orders of placement worth trying, best bets first; ties keep the task's canonical order."""
    size, length = task.size, task.stop - task.start
    yield np.lexsort((-length, -size))
    yield np.lexsort((-size, -length))
    yield np.lexsort((-size * length,))
    yield np.lexsort((-size, -(conflicts.weigh(size) + size)))
    yield np.lexsort((-size, task.start))
    yield np.lexsort((-size, -task.stop))


def rank_by(*keys: Ints) -> Ints:
    """The place of each item when they are sorted by the first key, then by the next."""
    order = np.lexsort(tuple(reversed(keys)))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank


def sweep_fit(task: Task) -> Ints:
    """First fit in order of time, without a conflict graph.

    Hulls that overlap are taken for conflicts, which loses a little on several chains and nothing
    on one. Pinned items are avoided at all times. For components with too many conflicts to list.
    """
    offset = np.zeros(len(task), dtype=np.int64)
    taken: list[tuple[int, int]] = []  # disjoint occupied ranges, ascending
    pinned = task.pin >= 0
    for i in np.flatnonzero(pinned).tolist():
        offset[i] = task.pin[i]
        insort(taken, (int(task.pin[i]), int(task.pin[i] + task.size[i])))
    running: list[tuple[int, int, int]] = []  # (stop, low, high)
    sizes, aligns = task.size.tolist(), task.align.tolist()
    starts, stops = task.start.tolist(), task.stop.tolist()
    for i in np.flatnonzero(~pinned).tolist():
        while running and running[0][0] <= starts[i]:
            _, low, high = heappop(running)
            del taken[bisect_left(taken, (low, high))]
        place = 0
        for low, high in taken:
            if low - place >= sizes[i]:
                break
            place = max(place, -(-high // aligns[i]) * aligns[i])
        offset[i] = place
        entry = (place, place + sizes[i])
        insort(taken, entry)
        heappush(running, (stops[i], *entry))
    return offset


class Random:
    """A small generator of random numbers (64-bit linear congruential), the same on any Python."""

    def __init__(self, seed: int) -> None:
        self._state = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & (2**64 - 1)

    def below(self, limit: int) -> int:
        """A whole number from 0 to ``limit - 1``."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        return (self._state >> 20) % limit


def lowest_first(space: Space, rank: Ints) -> Ints:
    """Offsets when always the item that can lie lowest is placed, of equals that of least rank."""
    count = len(space)
    bits = max(1, count.bit_length())
    done = np.iinfo(np.int64).max
    floor = np.asarray([space.slot(i, 0) for i in range(count)], dtype=np.int64)
    # Floor and rank in one number: one minimum finds the next item.
    key = (floor << bits) + rank
    offset = np.zeros(count, dtype=np.int64)
    sizes = space.size.tolist()
    neighbours = space.neighbours
    simple = space.align is None and not space.blocked
    for _ in range(count):
        item = int(key.argmin())
        place = int(key[item]) >> bits
        offset[item] = place
        key[item] = done
        near = neighbours[item]
        end = place + sizes[item]
        if simple:
            key[near] = np.maximum(key[near], (end << bits) + rank[near])
            continue
        for other in near[key[near] >> bits < end].tolist():
            key[other] = (space.slot(other, end) << bits) + rank[other]
    return offset


def squeak(space: Space, order: Ints, bound: int, rounds: int) -> tuple[Ints, int]:
    """Best offsets of some rounds of `lowest_first`, and their peak.

    In the first half of the rounds the items that end above the bound move forward, those that
    end highest furthest. In the second half those that stick out most move forward by chance, and
    after some rounds without a gain it starts again from the best. It starts with the preferences
    ``order`` and stops at a peak of ``bound`` units.
    """
    count = len(space)
    random = Random(rounds)
    best, peak, vain = None, 0, 0
    priority = kept = -order * 8
    for turn in range(rounds):
        offset = lowest_first(space, rank_by(-priority, order))
        ends = offset + space.size
        top = int(ends.max(initial=0))
        vain += 1
        if best is None or top < peak:
            best, peak, kept, vain = offset, top, priority, 0
        if peak <= bound:
            break
        if 2 * turn < rounds:
            over = ends - bound
            push = np.where(over > 0, count + count * over // (top - bound + 1), 0)
        else:
            if vain > _PATIENCE:
                priority, vain = kept, 0
            push = np.zeros(count, dtype=np.int64)
            for i in np.flatnonzero(ends > (peak + bound) // 2).tolist():
                push[i] = 8 + random.below(4 * count)
        priority = priority + push
    assert best is not None
    return best, peak
