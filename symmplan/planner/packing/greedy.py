"""First fit: each item, in a given order, goes to the lowest place that is free for it."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from symmplan.planner.packing.task import FREE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from symmplan.planner.interference import Conflicts
    from symmplan.planner.packing.task import Task

    Ints = NDArray[np.int64]

__all__ = ["first_fit", "greedy_orders", "sweep_fit"]


def first_fit(task: Task, conflicts: Conflicts, order: Ints) -> Ints:
    """Offsets when items are placed one by one, each as low as those placed before allow.

    Args:
        task: What is packed; pinned items come first whatever the order.
        conflicts: Its conflict graph.
        order: Places of all items in the order of placement.

    Returns:
        Offsets in units.
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
        near = neighbours[bounds[i] : bounds[i + 1]]
        below = offset[near]
        size, align = sizes[i], aligns[i]
        if not len(below):
            offset[i], end[i] = 0, size
            continue
        sort = below.argsort()
        below = below[sort]
        if below[0] >= size:
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


def greedy_orders(task: Task, conflicts: Conflicts) -> list[Ints]:
    """Orders of placement worth trying, best bets first; ties keep the task's canonical order.

    Args:
        task: What is packed.
        conflicts: Its conflict graph.
    """
    size, length = task.size, task.stop - task.start
    pressure = np.bincount(
        np.repeat(np.arange(len(task)), np.diff(conflicts.bounds)),
        weights=size[conflicts.neighbours],
        minlength=len(task),
    ).astype(np.int64)
    keys = (
        (-size, -length),
        (-length, -size),
        (-size * length,),
        (-(pressure + size), -size),
        (task.start, -size),
        (-task.stop, -size),
    )
    return [np.lexsort(tuple(reversed(k))) for k in keys]


def sweep_fit(task: Task) -> Ints:
    """First fit in order of time, without a conflict graph.

    Hulls that overlap are taken for conflicts, which loses a little on several chains and nothing
    on one. Pinned items are avoided at all times. For components with too many conflicts to list.

    Args:
        task: What is packed.

    Returns:
        Offsets in units.
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
