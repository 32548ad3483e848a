"""The facts of a plan as plain data, the same under every command's ``--json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symmplan.model import Plan

__all__ = ["plan_facts"]


def plan_facts(plan: Plan) -> dict[str, Any]:
    """What a plan decided, in numbers. Sizes are bytes.

    This is a summary: `Plan.to_json` writes the plan itself.
    """
    return {
        "fingerprint": plan.fingerprint,
        "effort": plan.effort,
        "optimal": plan.optimal,
        "buffers": len(plan.placements),
        "operations": len(plan.problem.operations),
        "segments": len(plan.segments),
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "unshared_bytes": plan.unshared_bytes,
        "segment": [
            {
                "name": s.name,
                "groups": list(s.groups),
                "nbytes": s.nbytes,
                "lower_bound_bytes": s.lower_bound_bytes,
                "signal_pad": s.signal_pad,
            }
            for s in plan.segments
        ],
        "barriers": [
            {"before": b.before, "group": b.group, "buffers": list(b.buffers)}
            for b in plan.barriers
        ],
        "unplanned": [
            {"name": u.name, "op": u.op, "where": u.where, "reason": u.reason, "nbytes": u.nbytes}
            for u in plan.unplanned
        ],
    }
