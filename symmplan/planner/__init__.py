"""The planner: `Problem` to `Plan`.

Order (happens-before as clocks) -> items (live ranges) -> segments -> packing -> barriers.
`symmplan.planner.verify` checks the result. It shares no code with any of these.
"""

from symmplan.planner.plan import plan

__all__ = ["plan"]
