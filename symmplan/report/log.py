"""The log: one line for each plan, one warning if there is nothing to plan.

The logger is named ``symmplan``, so ``TORCH_LOGS=symmplan`` shows what is made (INFO) and
``TORCH_LOGS=+symmplan`` also each plan's summary (DEBUG); so does `logging`, however it is set up.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from symmplan.report.format import count, size
from symmplan.report.text import plan_line, plan_summary, reasons_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from symmplan.model import Plan

__all__ = ["LOG", "log_plan"]

LOG = logging.getLogger("symmplan")


def log_plan(
    what: str,
    plan: Plan,
    algorithms: Iterable[str] = (),
    beyond: Iterable[tuple[str, int]] = (),
) -> None:
    """One line: what is planned, its bytes and their bound, algorithms, what is left out and why.

    Args:
        what: Whose plan it is.
        plan: The plan.
        algorithms: How each of its declared calls runs, where that is known.
        beyond: Bytes of devices beyond segments and torch's allocator, by what took them.

    Collective: no.
    """
    if not LOG.isEnabledFor(logging.INFO):
        return
    said = [plan_line(plan) if plan.segments else "nothing is placed"]
    counted = Counter(algorithms)
    if counted:
        said.append(
            "algorithms: "
            + ", ".join(f"{n} {algorithm}" for algorithm, n in sorted(counted.items()))
        )
    if plan.barriers:
        said.append(count(len(plan.barriers), "barrier"))
    if plan.unplanned:
        said.append(f"left out: {reasons_line(plan.unplanned)}")
    taken = [f"{cause} {size(nbytes)}" for cause, nbytes in beyond]
    if taken:
        said.append(f"beyond segments: {', '.join(taken)}")
    LOG.info("%s: plan %s: %s", what, plan.fingerprint[:12], "; ".join(said))
    LOG.debug("%s", plan_summary(plan))
