"""Pack one task: fall into components, pack equal ones once, improve the worst only.

[Note: components]
    Where nothing is live the program falls into components that do not see each other. The
    segment's bytes are those of its highest component, so work goes to components whose peak
    exceeds the highest lower bound, and only until it does no longer. Real programs repeat
    themselves: components that differ only in when they happen are packed once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define

from symmplan.planner.items import conflicts_of, count_candidates
from symmplan.planner.packing.bound import heaviest_clique, heaviest_moment
from symmplan.planner.packing.greedy import first_fit, greedy_orders, sweep_fit
from symmplan.planner.packing.improve import Improver
from symmplan.planner.packing.task import Packing, Space

if TYPE_CHECKING:
    from symmplan.planner.items import Conflicts
    from symmplan.planner.order import Ints
    from symmplan.planner.packing.task import Task

__all__ = ["pack"]

#: Items that may be placed or glued for the components of a task together.
WORK = 300_000
#: Up to here, items of different alignment that are bound for the whole program are packed with the
#: others, as they may fill gaps between them; in larger tasks they are stacked beside them.
MAX_TANGLED = 500
#: Larger components are packed by greedy orders alone: improving them needs quadratic memory.
MAX_IMPROVED = 1_500
#: More conflicts than this are not listed; the component is then packed by a sweep over time.
MAX_CONFLICTS = 60_000_000
#: Neighbours looked at by all greedy orders of a component together. The first order always runs.
MAX_GREEDY = 24_000_000


@define(eq=False)
class _Component:
    """Items that hang together, the answer so far, and where else the same items occur."""

    task: Task
    places: list[Ints]
    bound: int
    witness: Ints
    conflicts: Conflicts | None = None
    offset: Ints | None = None
    peak: int = 0


def pack(task: Task) -> Packing:
    """Offsets for all items of a task."""
    if not len(task):
        none = np.zeros(0, dtype=np.int64)
        return Packing(offset=none, peak=0, bound=0, witness=none)
    rigid = np.flatnonzero((task.entry < 0).any(axis=1))
    simple = (task.align == task.align[0]).all() or len(task) > MAX_TANGLED
    if len(rigid) and len(rigid) < len(task) and (task.pin < 0).all() and simple:
        return _pack_around(task, rigid)
    components = _components(task)
    pinned = np.flatnonzero(task.pin >= 0)
    ends = task.pin[pinned] + task.size[pinned]
    top = int(ends.max(initial=0))
    bound = max(top, *(c.bound for c in components))
    for c in components:
        _greedy(c, bound)
    bound = _improve(components, top)
    offset = np.zeros(len(task), dtype=np.int64)
    for c in components:
        assert c.offset is not None
        for place in c.places:
            offset[place] = c.offset
    worst = max(components, key=lambda c: c.bound)
    witness, proof = worst.places[0][worst.witness], "clique"
    if top > worst.bound:
        witness, proof = pinned[[int(ends.argmax())]], "pin"
    return Packing(
        offset=offset,
        peak=int((offset + task.size).max()),
        bound=bound,
        witness=witness,
        proof=proof,
    )


def _pack_around(task: Task, rigid: Ints) -> Packing:
    """Items bound for the whole program are stacked; the others are packed above or below."""
    others = np.setdiff1d(np.arange(len(task)), rigid)
    # By falling alignment, so that nothing is lost between them.
    stack = rigid[np.lexsort((rigid, -task.align[rigid]))]
    base = 0
    offset = np.zeros(len(task), dtype=np.int64)
    for i in stack.tolist():
        base = -(-base // int(task.align[i])) * int(task.align[i])
        offset[i] = base
        base += int(task.size[i])
    strictest = int(task.align[others].max())
    inner = pack(task.take(others))
    below = -(-base // strictest) * strictest
    above = -(-inner.peak // int(task.align[stack[0]])) * int(task.align[stack[0]])
    if below + inner.peak <= above + base:
        offset[others] = inner.offset + below
    else:
        offset[others] = inner.offset
        offset[stack] += above
    return Packing(
        offset=offset,
        peak=int((offset + task.size).max()),
        bound=inner.bound + int(task.size[rigid].sum()),
        witness=np.concatenate([rigid, others[inner.witness]]),
        proof=inner.proof,
    )


def _components(task: Task) -> list[_Component]:
    """Stretches between instants at which nothing is live, equal ones merged."""
    reach = np.maximum.accumulate(task.stop)
    cuts = np.flatnonzero(task.start[1:] >= reach[:-1]) + 1
    found: dict[tuple[bytes, ...], _Component] = {}
    for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(task)], strict=True):
        place = np.arange(low, high)
        part = task.take(place)
        key = _shape(part)
        if key in found:
            found[key].places.append(place)
        else:
            bound, witness = heaviest_moment(part)
            found[key] = _Component(part, [place], bound, witness)
    return list(found.values())


def _shape(part: Task) -> tuple[bytes, ...]:
    """What the packing of a component depends on: equal for components that differ in time only."""
    first = part.start[0]
    base = part.entry.min(axis=0)
    return (
        part.size.tobytes(),
        part.align.tobytes(),
        part.pin.tobytes(),
        (part.start - first).tobytes(),
        (part.stop - first).tobytes(),
        (part.end - first).tobytes(),
        (part.entry - base).tobytes(),
        np.maximum(part.last - base, 0).tobytes(),
    )


def _greedy(c: _Component, bound: int) -> None:
    """Greedy orders until one meets the bound."""
    task = c.task
    if count_candidates(task) > MAX_CONFLICTS:
        c.offset = sweep_fit(task)
        c.peak = int((c.offset + task.size).max())
        return
    c.conflicts = conflicts_of(task)
    spent = 0
    for order in greedy_orders(task, c.conflicts):
        offset = first_fit(task, c.conflicts, order)
        peak = int((offset + task.size).max())
        if c.offset is None or peak < c.peak:
            c.offset, c.peak = offset, peak
        spent += len(c.conflicts.neighbours) + 50 * len(task)
        if c.peak <= bound or spent > MAX_GREEDY:
            return


def _improve(components: list[_Component], top: int) -> int:
    """Work on the worst component while it exceeds what the others, or pins, need anyway.

    Returns:
        The best bound for all of them, at least ``top``.
    """
    work = WORK
    done: set[int] = set()
    while work > 0:
        bound = max(top, *(c.bound for c in components))
        k = max(range(len(components)), key=lambda k: (components[k].peak, -k))
        if k in done or components[k].peak <= bound:
            break
        done.add(k)
        c = components[k]
        _raise_bound(c)
        bound = max(bound, c.bound)
        if c.peak <= bound:
            continue
        if c.conflicts is None or len(c.task) > MAX_IMPROVED:
            continue
        assert c.offset is not None
        improver = Improver(Space(c.task, c.conflicts), c.offset, c.peak, bound, work)
        improver.run()
        c.offset, c.peak, work = improver.offset, improver.peak, improver.work
    return max(top, *(c.bound for c in components))


def _raise_bound(c: _Component) -> None:
    """Look harder for a heavy set of conflicting items where one instant may not show it."""
    if c.task.entry.shape[1] > 1 and c.conflicts is not None:
        bound, witness = heaviest_clique(c.task, c.conflicts)
        if bound > c.bound:
            c.bound, c.witness = bound, witness
