"""Keep the order that the plan counts on: barriers between ranks, fences between dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

    from symmplan.capture.sites import Captured
    from symmplan.integrate.emit import Emitter

__all__ = ["keep_order"]


def keep_order(emitter: Emitter, captured: Captured, barriers: Sequence[tuple[str, str]]) -> None:
    """Insert the plan's barriers, and the fences between dtypes. See [Note: fences].

    Args:
        emitter: Its graph has been rewritten but for this.
        captured: The graph's decisions.
        barriers: ``(operation, group)`` of each barrier to be run right before an operation.
    """
    by_name = {captured.prefix + n.name: n for n in emitter.graph.nodes}
    mine = {o.name for o in captured.problem.operations}
    crossing = _passes_between_dtypes(emitter, captured)
    for operation in sorted({a.operation for a in captured.problem.accesses if a.write}):
        at = emitter.first.get(operation) or by_name[operation]
        written = None if operation in crossing else _written_inputs(emitter, captured, operation)
        emitter.fence(at, written)
    for before, group in barriers:
        if before not in mine:
            continue
        at = emitter.first.get(before) or by_name[before]
        named = {s.name for s in emitter.plan.segments if group in s.groups}
        node = next(n for key, n in emitter.inputs.items() if key.segment in named)
        emitter.fence(at)
        with emitter.graph.inserting_before(at):
            emitter.call(torch.ops.symmplan.barrier_.default, (node, group))
        emitter.fence(at)


def _written_inputs(emitter: Emitter, captured: Captured, operation: str) -> list[fx.Node]:
    """The segment inputs through which an operation writes."""
    dtypes = {b.name: b.dtype for b in captured.problem.buffers}
    wanted = {
        (emitter.plan.placements[a.buffer].segment, dtypes[a.buffer])
        for a in captured.problem.accesses
        if a.operation == operation and a.write
    }
    return [
        node
        for key, node in emitter.inputs.items()
        if (key.segment, str(key.dtype).removeprefix("torch.")) in wanted
    ]


def _passes_between_dtypes(emitter: Emitter, captured: Captured) -> set[str]:
    """Operations that first touch a buffer whose bytes another dtype had."""
    problem = captured.problem
    first: dict[str, str] = {}
    rank = {o.name: i for i, o in enumerate(problem.operations)}
    for access in sorted(problem.accesses, key=lambda a: rank[a.operation]):
        first.setdefault(access.buffer, access.operation)
    places = [(b, emitter.plan.placements[b.name]) for b in problem.buffers]
    places.sort(key=lambda item: (item[1].segment, item[1].offset, item[0].name))
    found: set[str] = set()
    active: list[tuple[Any, Any]] = []
    for buffer, place in places:
        active = [(b, p) for b, p in active if p.segment == place.segment and p.end > place.offset]
        for other, _ in active:
            if other.dtype != buffer.dtype:
                found |= {first[other.name], first[buffer.name]}
        active.append((buffer, place))
    return found
