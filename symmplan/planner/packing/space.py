"""A component prepared for search: neighbours, sections, what is pinned.

[Note: sections]
    A section is a set of items that are live at one instant of a linear extension, so they
    conflict pairwise; only sections that no other contains are kept. Whatever else happens, above
    the lowest place that a section's unplaced items may take there must be room for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from symmplan.planner.interference import Conflicts
    from symmplan.planner.packing.task import Task

    Ints = NDArray[np.int64]

__all__ = ["Space"]


class Space:
    """What a search looks up; it is never changed.

    Attributes:
        free: Places in the task of the items to be searched, that is, those without a pin.
        size: Their sizes in units.
        align: Their alignments in units, or None if all are 1.
        low: First section of each.
        high: First section after the last of each.
        hull_low: The same for hulls: what lies in other sections cannot conflict.
        hull_high: The same.
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
        self.hull_low: Ints = self.low
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
        for a, b in zip(self.hull_low.tolist(), self.hull_high.tolist(), strict=True):
            self.crossing[a + 1 : b] += 1

    def _twins(self, near: NDArray[np.bool_]) -> list[Ints]:
        alike: dict[tuple[object, ...], list[int]] = {}
        keys = []
        for i in range(len(self)):
            row = near[i].copy()
            row[i] = True
            align = 1 if self.align is None else int(self.align[i])
            pins = tuple(self.blocked.get(i, ()))
            key = (np.packbits(row).tobytes(), int(self.size[i]), align, pins)
            keys.append(key)
            alike.setdefault(key, []).append(i)
        return [
            np.asarray([j for j in alike[keys[i]] if j != i], dtype=np.int64)
            for i in range(len(self))
        ]

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
