"""The planner: `Problem` to `Plan`.

Order (happens-before as clocks) -> items (live ranges) -> segments -> packing -> barriers. What
comes out is checked by `symmplan.planner.verify`, which shares no code with any of these.
"""

from symmplan.planner.plan import check_effort, plan

__all__ = ["check_effort", "plan"]
