"""A packing task, its answer, and what a search looks up of a task.

[Note: sections]
    A section is a set of items that are live at one instant of a linear extension, so they conflict
    pairwise; only sections that no other contains are kept. So in any packing there must be room
    for all unplaced items of a section above the lowest place that they may take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, fields, frozen

from symmplan.planner.items import Ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from symmplan.planner.items import Conflicts, Items

    Ints = NDArray[np.int64]

__all__ = ["FREE", "Packing", "Space", "Task", "task_of"]

#: Above any offset or size.
FREE = np.int64(1) << 60


@frozen(eq=False)
class Task(Ranges):
    """Items to be packed from byte 0 upwards as low as possible.

    Items are sorted by hull, then size, then name, so the task does not depend on how the problem
    was listed. Sizes, alignments and offsets are in units that every offset is a multiple of.

    Attributes:
        unit: Bytes of one unit.
        items: Number of each item in `Items`.
        size: Sizes in units, rounded up. As every offset is a whole number of units, the rest of
            the last unit is of no use to anybody, so this loses nothing.
        align: Alignment of each offset, in units.
        pin: Fixed offset in units, or -1.
    """

    unit: int
    items: Ints
    size: Ints
    align: Ints
    pin: Ints

    def take(self, which: Ints) -> Task:
        """The task of some of its items, given by ascending place in this one."""
        columns = {f.name: getattr(self, f.name)[which] for f in fields(Task) if f.name != "unit"}
        return evolve(self, **columns)


@frozen(eq=False)
class Packing:
    """Offsets for a task.

    Attributes:
        offset: Offset of each item in units.
        peak: First unit above all items.
        bound: Proven minimum of the peak.
        witness: Places of items that conflict pairwise and whose sizes sum to the bound, or of
            the one pinned item that ends there.
        proof: ``"clique"``, ``"pin"``, or ``"search"`` where a complete search lifted the bound.
        search: How the search for a lower peak ended; see `Plan.search`.
    """

    offset: Ints
    peak: int
    bound: int
    witness: Ints
    proof: str = "clique"
    search: str = "complete"


def task_of(items: Items, which: Ints) -> Task:
    """The task of packing some items, given by number, into one segment."""
    unit = int(items.align[which].min()) if len(which) else 1
    size = -(-items.nbytes[which] // unit)
    sort = np.lexsort((which, size, items.stop[which], items.start[which]))
    which, size = which[sort], size[sort]
    pin = items.pin[which]
    return Task(
        **{f.name: getattr(items, f.name)[which] for f in fields(Ranges)},
        unit=unit,
        items=which,
        size=size,
        align=items.align[which] // unit,
        pin=np.where(pin >= 0, pin // unit, -1),
    )


class Space:
    """What a search looks up of a task; it is never changed. See [Note: sections].

    Attributes:
        free: Places in the task of the items to be searched, that is, those without a pin.
        size: Their sizes in units.
        align: Their alignments in units, or None if all are 1.
        low: First section of each.
        high: First section after the last of each.
        hull_high: First section after the hull's last; what lies in others cannot conflict.
        neighbours: Per item, those it conflicts with.
        least: Smallest size among the neighbours of each; 0 without neighbours.
        twins: Per item, others with the same size, alignment, neighbours and pinned neighbours.
        load: Units of each section.
        crossing: Per boundary between sections, how many hulls cross it.
        members: Items of section 0, of section 1, ...
        bounds: Where each section's members begin.
        blocked: Per item, the pinned ranges it must avoid, ascending.
    """

    def __init__(self, task: Task, conflicts: Conflicts) -> None:
        self.task = task
        self.free: Ints = np.flatnonzero(task.pin < 0)
        free = self.free
        self.size: Ints = task.size[free]
        self.align = None if (task.align[free] == 1).all() else task.align[free]
        matrix = conflicts.matrix()
        near = matrix[np.ix_(free, free)]
        self.neighbours = [np.flatnonzero(row) for row in near]
        self.least = np.asarray(
            [int(self.size[n].min()) if len(n) else 0 for n in self.neighbours], dtype=np.int64
        )
        self._sections(task.start[free], task.end[free], task.stop[free])
        self.blocked = self._blocked(task, matrix)
        self.twins = self._twins(near)

    def __len__(self) -> int:
        return len(self.size)

    @property
    def sections(self) -> int:
        """Number of sections."""
        return len(self.load)

    def _sections(self, start: Ints, end: Ints, stop: Ints) -> None:
        instants = np.unique(start)
        # A section is contained in the next one unless something ends in between.
        ends = np.zeros(len(instants) + 1, dtype=bool)
        after = np.searchsorted(instants, end)
        ends[after] = True
        kept = np.append(0, np.cumsum(ends[1:]))
        self.low: Ints = kept[np.searchsorted(instants, start)]
        self.high: Ints = np.maximum(kept[after], self.low + 1)
        # The section in which the hull's last instant lies; nothing need end right there.
        self.hull_high: Ints = kept[np.searchsorted(instants, stop) - 1] + 1
        count = int(self.hull_high.max()) if len(start) else 0
        self.load: Ints = np.zeros(count, dtype=np.int64)
        self.crossing: Ints = np.zeros(count + 1, dtype=np.int64)
        width = self.high - self.low
        owner = np.repeat(np.arange(len(start)), width)
        section = np.arange(len(owner)) - np.repeat(np.cumsum(width) - width, width)
        section = section + self.low[owner]
        np.add.at(self.load, section, self.size[owner])
        self.members: Ints = owner[np.argsort(section, kind="stable")]
        self.bounds: Ints = np.append(0, np.cumsum(np.bincount(section, minlength=count)))
        for a, b in zip(self.low.tolist(), self.hull_high.tolist(), strict=True):
            self.crossing[a + 1 : b] += 1

    def _twins(self, near: NDArray[np.bool_]) -> list[Ints]:
        alike: dict[tuple[object, ...], list[int]] = {}
        for i in range(len(self)):
            row = near[i].copy()
            row[i] = True
            align = 1 if self.align is None else int(self.align[i])
            pins = tuple(self.blocked.get(i, ()))
            key = (np.packbits(row).tobytes(), int(self.size[i]), align, pins)
            alike.setdefault(key, []).append(i)
        others = {i: [j for j in same if j != i] for same in alike.values() for i in same}
        return [np.asarray(others[i], dtype=np.int64) for i in range(len(self))]

    def _blocked(self, task: Task, matrix: NDArray[np.bool_]) -> dict[int, list[tuple[int, int]]]:
        pinned = np.flatnonzero(task.pin >= 0)
        blocked = {}
        for i, item in enumerate(self.free.tolist()):
            near = pinned[matrix[item, pinned]].tolist()
            if near:
                blocked[i] = sorted(
                    (int(task.pin[j]), int(task.pin[j] + task.size[j])) for j in near
                )
        return blocked

    def slot(self, item: int, floor: int) -> int:
        """Lowest place of an item at or above ``floor`` that no pinned neighbour takes."""
        size = int(self.size[item])
        align = 1 if self.align is None else int(self.align[item])
        place = -(-floor // align) * align
        for low, high in self.blocked.get(item, ()):
            if place < high and low < place + size:
                place = -(-high // align) * align
        return place
