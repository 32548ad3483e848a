"""Lower bounds: items that conflict pairwise need disjoint bytes.

[Note: heaviest antichain]
    "All of A before all of B" is a partial order; sets of pairwise conflicting items are its
    antichains. By Dilworth's theorem in its weighted form the heaviest antichain weighs as much as
    the fewest bytes that can be handed on along the order: every unit of an item either comes
    fresh or from one item before it. So the bound is the sum of all sizes minus a maximum flow of
    units from items to later items, and the minimum cut of that flow is the antichain.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from symmplan.planner.items import conflicts_of, count_candidates

if TYPE_CHECKING:
    from symmplan.planner.items import Conflicts
    from symmplan.planner.order import Ints
    from symmplan.planner.packing.task import Task

__all__ = ["heaviest", "heaviest_clique", "heaviest_moment"]

#: Largest component for which the flow is computed, in items.
MAX_FLOW_ITEMS = 1_200
#: Edges that the flow may look at before it is given up.
MAX_FLOW_WORK = 12_000_000
#: Pairs of overlapping hulls above which conflicts are not listed for a bound alone.
MAX_PAIRS = 20_000_000
#: Items from which a clique is grown greedily.
SEEDS = 64


def heaviest_moment(task: Task) -> tuple[int, Ints]:
    """Most units live at one instant of the canonical linear extension, and who lives then.

    On one chain this is the heaviest set of pairwise conflicting items. On several it is one such
    set, for items that are live at the same instant of some linear extension do conflict.
    """
    if not len(task):
        return 0, np.zeros(0, dtype=np.int64)
    times = np.concatenate([task.end, task.start])
    change = np.concatenate([-task.size, task.size])
    sort = np.argsort(times, kind="stable")  # ends first: ranges are half-open
    live = np.cumsum(change[sort])
    best = int(np.argmax(live))
    instant = times[sort][best]
    witness = np.flatnonzero((task.start <= instant) & (instant < task.end))
    return int(live[best]), witness


def heaviest(task: Task) -> tuple[int, Ints]:
    """The heaviest set of conflicting items that can be found with bounded work."""
    best = heaviest_moment(task)
    if task.entry.shape[1] > 1 and count_candidates(task) <= MAX_PAIRS:
        best = max(best, heaviest_clique(task, conflicts_of(task)), key=lambda b: b[0])
    return best


def heaviest_clique(task: Task, conflicts: Conflicts) -> tuple[int, Ints]:
    """The heaviest set of pairwise conflicting items, or a heavy one where that is too much work.

    See [Note: heaviest antichain].
    """
    if len(task) <= MAX_FLOW_ITEMS:
        exact = _by_flow(task, conflicts)
        if exact is not None:
            return exact
    return _by_growing(task, conflicts)


def _by_growing(task: Task, conflicts: Conflicts) -> tuple[int, Ints]:
    """From each of the heaviest items, add the heaviest that conflict with all chosen so far."""
    near = conflicts.weigh(task.size)
    best, chosen = 0, np.zeros(0, dtype=np.int64)
    for seed in np.lexsort((np.arange(len(task)), -(near + task.size)))[:SEEDS].tolist():
        candidates = conflicts.of(seed).astype(np.int64)
        members = [seed]
        while len(candidates):
            item = int(candidates[np.argmax(near[candidates] + task.size[candidates])])
            members.append(item)
            candidates = np.intersect1d(candidates, conflicts.of(item), assume_unique=True)
        weight = int(task.size[members].sum())
        if weight > best:
            best, chosen = weight, np.sort(np.asarray(members, dtype=np.int64))
    return best, chosen


def _by_flow(task: Task, conflicts: Conflicts) -> tuple[int, Ints] | None:
    """Maximum flow from items to later items; None if it is too much work."""
    count = len(task)
    # Items are sorted by start, so of two that do not conflict the first comes before the second.
    before = np.triu(~conflicts.matrix(), k=1)
    later = [np.flatnonzero(row) for row in before]
    earlier = [np.flatnonzero(column) for column in before.T]
    size = task.size.tolist()
    supply, demand = list(size), list(size)  # left of each item as giver, as taker
    given: list[dict[int, int]] = [{} for _ in range(count)]  # taker -> giver -> units
    work = 0
    # Nearly all bytes can be handed on greedily: to each taker from the latest givers.
    for taker in range(count):
        for giver in earlier[taker][::-1].tolist():
            work += 1
            units = min(supply[giver], demand[taker])
            if units:
                supply[giver] -= units
                demand[taker] -= units
                given[taker][giver] = units
                if not demand[taker]:
                    break
    while True:
        # Breadth first from givers with supply, along "may give", then back along "was given".
        came: dict[int, int] = {}  # taker -> giver that reached it
        seen = np.asarray(supply) > 0
        by: dict[int, int] = {}  # giver -> taker that led to it
        queue = np.flatnonzero(seen).tolist()
        reached = np.zeros(count, dtype=bool)
        end = -1
        for giver in queue:
            work += len(later[giver]) // 16 + 8
            fresh = later[giver][~reached[later[giver]]]
            reached[fresh] = True
            for taker in fresh.tolist():
                came[taker] = giver
                if demand[taker]:
                    end = taker
                    break
                for other in given[taker]:
                    work += 1
                    if not seen[other]:
                        seen[other] = True
                        by[other] = taker
                        queue.append(other)
            if end >= 0:
                break
        if end < 0:
            break
        if work > MAX_FLOW_WORK:
            return None
        _push(end, came, by, supply, demand, given)
    # Reached givers can end no path: an item is in the antichain if bytes reach it as a giver
    # but not as a taker.
    chosen = np.flatnonzero(seen & ~reached)
    return int(task.size[chosen].sum()), chosen


def _push(
    end: int,
    came: dict[int, int],
    by: dict[int, int],
    supply: list[int],
    demand: list[int],
    given: list[dict[int, int]],
) -> None:
    path = []
    taker = end
    while True:
        giver = came[taker]
        path.append((giver, taker))
        if giver not in by:
            break
        taker = by[giver]
    units = min(demand[end], supply[path[-1][0]])
    for (giver, _), (_, back) in pairwise(path):
        units = min(units, given[back][giver])
    demand[end] -= units
    supply[path[-1][0]] -= units
    for giver, taker in path:
        given[taker][giver] = given[taker].get(giver, 0) + units
    for (giver, _), (_, back) in pairwise(path):
        given[back][giver] -= units
        if not given[back][giver]:
            del given[back][giver]
