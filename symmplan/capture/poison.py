"""Debugging: overwrite every placement when its buffer dies, so that a late reader shows.

Overwriting is an access like any other: peers may own the bytes by then. So it is written into the
problem before it is planned, and the plan keeps it apart from what follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from symmplan.capture.sites import Step
from symmplan.model import Access, Operation

if TYPE_CHECKING:
    from symmplan.capture.sites import Captured

__all__ = ["plan_poison"]

_OP = "symmplan::poison_"


def plan_poison(captured: Captured) -> Captured:
    """The same program, with an operation that overwrites each buffer behind its last access.

    Buffers that are used on several streams are left alone: one use may not be behind all others.
    So are those that a forward saves, which die elsewhere.
    """
    problem, steps = captured.problem, dict(captured.steps)
    saves = {name for name, step in steps.items() if step.kind == "saved"}
    saved = {a.buffer for a in problem.accesses if a.operation in saves}
    rank = {o.name: i for i, o in enumerate(problem.operations)}
    stream = {o.name: o.stream for o in problem.operations}
    last: dict[str, int] = {}
    streams: dict[str, set[str]] = {}
    for access in problem.accesses:
        last[access.buffer] = max(last.get(access.buffer, 0), rank[access.operation])
        streams.setdefault(access.buffer, set()).add(stream[access.operation])
    dying: dict[int, list[str]] = {}
    for buffer in problem.buffers:
        if buffer.name in saved or len(streams[buffer.name]) > 1:
            continue
        dying.setdefault(last[buffer.name], []).append(buffer.name)
    operations = []
    accesses = list(problem.accesses)
    for i, operation in enumerate(problem.operations):
        operations.append(operation)
        for name in dying.get(i, ()):
            dead = Operation(f"{name}:dead", stream=operation.stream, op=_OP)
            operations.append(dead)
            accesses.append(Access(dead.name, name, write=True))
            steps[dead.name] = Step("poison", buffer=name)
    problem = evolve(problem, operations=operations, accesses=accesses)
    return evolve(captured, problem=problem, steps=steps)
