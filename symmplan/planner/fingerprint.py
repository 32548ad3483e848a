"""Hashes that ranks compare: of the plan, or of the part that peers see.

[Note: fingerprint]
    SHA-256 of canonical JSON that holds the program (operations in canonical order with stream,
    group and facts; accesses; edges; constraints), the buffers (name, bytes,
    alignment, pin, flags) and the decisions (segments, placements, barriers).

    Process groups appear as numbers by first use, because the same program runs over differently
    named groups on different ranks of a mesh. Fields for people (op, stack, where, shape, label),
    tensors that were left out, and bounds and their proofs do not count, because they change no
    byte.

    The fingerprint of an unchanged program changes only when offsets, barriers or this note
    change; such a change raises ``SCHEME`` or is a *Plan format* entry in the change log.

[Note: what peers see]
    Ranks meet in the operations that have a group and in barriers, and they touch each other's
    bytes where an access is remote. Peers cannot see what a rank does alone between two meetings,
    and the rank's own plan keeps that apart from the peers' accesses. So two plans fit together if
    these are equal: the segments; the operations that meet or touch peers' bytes, in order; where
    the bytes lie that they touch; and the barriers between them.

    Names are numbers here. A graph that is compiled again has other names for its operations, and
    may have other operations of its own, as for a smaller batch or a size that became dynamic.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from attrs import evolve

from symmplan.model import Barrier, Operation, Plan, Problem
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["fingerprint", "visible"]

#: Raised when the content of the hash changes for the same plan.
SCHEME = 2
_END = Operation("end", op="symmplan::end")


def fingerprint(plan: Plan) -> str:
    """Hash of the canonical plan, 64 hexadecimal digits. See [Note: fingerprint]."""
    text = json.dumps(_content(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _content(plan: Plan) -> dict[str, Any]:
    problem = plan.problem
    index = order_of(problem).index
    buffers = sorted(problem.buffers, key=lambda b: b.name)
    operations = sorted(problem.operations, key=lambda o: index[o.name])
    label: dict[str | None, int] = {None: -1}
    named = [*(b.group for b in buffers), *(o.group for o in operations)]
    for group in [*named, *(g for s in plan.segments for g in s.groups)]:
        label.setdefault(group, len(label) - 1)
    shared = [sorted(label[g] for g in groups if g in label) for groups in problem.shared_groups]
    return {
        "scheme": SCHEME,
        "buffers": [
            [b.name, b.nbytes, label[b.group], b.align, b.offset, b.persistent, b.signal_pad]
            for b in buffers
        ],
        "operations": [
            [
                o.name,
                o.stream,
                label[o.group],
                [o.handshake, o.release, o.synchronizes],
                sorted(index[n] for n in o.ends),
            ]
            for o in operations
        ],
        "accesses": sorted(
            {
                (index[a.operation], a.buffer, a.write, a.remote, a.enters, a.releases)
                for a in problem.accesses
            }
        ),
        "edges": sorted({(index[a], index[b]) for a, b in problem.edges}),
        "together": sorted({tuple(sorted(p)) for p in problem.together}),
        "apart": sorted({tuple(sorted(p)) for p in problem.apart}),
        "shared_groups": sorted({tuple(s) for s in shared if len(s) > 1}),
        "segments": [
            [s.name, sorted(label[g] for g in s.groups), s.nbytes, s.signal_pad]
            for s in plan.segments
        ],
        "placements": [
            [name, p.segment, p.offset, p.nbytes] for name, p in sorted(plan.placements.items())
        ],
        "barriers": [
            [index[b.before], label[b.group], sorted(b.buffers)]
            for b in sorted(plan.barriers, key=lambda b: index[b.before])
        ],
    }


def visible(plan: Plan, barriers: Iterable[tuple[int, str]] | None = None) -> Plan:
    """A plan that has the fingerprint of what peers see of ``plan``. See [Note: what peers see].

    It is agreed on and realized in the plan's stead: the same segments, the same bytes. A plan that
    leaves operations unordered is returned as it is. ``barriers`` are ``(place, group)`` of those
    that are run, in order, the plan's own by default; a place is the number of operations before
    it.
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
