"""Where parameters live in a segment: at one address each, in bytes that no other lease has.

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
    in forward are neighbours in backward, these offsets nearly always suit all gathers. Where they
    do not, as behind an evaluation that leaves a module unsharded, modules are placed one by one
    (first fit): two are apart if any of their gathers have bytes at the same time.

[Note: room for one module more]
    What a program unshards outside of its training passes, in an evaluation or by hand, is no
    reason to hold the bytes of a whole model for good. A plan has room for such a gather if it then
    needs no more than the bytes of the largest module besides what it needs without all of these.
    A gather without room takes the bytes of modules that can leave, as FSDP2 would take memory.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from symmplan.errors import PlanningError
from symmplan.planner.items import conflicts_among, conflicts_of, items_of
from symmplan.planner.packing.greedy import first_fit, greedy_orders
from symmplan.planner.packing.task import task_of
from symmplan.planner.plan import plan as plan_problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from symmplan.model import Plan, Problem

__all__ = ["plan_with_parameters", "without_room"]


@frozen
class _Placed:
    """Where modules lie.

    Attributes:
        offsets: By the first gather of each its offset in bytes.
        nbytes: By group how many bytes of its segment they take.
        total: Bytes that they take of all segments.
    """

    offsets: Mapping[str, int]
    nbytes: Mapping[str, int]
    total: int


def plan_with_parameters(
    problem: Problem,
    parameters: frozenset[str],
    slots: frozenset[str] = frozenset(),
) -> Plan:
    """A plan in which some buffers get the first bytes of their segments, and few share these.

    Args:
        problem: What is to be planned; ``together`` names the ``parameters`` that share an offset,
            each with the first of them.
        parameters: Names of the buffers that are the parameters themselves.
        slots: Names of those that may have bytes of the parameters: nobody keeps them for longer
            than planned.
    """
    if not parameters:
        return plan_problem(problem)
    # Groups may share segments in another way when parts are planned apart: then none do.
    apart = evolve(problem, shared_groups=[])
    candidates = [problem] if problem == apart else [problem, apart]
    for one in candidates:
        with contextlib.suppress(PlanningError):
            return _pinned(one, parameters, slots)
    return plan_problem(problem)


def without_room(
    problem: Problem, parameters: frozenset[str], asked: Sequence[str]
) -> frozenset[str]:
    """Which of ``asked`` a plan has no room for. See [Note: room for one module more].

    Args:
        problem: As in `plan_with_parameters`.
        parameters: As there.
        asked: Names of parameters that were unsharded outside of training passes, in the order in
            which they get room.
    """

    def needed(names: frozenset[str]) -> int:
        return _placed(_only(problem, names), problem.together).total

    sizes = {b.name: b.nbytes for b in problem.buffers}
    taken = parameters - frozenset(asked)
    most = needed(taken) + max(sizes[name] for name in parameters)
    if needed(parameters) <= most:
        return frozenset()
    for name in asked:
        if needed(taken | {name}) <= most:
            taken |= {name}
    return parameters - taken


def _pinned(problem: Problem, parameters: frozenset[str], slots: frozenset[str]) -> Plan:
    """A plan in which each module's ``parameters`` lie at one offset.

    The others lie behind them, and ``slots`` wherever there is room then.

    Raises:
        PlanningError: Groups share segments in another way there.
    """
    first = {other: leader for leader, other in problem.together}
    others = plan_problem(
        _only(problem, frozenset(b.name for b in problem.buffers) - parameters - slots),
    )
    placed = _placed(_only(problem, parameters), problem.together)
    below = functools.partial(_below, others, placed.nbytes)
    pinned = []
    for b in problem.buffers:
        offset: int | None = None
        if b.name in parameters:
            offset = placed.offsets[first.get(b.name, b.name)]
        elif b.name not in slots:
            offset = others.placements[b.name].offset + below(b.name)
        pinned.append(evolve(b, offset=offset))
    # What is always in use is so beside the other gathers of its module.
    always = {first.get(b.name, b.name) for b in problem.buffers if b.persistent}
    together = [pair for pair in problem.together if pair[0] in always]
    return plan_problem(evolve(problem, buffers=pinned, together=together))


def _placed(own: Problem, together: Sequence[tuple[str, str]]) -> _Placed:
    """Where modules lie whose gathers are the buffers of a problem.

    See [Note: one offset, several live ranges].
    """
    leader = {other: first for first, other in together}
    site = {b.name: leader.get(b.name, b.name) for b in own.buffers}
    first: dict[str, str] = {}
    for name, of in site.items():
        first.setdefault(of, name)
    alone = plan_problem(_only(own, frozenset(first.values())))
    lies = {of: alone.placements[name] for of, name in first.items()}
    gathers = items_of(own)
    pairs = [(first[of], name) for name, of in site.items() if first[of] != name]
    modules = items_of(evolve(own, together=pairs))
    segment_of = [lies[site[names[0]]].segment for names in modules.members]
    offsets: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    total = 0
    for segment in alone.segments:
        here = np.flatnonzero([name == segment.name for name in segment_of])
        task = task_of(modules, here)
        sites = [site[modules.members[item][0]] for item in task.items.tolist()]
        place_of = {of: place for place, of in enumerate(sites)}
        mine = [place_of.get(site[names[0]], -1) for names in gathers.members]
        each = task_of(gathers, np.flatnonzero(np.asarray(mine) >= 0))
        a, b = (np.asarray(mine)[each.items[x]] for x in conflicts_of(each).pairs())
        offset = np.asarray([lies[of].offset // task.unit for of in sites], dtype=np.int64)
        end = offset + task.size
        if ((a != b) & (offset[a] < end[b]) & (offset[b] < end[a])).any():
            conflicts = conflicts_among(len(task), a, b)
            orders = [np.argsort(offset, kind="stable"), *greedy_orders(task, conflicts)]
            found = [first_fit(task, conflicts, order) for order in orders]
            offset = min(found, key=lambda offset: int((offset + task.size).max()))
        top = int((offset + task.size).max()) * task.unit
        offsets |= zip(sites, (offset * task.unit).tolist(), strict=True)
        nbytes |= dict.fromkeys(segment.groups, top)
        total += top
    return _Placed(offsets, nbytes, total)


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
