"""Lower bounds: items that conflict pairwise need disjoint bytes.

[Note: heaviest antichain]
    "All of A before all of B" is a partial order; sets of pairwise conflicting items are its
    antichains. By Dilworth's theorem in its weighted form the heaviest antichain weighs as much as
    the fewest bytes that can be handed on along the order: every unit of an item either comes
    fresh or from one item before it. So the bound is the sum of all sizes minus a maximum flow of
    units from the items that ask for them to earlier ones that give them, and a minimum cut of
    that flow is the antichain.

    The order of the items follows from `Problem.graph`: an item begins and ends at a clock of it.
    The flow runs on a `networkx.DiGraph` of those clocks, equal ones merged, joined to the nearest
    only: some thousand edges, where pairs of items would be a million. Which are the nearest,
    numpy finds by comparing all clocks: a tenth of a second for 1,200 items, where
    `networkx.transitive_reduction` takes four for 800.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np
from networkx.algorithms.flow import boykov_kolmogorov

from symmplan.planner.items import conflicts_of, count_candidates

if TYPE_CHECKING:
    from symmplan.planner.items import Bools, Clocks, Conflicts
    from symmplan.planner.order import Ints
    from symmplan.planner.packing.task import Task

__all__ = ["heaviest", "heaviest_clique", "heaviest_moment"]

#: Largest component for which the flow is computed, in items.
MAX_FLOW_ITEMS = 1_200
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
    return _by_flow(task) if len(task) <= MAX_FLOW_ITEMS else _by_growing(task, conflicts)


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


def _by_flow(task: Task) -> tuple[int, Ints]:
    """The heaviest set of pairwise conflicting items. See [Note: heaviest antichain]."""
    graph, begin, end = _network(task)
    given = len(graph) - 1
    _, (_, free) = nx.minimum_cut(graph, given - 1, given, flow_func=boykov_kolmogorov)
    gives = np.zeros(len(graph), dtype=bool)
    gives[list(free)] = True
    chosen = np.flatnonzero(gives[end] & ~gives[begin])
    return int(task.size[chosen].sum()), chosen


def _network(task: Task) -> tuple[nx.DiGraph[int], Ints, Ints]:
    """What is left to hand on, and per item the nodes at which it begins and ends.

    The last two nodes are where units are asked for and where they are given.
    """
    begins, begin = np.unique(task.entry, axis=0, return_inverse=True)
    ends, end = np.unique(task.last, axis=0, return_inverse=True)
    begin, end = begin.ravel(), end.ravel()
    asked = np.bincount(begin, weights=task.size).astype(np.int64).tolist()
    given = np.bincount(end, weights=task.size).astype(np.int64).tolist()
    over, order = _at_most(ends, begins), _at_most(begins, begins)
    np.fill_diagonal(order, val=False)
    first, source = len(begins), len(begins) + len(ends)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(source + 2))
    # Nearly all units can be handed on at once, from the latest givers; flow may undo that.
    for taker in range(first):
        for giver in np.flatnonzero(over[:, taker])[::-1].tolist():
            units = min(asked[taker], given[giver])
            if units:
                asked[taker] -= units
                given[giver] -= units
                graph.add_edge(first + giver, taker, capacity=units)
            if not asked[taker]:
                break
    graph.add_weighted_edges_from(((source, k, n) for k, n in enumerate(asked)), "capacity")
    graph.add_weighted_edges_from(
        ((first + k, source + 1, n) for k, n in enumerate(given)), "capacity"
    )
    forever = [(b, first + a) for a, b in np.argwhere(_nearest(over, order)).tolist()]
    forever += [(b, a) for a, b in np.argwhere(_nearest(order, order)).tolist()]
    graph.add_edges_from(forever, capacity=inf)
    return graph, begin, end + first


def _at_most(a: Clocks, b: Clocks) -> Bools:
    """Which clocks of the one are nowhere ahead of which of the other."""
    result = np.ones((len(a), len(b)), dtype=bool)
    for mine, other in zip(a.T, b.T, strict=True):
        result &= mine[:, None] <= other[None, :]
    return result


def _nearest(before: Bools, order: Bools) -> Bools:
    """The nearest successors of each: those that no other successor precedes."""
    nearest: Bools = before & ~(before.astype(np.float32) @ order.astype(np.float32) > 0)
    return nearest
