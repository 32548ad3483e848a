"""What peers can see of a plan: ranks whose plans show the same fit together.

[Note: what peers see]
    Ranks meet in the operations that have a group and in barriers, and they touch each other's
    bytes where an access is remote. What a rank does on its own between two meetings no peer can
    see, and its own plan keeps that clear of what peers do. So two plans fit together if these are
    equal: the segments; the operations that meet or touch peers' bytes, in order; where the bytes
    lie that they touch; and the barriers between them.

    Names are numbers here. A graph that is compiled again calls its operations something else, and
    may do its own work in others: for a smaller batch, for a size that became dynamic.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from attrs import evolve

from symmplan.model import Barrier, Operation, Plan, Problem
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["visible"]

_END = Operation("end", op="symmplan::end")


def visible(plan: Plan, barriers: Iterable[tuple[int, str]] | None = None) -> Plan:
    """A plan that has the fingerprint of what peers see of ``plan``. See [Note: what peers see].

    Args:
        plan: The plan. One that leaves operations unordered is returned as it is.
        barriers: ``(place, group)`` of the barriers that are run, in order; the plan's own by
            default. A place is the number of operations before it.

    Returns:
        What is to be agreed on and realized in its stead: the same segments, the same bytes.
    """
    problem, placements = plan.problem, plan.placements
    order = order_of(problem)
    if order.chains != 1:
        return plan
    if barriers is None:
        barriers = [(order.index[b.before], b.group) for b in plan.barriers]
    remote = [a for a in problem.accesses if a.remote]
    reaching = {a.operation for a in remote}
    shown = [
        o
        for o in sorted(problem.operations, key=lambda o: order.index[o.name])
        if o.name in reaching or o.group is not None or o.ends
    ]
    new = {o.name: f"operation {i}" for i, o in enumerate(shown)}
    touched = {a.buffer for a in remote}
    accesses = [a for a in problem.accesses if a.operation in new and a.buffer in touched]
    first: dict[str, int] = {}
    for a in sorted(accesses, key=lambda a: order.index[a.operation]):
        first.setdefault(a.buffer, order.index[a.operation])
    ranked = sorted(first, key=lambda b: (first[b], placements[b].segment, placements[b].offset))
    called = {b: f"buffer {i}" for i, b in enumerate(ranked)}
    buffers = {b.name: b for b in problem.buffers}
    places = [order.index[o.name] for o in shown]
    names = [*new.values(), _END.name]
    return Plan(
        problem=Problem(
            buffers=[evolve(buffers[b], name=called[b], offset=None) for b in ranked],
            operations=[*(_renamed(o, new) for o in shown), _END],
            accesses=[
                evolve(a, operation=new[a.operation], buffer=called[a.buffer]) for a in accesses
            ],
            shared_groups=problem.shared_groups,
        ),
        segments=tuple(evolve(s, lower_bound_bytes=0, witness=()) for s in plan.segments),
        placements={called[b]: placements[b] for b in ranked},
        barriers=tuple(Barrier(names[bisect_left(places, at)], g) for at, g in barriers),
    )


def _renamed(operation: Operation, new: Mapping[str, str]) -> Operation:
    ends = tuple(new[name] for name in operation.ends if name in new)
    return evolve(operation, name=new[operation.name], stream="main", ends=ends)
