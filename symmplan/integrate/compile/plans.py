"""Plans of graphs that share segments, and what one part leaves there for another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from symmplan.model import Placement, Plan


@frozen
class Given:
    """An input of a backward that its forward left in a placement.

    Attributes:
        index: Which input.
        place: Where its buffer lies.
        offset: Where it begins in its buffer, in elements.
        needed: An op of the backward, or its CUDA graph, needs it there.
        overwritten: The backward overwrites the bytes.
    """

    index: int
    place: Placement
    offset: int
    needed: bool
    overwritten: bool


def overlap(a: Placement, b: Placement) -> bool:
    """Whether two placements have a byte in common."""
    return a.segment == b.segment and a.offset < b.end and b.offset < a.end


def structure_of(plan: Plan) -> Any:
    """The facts that are equal for plans that share segments."""
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
