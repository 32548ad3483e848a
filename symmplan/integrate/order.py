"""Keep the order that the plan counts on: barriers between ranks, fences between inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmplan.capture.graphs import called, written_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

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
    ends = _ends(emitter, captured, keys)
    crossing = _crossings(emitter, captured, keys, ends)
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
    for operation, covered in _updates(emitter, captured, ends).items():
        emitter.fence(by_name[operation], covered)
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
    emitter: Emitter,
    captured: Captured,
    keys: Mapping[str, SegmentInput],
    ends: Mapping[str, set[SegmentInput]],
) -> dict[str, set[SegmentInput]]:
    """``{operation: inputs}``: what first touches bytes that were in use through other inputs."""
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
            old, new = sorted((other, buffer), key=lambda b: rank[first[b]])
            together = {keys[old], keys[new], *ends.get(old, ())}
            if len(together) > 1:
                found.setdefault(first[new], set()).update(together)
        active.append((buffer, place))
    # What writes a buffer itself once more, after asynchronous work on it has ended.
    waits = _wait_names(captured)
    ended = {(a.buffer, rank[a.operation]) for a in problem.accesses if a.operation in waits}
    for buffer, end in ended:
        later = (
            rank[a.operation]
            for a in problem.accesses
            if a.buffer == buffer and a.write and rank[a.operation] > end
        )
        at = min(later, default=None)
        if at is not None and not ends[buffer] <= {keys[buffer]}:
            name = problem.operations[at].name
            found.setdefault(name, set()).update({keys[buffer], *ends[buffer]})
    return found


def _ends(
    emitter: Emitter, captured: Captured, keys: Mapping[str, SegmentInput]
) -> dict[str, set[SegmentInput]]:
    """``{buffer: lanes}``: what is waited for where asynchronous work on the buffer ends.

    To Inductor, the wait for a collective touches what the collective writes. Nothing else says
    that until then what it reads is in use, too.
    """
    waits = _wait_names(captured)
    problems = [p for p in (captured.problem, captured.residence) if p is not None]
    held: dict[str, list[str]] = {}
    for access in (a for p in problems for a in p.accesses if a.operation in waits):
        held.setdefault(access.operation, []).append(access.buffer)
    found: dict[str, set[SegmentInput]] = {}
    for buffers in held.values():
        lanes = {keys[b] for b in buffers if b in emitter.lanes}
        for buffer in buffers:
            found.setdefault(buffer, set()).update(lanes)
    return found


def _wait_names(captured: Captured) -> set[str]:
    return {captured.prefix + w.name for ends in captured.waits.values() for w in ends.values()}


def _updates(
    emitter: Emitter, captured: Captured, ends: Mapping[str, set[SegmentInput]]
) -> dict[str, list[fx.Node]]:
    """``{operation: inputs}``: what writes kept inputs that asynchronous work has read."""
    found: dict[str, list[fx.Node]] = {}
    for kept in captured.kept:
        lanes = ends.get(captured.prefix + kept.node.name)
        if captured.residence is None or not lanes:
            continue
        for user in kept.node.users:
            if kept.node in written_nodes(called(user), user):
                nodes = found.setdefault(captured.prefix + user.name, [])
                nodes += [kept.node, *(n for k, n in emitter.inputs.items() if k in lanes)]
    return found
