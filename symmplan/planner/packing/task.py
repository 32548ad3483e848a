"""A packing task, its answer, and what an improvement looks up of a task.

[Note: sections]
    A section is a set of items that are live at one instant of a linear extension, so they conflict
    pairwise; only sections that no other contains are kept. So no packing is lower than the
    fullest section.
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
        proof: ``"clique"`` or ``"pin"``.
    """

    offset: Ints
    peak: int
    bound: int
    witness: Ints
    proof: str = "clique"


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
    """What an improvement looks up of a task; it is never changed. See [Note: sections].

    Attributes:
        free: Places in the task of the items to be placed, that is, those without a pin.
        size: Their sizes in units.
        align: Their alignments in units, or None if all are 1.
        low: First section of each.
        high: First section after the last of each.
        hull_high: First section after the hull's last; what lies in others cannot conflict.
        neighbours: Per item, those it conflicts with.
        load: Units of each section.
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
        self._sections(task.start[free], task.end[free], task.stop[free])
        self.blocked = self._blocked(task, matrix)

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
        width = self.high - self.low
        owner = np.repeat(np.arange(len(start)), width)
        section = np.arange(len(owner)) - np.repeat(np.cumsum(width) - width, width)
        section = section + self.low[owner]
        np.add.at(self.load, section, self.size[owner])

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
