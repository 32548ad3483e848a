"""What of a plan matters to others that share its segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symmplan.model import Plan

__all__ = ["group_names", "is_unmet", "structure_of"]


def structure_of(plan: Plan) -> Any:
    """What plans that share segments have in common."""
    return tuple((s.name, s.groups, s.signal_pad) for s in plan.segments)


def group_names(plan: Plan) -> list[str]:
    """Names of the groups that a plan's segments meet."""
    return [group for spec in plan.segments for group in spec.groups]


def is_unmet(plan: Plan) -> bool:
    """Whether peers touch a rank's bytes before it starts the operation, or after it has ended."""
    operations = {o.name: o for o in plan.problem.operations}
    found = ((operations[a.operation], a) for a in plan.problem.accesses if a.remote)
    return any(
        not (o.handshake or a.enters) or not (o.release or a.releases)
        for o, a in found
        if not o.ends
    )
