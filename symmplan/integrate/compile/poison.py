"""Debugging: the graph overwrites every placement whose buffer has died."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import fx

    from symmplan.capture.sites import Captured
    from symmplan.integrate.compile.emit import Emitter

__all__ = ["poison"]


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
            emitter.doing(operation.name)
            at = emitter.call(torch.ops.symmplan.poison_.default, (view,))
    emitter.origin = None
