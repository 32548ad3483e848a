"""Check a plan with code that did not make it.

[Note: independence]
    Nothing in this folder imports the planner's order, items, packing or barriers. The planner
    has vector clocks; here one operation happens before another if a path leads from it to the
    other in `Problem.graph`. Who may share bytes follows from one sweep over the bytes, and bounds
    are accepted only with their witnesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan.planner.graphs import Paths
from symmplan.planner.verify.barriers import check_barriers
from symmplan.planner.verify.bounds import check_bounds
from symmplan.planner.verify.sharing import check_pads, check_sharing
from symmplan.planner.verify.structure import check_structure, users_of
from symmplan.planner.verify.touches import Touches

if TYPE_CHECKING:
    from symmplan.model import Plan

__all__ = ["verify"]


def verify(plan: Plan) -> None:
    """Check everything that a plan states. Collective: no. Time is near linear in its size.

    Raises:
        VerificationError: A rule is broken; ``kind`` says which: ``segment_name``,
            ``segment_groups``, ``segment_empty``, ``segment_size``, ``signal_pad``,
            ``missing_buffer``, ``unknown_buffer``, ``unknown_segment``, ``nbytes``, ``group``,
            ``out_of_segment``, ``pin``, ``misaligned``, ``together``, ``apart``, ``pad``,
            ``overlap``, ``barrier``, ``unknown_barrier`` or ``lower_bound``.
    """
    check_structure(plan)
    users, owner = users_of(plan)
    paths = Paths(plan.problem.graph())
    touches = Touches(plan.problem.accesses, owner, len(users), paths)
    check_pads(plan, owner, paths)
    reuse = check_sharing(plan, users, touches)
    check_barriers(plan, users, owner, reuse, paths)
    check_bounds(plan, users, owner, touches)
