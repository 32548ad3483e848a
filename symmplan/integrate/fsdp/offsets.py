"""Where parameters live in a segment: at one address each, in bytes that are lent to nobody else.

[Note: bytes of the parameters]
    A gather that fills parameters themselves cannot give way to somebody who keeps a buffer for
    longer than planned: its address is fixed, and in use until its module is done. A rank may
    keep a buffer that its peers do not, so it could not even fail alone. Therefore parameters get
    the first bytes of a segment to themselves, and FSDP2's buffers, which can be staged, the rest.
    Where layers are alike this costs nothing: at the peak, in backward, both are needed at once.

[Note: one offset, several live ranges]
    To the planner buffers that must share their offset are one buffer from the first access of any
    to the last of all; but between forward and backward a module's bytes are free for others. So
    the offsets are found with the first gather of each module alone, in forward; since neighbours
    in forward are neighbours in backward, these offsets nearly always suit all gathers. The
    planner is then given them as pins, and refuses if they do not.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

from attrs import evolve

from symmplan.errors import PlanningError
from symmplan.planner import plan as plan_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from symmplan.model import Plan, Problem

__all__ = ["plan_with_homes"]


def plan_with_homes(
    problem: Problem, homes: frozenset[str], effort: Literal["fast", "optimal"]
) -> Plan:
    """A plan in which some buffers get the first bytes of their segments to themselves.

    Args:
        problem: What is to be planned; ``together`` names the ``homes`` that share an offset, each
            with the first of them.
        homes: Names of the buffers that are the parameters themselves.
        effort: How hard the planner tries.
    """
    if not homes:
        return plan_problem(problem, effort=effort)
    first = {other: leader for leader, other in problem.together}
    names = frozenset(b.name for b in problem.buffers)
    others = plan_problem(_only(problem, names - homes), effort=effort)
    whole = evolve(_only(problem, homes), together=problem.together)
    # If gathers overlap in another way later, each module has its bytes from its first to its last.
    for own in (_only(problem, homes - first.keys()), whole):
        leaders = plan_problem(own, effort=effort)
        above = {g: spec.nbytes for spec in leaders.segments for g in spec.groups}
        below = functools.partial(_below, others, above)
        pinned = []
        for b in problem.buffers:
            if b.name in homes:
                offset = leaders.placements[first.get(b.name, b.name)].offset
            else:
                offset = others.placements[b.name].offset + below(b.name)
            pinned.append(evolve(b, offset=offset))
        try:
            return plan_problem(evolve(problem, buffers=pinned, together=[]), effort=effort)
        except PlanningError:
            continue
    # Groups that share segments in another way when they are planned apart.
    return plan_problem(problem, effort=effort)


def _below(others: Plan, homes: Mapping[str, int], name: str) -> int:
    """How many bytes of its segment the parameters have."""
    segment = others.placements[name].segment
    groups = next(s.groups for s in others.segments if s.name == segment)
    return max(homes.get(group, 0) for group in groups)


def _only(problem: Problem, names: frozenset[str]) -> Problem:
    return evolve(
        problem,
        buffers=[b for b in problem.buffers if b.name in names],
        accesses=[a for a in problem.accesses if a.buffer in names],
        together=[],
        unplanned=[],
    )
