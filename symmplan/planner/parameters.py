"""Where parameters live in a segment: at one address each, in bytes that nobody else leases.

[Note: bytes of the parameters]
    A gather that fills parameters themselves cannot give way to somebody who keeps a buffer for
    longer than planned: its address is fixed, and in use until its module is done. A rank may
    keep a buffer that its peers do not, so it could not even fail alone. Therefore parameters get
    the first bytes of a segment to themselves, and FSDP2's buffers, which can be staged, the rest.
    Where layers are alike this costs nothing: at the peak, in backward, both are needed together.

[Note: one offset, several live ranges]
    To the planner buffers that must share their offset are one buffer from the first access of any
    to the last of all; but between forward and backward a module's bytes are free for others. So
    the offsets are found with the first gather of each module alone, in forward; since neighbours
    in forward are neighbours in backward, these offsets nearly always suit all gathers. The
    planner is then given them as pins, and refuses if they do not.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Literal

from attrs import evolve

from symmplan.errors import PlanningError
from symmplan.planner.plan import plan as plan_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from symmplan.model import Plan, Problem

__all__ = ["plan_with_parameters"]


def plan_with_parameters(
    problem: Problem,
    parameters: frozenset[str],
    effort: Literal["fast", "optimal"],
    slots: frozenset[str] = frozenset(),
) -> Plan:
    """A plan in which some buffers get the first bytes of their segments, and few share these.

    Args:
        problem: What is to be planned; ``together`` names the ``parameters`` that share an offset,
            each with the first of them.
        parameters: Names of the buffers that are the parameters themselves.
        effort: How hard the planner tries.
        slots: Names of those that may have bytes of the parameters: nobody keeps them for longer
            than planned.
    """
    if not parameters:
        return plan_problem(problem, effort=effort)
    # Groups may share segments in another way when parts are planned apart: then none do.
    apart = evolve(problem, shared_groups=[])
    asked = [problem] if problem == apart else [problem, apart]
    # If gathers overlap in another way later, each module has its bytes from its first to its last.
    for whole in (False, True):
        for one in asked:
            with contextlib.suppress(PlanningError):
                return _pinned(one, parameters, slots, effort, whole=whole)
    return plan_problem(problem, effort=effort)


def _pinned(
    problem: Problem,
    parameters: frozenset[str],
    slots: frozenset[str],
    effort: Literal["fast", "optimal"],
    *,
    whole: bool,
) -> Plan:
    """A plan in which each of ``parameters`` lies where the first of its module fits.

    The others lie behind them, and ``slots`` wherever there is room then.

    Raises:
        PlanningError: Some of them overlap there; not if ``whole``, where all of a module's count.
    """
    first = {other: leader for leader, other in problem.together}
    others = plan_problem(
        _only(problem, frozenset(b.name for b in problem.buffers) - parameters - slots),
        effort=effort,
    )
    own = _only(problem, parameters if whole else parameters - first.keys())
    leaders = plan_problem(evolve(own, together=problem.together if whole else []), effort=effort)
    above = {g: spec.nbytes for spec in leaders.segments for g in spec.groups}
    below = functools.partial(_below, others, above)
    pinned = []
    for b in problem.buffers:
        offset: int | None = None
        if b.name in parameters:
            offset = leaders.placements[first.get(b.name, b.name)].offset
        elif b.name not in slots:
            offset = others.placements[b.name].offset + below(b.name)
        pinned.append(evolve(b, offset=offset))
    return plan_problem(evolve(problem, buffers=pinned, together=[]), effort=effort)


def _below(others: Plan, parameters: Mapping[str, int], name: str) -> int:
    """How many bytes of its segment the parameters have."""
    segment = others.placements[name].segment
    groups = next(s.groups for s in others.segments if s.name == segment)
    return max(parameters.get(group, 0) for group in groups)


def _only(problem: Problem, names: frozenset[str]) -> Problem:
    return evolve(
        problem,
        buffers=[b for b in problem.buffers if b.name in names],
        accesses=[a for a in problem.accesses if a.buffer in names],
        together=[],
        unplanned=[],
    )
