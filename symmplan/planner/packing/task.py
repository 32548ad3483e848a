"""One packing task and its answer, in units that every offset is a multiple of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from symmplan.planner.items import Items

    Ints = NDArray[np.int64]

__all__ = ["FREE", "Packing", "Task", "task_of"]

#: Above any offset or size.
FREE = np.int64(1) << 60


@frozen(eq=False)
class Task:
    """Items to be packed from byte 0 upwards as low as possible.

    Items are sorted by hull, then size, then name, so the task does not depend on how the problem
    was listed.

    Attributes:
        unit: Bytes of one unit.
        items: Number of each item in `Items`.
        size: Sizes in units, rounded up. As every offset is a whole number of units, the rest of
            the last unit is of no use to anybody, so this loses nothing.
        align: Alignment of each offset, in units.
        pin: Fixed offset in units, or -1.
        start: First instant of each hull, ascending.
        stop: First instant after each hull.
        end: First instant after the last access.
        entry: [items, chains] See [Note: comparing live ranges] in `symmplan.planner.items`.
        last: [items, chains] The same.
    """

    unit: int
    items: Ints
    size: Ints
    align: Ints
    pin: Ints
    start: Ints
    stop: Ints
    end: Ints
    entry: NDArray[np.int32]
    last: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.size)

    def take(self, which: Ints) -> Task:
        """The same for some of its items, given by ascending place in this task."""
        return Task(
            unit=self.unit,
            items=self.items[which],
            size=self.size[which],
            align=self.align[which],
            pin=self.pin[which],
            start=self.start[which],
            stop=self.stop[which],
            end=self.end[which],
            entry=self.entry[which],
            last=self.last[which],
        )


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
    """

    offset: Ints
    peak: int
    bound: int
    witness: Ints
    proof: str = "clique"


def task_of(items: Items, which: Ints) -> Task:
    """The task of packing some items into one segment.

    Args:
        items: All items.
        which: Numbers of those to pack.
    """
    unit = int(items.align[which].min()) if len(which) else 1
    size = -(-items.nbytes[which] // unit)
    sort = np.lexsort((which, size, items.stop[which], items.start[which]))
    which, size = which[sort], size[sort]
    pin = items.pin[which]
    return Task(
        unit=unit,
        items=which,
        size=size,
        align=items.align[which] // unit,
        pin=np.where(pin >= 0, pin // unit, -1),
        start=items.start[which],
        stop=items.stop[which],
        end=items.end[which],
        entry=items.entry[which],
        last=items.last[which],
    )
