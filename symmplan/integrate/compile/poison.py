"""Debugging: overwrite every placement when its buffer dies, so that a late reader shows.

Overwriting is an access like any other: peers may own the bytes by then. So it is written into the
problem before it is planned, and the plan keeps it apart from what follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve

from symmplan.capture.sites import Step
from symmplan.model import Access, Operation

if TYPE_CHECKING:
    from torch import fx

    from symmplan.capture.sites import Captured
    from symmplan.integrate.compile.emit import Emitter

__all__ = ["plan_poison", "poison"]

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


def poison(emitter: Emitter, captured: Captured) -> None:
    """Insert the overwriting that `plan_poison` planned.

    Args:
        emitter: Its graph has been rewritten, and its order not yet been kept.
        captured: The graph's decisions.
    """
    problem = captured.problem
    buffers = {b.name: b for b in problem.buffers}
    at = next(n for n in emitter.graph.nodes if n.op == "output")
    by_name = {captured.prefix + n.name: n for n in emitter.graph.nodes}
    last: fx.Node | None = None  # the node of the operation before each
    before: dict[str, fx.Node | None] = {}
    for operation in problem.operations:
        before[operation.name] = last
        last = emitter.first.get(operation.name) or by_name.get(operation.name) or last
    for operation in reversed(problem.operations):
        step = captured.steps[operation.name]
        if step.kind in ("given", "saved"):
            continue  # the ends of the graph
        if step.kind != "poison":
            at = emitter.first.get(operation.name) or by_name[operation.name]
            continue
        buffer = buffers[step.buffer]
        dtype = getattr(torch, buffer.dtype)
        like = torch.empty(buffer.nbytes // dtype.itemsize, dtype=dtype, device="meta")
        emitter.origin = before[operation.name]
        with emitter.graph.inserting_before(at):
            view = emitter.view(buffer.name, like)
            at = emitter.call(torch.ops.symmplan.poison_.default, (view,))
        emitter.first[operation.name] = at
    emitter.origin = None
