"""Lower bounds: items that conflict pairwise need disjoint bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from symmplan.planner.packing.task import Task

    Ints = NDArray[np.int64]

__all__ = ["heaviest_moment"]


def heaviest_moment(task: Task) -> tuple[int, Ints]:
    """Most units live at one instant of the canonical linear extension, and who lives then.

    On one chain this is the heaviest set of pairwise conflicting items. On several it is one such
    set, for items that are live at the same instant of some linear extension do conflict.

    Args:
        task: What is packed.
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
