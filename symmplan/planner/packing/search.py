"""Complete search for a packing no higher than a target.

[Note: search]
    The idea is that of Moffitt, "MiniMalloc" (ASPLOS 2023): if a packing exists, then one exists in
    which no item can be lowered, so items can be placed by ascending offset, each resting on what
    lies below it. Each node decides one question: of the items that could be placed lowest, does
    the preferred one go there, or not? "Not" bars it until a neighbour placed later lifts it. A
    node is given up as soon as

    * a section needs more room above its lowest unplaced item than the target leaves,
    * an item could have been placed wholly below the current offset, so the packing could be
      lowered, or
    * nothing can be placed although something is left.

    An item that is barred bars its twins, which are interchangeable. Where no unplaced item
    reaches from one part of the program into another, the parts are searched one after the other
    and the choices of a part that is done are never reconsidered for another's sake.

    Work is counted in nodes, never in time, so every machine gets the same answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from symmplan.planner.packing.task import FREE

if TYPE_CHECKING:
    from symmplan.planner.order import Ints
    from symmplan.planner.packing.task import Space

__all__ = ["SearchResult", "search"]


@frozen(eq=False)
class SearchResult:
    """How a search ended.

    Attributes:
        offset: Offsets of the space's items in units, or None.
        nodes: Work done.
        impossible: Whether it is proven that no packing meets the target.
    """

    offset: Ints | None
    nodes: int
    impossible: bool


@frozen(eq=False)
class _Stretch:
    """Items still to be searched in a stretch of sections.

    Attributes:
        depth: Choices made before the program fell into parts; those made since are final once
            the part before this one is done.
        low: First section.
        high: First section after the last.
        items: The items; nothing that happens in other parts touches them.
        live: What `_State.live` holds for them.
        lift: What `_State.lift` holds for them.
        next: What is searched after this part.
    """

    depth: int
    low: int
    high: int
    items: Ints
    live: Ints
    lift: Ints
    next: _Stretch | None


class _State:
    """Where the search stands. Arrays are shared between states and copied before a change."""

    __slots__ = ("crossing", "floor", "high", "lift", "live", "load", "low", "rest")

    def __init__(self, space: Space, floor: Ints) -> None:
        self.floor = floor  # lowest place that what is placed leaves to each item
        self.live = floor  # the same, FREE for placed, barred and foreign items
        self.lift = floor  # at least where it will go; FREE for placed and foreign items
        self.load = space.load  # units unplaced in each section
        self.crossing = space.crossing  # unplaced hulls across each boundary
        self.low, self.high = 0, space.sections
        self.rest: _Stretch | None = None

    def copy(self) -> _State:
        new = _State.__new__(_State)
        new.floor, new.live, new.lift = self.floor.copy(), self.live.copy(), self.lift.copy()
        new.load, new.crossing = self.load.copy(), self.crossing.copy()
        new.low, new.high, new.rest = self.low, self.high, self.rest
        return new


def search(
    space: Space, target: int, rank: Ints, limit: int, blame: Ints | None = None
) -> SearchResult:
    """Look for a packing whose peak is at most ``target`` units, with ``limit`` nodes at most.

    Of items that can be placed equally low the one of least ``rank`` comes first. ``blame`` counts,
    per section, how often it ended a branch. See [Note: search].
    """
    floor = np.asarray([space.slot(i, 0) for i in range(len(space))], dtype=np.int64)
    state = _State(space, floor)
    offset = np.zeros(len(space), dtype=np.int64)
    choices: list[tuple[int, _State]] = []
    for nodes in range(1, limit + 1):
        lowest = int(state.live.min()) if len(space) else int(FREE)
        if lowest == FREE and int(state.lift.min(initial=FREE)) == FREE:
            if state.rest is None:
                return SearchResult(offset, nodes, impossible=False)
            del choices[state.rest.depth :]
            part, state = state.rest, state.copy()
            _enter(state, part)
            continue
        if lowest == FREE or not _hopeful(space, state, target, lowest, blame):
            if not choices:
                return SearchResult(None, nodes, impossible=True)
            item, state = choices.pop()
            _bar(space, state, item, target)
            continue
        ready = np.flatnonzero(state.live == lowest)
        item = int(ready[rank[ready].argmin()])
        kept, state = state, state.copy()
        choices.append((item, kept))
        offset[item] = lowest
        _place(space, state, item, lowest)
        _split(space, state, len(choices))
    return SearchResult(None, limit, impossible=False)


def _hopeful(space: Space, state: _State, target: int, lowest: int, blame: Ints | None) -> bool:
    low, high = state.low, state.high
    left = state.lift < FREE
    ends = np.where(left, state.floor, FREE) + space.size
    if int(ends.min()) <= lowest:
        return False
    at = int(space.bounds[low])
    lift = state.lift[space.members[at : int(space.bounds[high])]]
    lowest_of = np.minimum.reduceat(lift, space.bounds[low:high] - at)
    load = state.load[low:high]
    full = (lowest_of + load > target) & (load > 0)
    if full.any():
        if blame is not None:
            blame[low + int(full.argmax())] += 1
        return False
    return True


def _place(space: Space, state: _State, item: int, place: int) -> None:
    end = place + int(space.size[item])
    state.live[item] = state.lift[item] = FREE
    near = space.neighbours[item]
    near = near[state.lift[near] < FREE]
    floor = np.maximum(state.floor[near], end)
    if space.align is not None:
        align = space.align[near]
        floor = (floor + align - 1) & -align
    if space.blocked:
        for k, other in enumerate(near.tolist()):
            if other in space.blocked:
                floor[k] = space.slot(other, int(floor[k]))
    state.floor[near] = state.live[near] = floor
    state.lift[near] = np.maximum(state.lift[near], floor)
    state.load[space.low[item] : space.high[item]] -= space.size[item]
    state.crossing[space.low[item] + 1 : space.hull_high[item]] -= 1


def _bar(space: Space, state: _State, item: int, target: int) -> None:
    """Decide that neither the item nor its twins go to the item's floor."""
    # The state was kept for this moment, but its arrays may be shared with states further down.
    state.live, state.lift = state.live.copy(), state.lift.copy()
    raised = int(state.floor[item] + space.least[item])
    if not space.least[item] or raised + int(space.size[item]) > target:
        # Nothing can lift it, or not low enough: no way on from here.
        state.live[:] = FREE
        state.lift[item] = 0
        return
    for other in (item, *space.twins[item].tolist()):  # those that are placed stay as they are
        state.live[other] = FREE
        state.lift[other] = max(int(state.lift[other]), raised)


def _split(space: Space, state: _State, depth: int) -> None:
    """Go on with one part if what is left falls into several. The fullest part comes first."""
    if state.high - state.low < 2:
        return
    cuts = np.flatnonzero(state.crossing[state.low + 1 : state.high] == 0)
    if not len(cuts):
        return
    cuts += state.low + 1
    left = np.flatnonzero(state.lift < FREE)
    part_of = np.searchsorted(cuts, space.low[left], side="right")
    parts = np.unique(part_of).tolist()
    if len(parts) < 2:
        return
    edges = [state.low, *cuts.tolist(), state.high]
    parts.sort(key=lambda p: (int(state.load[edges[p] : edges[p + 1]].max()), -p))
    rest = state.rest
    for p in parts:
        items = left[part_of == p]
        rest = _Stretch(
            depth, edges[p], edges[p + 1], items, state.live[items], state.lift[items], rest
        )
    assert rest is not None
    _enter(state, rest)


def _enter(state: _State, part: _Stretch) -> None:
    state.live[:] = FREE
    state.lift[:] = FREE
    state.live[part.items], state.lift[part.items] = part.live, part.lift
    state.low, state.high, state.rest = part.low, part.high, part.next
