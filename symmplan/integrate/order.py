"""Keep the order that the plan counts on: barriers between ranks, fences between inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from symmplan.capture.sites import Captured
    from symmplan.integrate.emit import Emitter, SegmentInput
    from symmplan.model import Placement

__all__ = ["keep_order"]


def keep_order(emitter: Emitter, captured: Captured, barriers: Sequence[tuple[str, str]]) -> None:
    """Insert the plan's barriers, and the fences. See [Note: fences].

    Args:
        emitter: Its graph has been rewritten but for this.
        captured: The graph's decisions.
        barriers: ``(operation, group)`` of each barrier to be run right before an operation.
    """
    by_name = {captured.prefix + n.name: n for n in emitter.graph.nodes}
    mine = {o.name for o in captured.problem.operations}
    keys = {b.name: emitter.key(b.name, getattr(torch, b.dtype)) for b in captured.problem.buffers}
    crossing = _crossings(emitter, captured, keys)
    written: dict[str, set[SegmentInput]] = {}
    for access in captured.problem.accesses:
        if access.write:
            written.setdefault(access.operation, set()).add(keys[access.buffer])
    for operation in sorted({*crossing, *written}):
        at = emitter.first.get(operation) or by_name[operation]
        together = crossing.get(operation, set())
        if together:
            emitter.fence(at, [node for key, node in emitter.inputs.items() if key in together])
        for key, node in emitter.inputs.items():
            if key in written.get(operation, ()) and key not in together:
                emitter.fence(at, [node])
    if captured.residence is not None:
        mine.update(o.name for o in captured.residence.operations)
    for before, group in barriers:
        if before not in mine:
            continue
        at = emitter.first.get(before) or by_name[before]
        named = {s.name for s in emitter.plan.segments if group in s.groups}
        inputs = [n for key, n in emitter.inputs.items() if key.segment in named]
        inputs += [k.node for k in captured.kept if k.group == group]
        covered = [*emitter.inputs.values(), *(k.node for k in captured.kept)]
        emitter.fence(at, covered)
        with emitter.graph.inserting_before(at):
            emitter.call(torch.ops.symmplan.barrier_.default, (inputs[0], group))
        emitter.fence(at, covered)


def _crossings(
    emitter: Emitter, captured: Captured, keys: Mapping[str, SegmentInput]
) -> dict[str, set[SegmentInput]]:
    """``{operation: inputs}``: what first touches bytes that another input had before."""
    problem = captured.problem
    first: dict[str, str] = {}
    rank = {o.name: i for i, o in enumerate(problem.operations)}
    for access in sorted(problem.accesses, key=lambda a: rank[a.operation]):
        first.setdefault(access.buffer, access.operation)
    places = [(b.name, emitter.plan.placements[b.name]) for b in problem.buffers]
    places.sort(key=lambda item: (item[1].segment, item[1].offset, item[0]))
    found: dict[str, set[SegmentInput]] = {}
    active: list[tuple[str, Placement]] = []
    for buffer, place in places:
        active = [(b, p) for b, p in active if p.segment == place.segment and p.end > place.offset]
        for other, _ in active:
            if keys[other] != keys[buffer]:
                for name in (other, buffer):
                    found.setdefault(first[name], set()).update((keys[other], keys[buffer]))
        active.append((buffer, place))
    return found
