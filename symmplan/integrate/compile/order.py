"""Keep the order that the plan counts on: barriers between ranks, fences between inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmplan.capture.graphs import called, written_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from symmplan.capture.sites import Captured
    from symmplan.integrate.compile.emit import Emitter, SegmentInput
    from symmplan.model import Placement
    from symmplan.place.program import PlacedProgram

__all__ = ["keep_order"]


def keep_order(emitter: Emitter, program: PlacedProgram) -> None:
    """Insert the program's barriers, and the fences. See [Note: fences].

    Args:
        emitter: Its graph has been rewritten but for this.
        program: What it follows.
    """
    captured = program.captured
    by_name = {captured.prefix + n.name: n for n in emitter.graph.nodes}
    keys = {b.name: _reached(emitter, b.name) for b in captured.problem.buffers}
    ends = _ends(emitter, captured, keys)
    crossing = _crossings(emitter, captured, keys, ends)
    written: dict[str, set[SegmentInput | str]] = {}
    for access in captured.problem.accesses:
        if access.write:
            written.setdefault(access.operation, set()).update(keys[access.buffer])
            if len(keys[access.buffer]) > 1:
                crossing.setdefault(access.operation, set()).update(keys[access.buffer])
    for operation in sorted({*crossing, *written}):
        at = emitter.first.get(operation) or by_name[operation]
        together = crossing.get(operation, set())
        if together:
            covered = [nodes for key, nodes in emitter.nodes.items() if key in together]
            emitter.fence(at, [node for nodes in covered for node in nodes])
        for key, nodes in emitter.nodes.items():
            if key in written.get(operation, ()) and key not in together:
                emitter.fence(at, nodes)
    for operation, nodes in _updates(emitter, captured, ends).items():
        emitter.fence(by_name[operation], nodes)
    edges = {
        "given": emitter.begin,
        "saved": next(n for n in emitter.graph.nodes if n.op == "output"),
    }
    for instruction in program.instructions:
        if instruction.kind != "barrier":
            continue
        before, group = instruction.operation, instruction.group
        at = edges.get(instruction.step.kind) or emitter.first.get(before) or by_name[before]
        node = _of_group(emitter, captured, group)
        everything = [n for nodes in emitter.nodes.values() for n in nodes]
        everything += [k.node for k in captured.kept]
        emitter.fence(at, everything)
        with emitter.graph.inserting_before(at):
            emitter.call(torch.ops.symmplan.barrier_.default, (node, group))
        emitter.fence(at, everything)


def _reached(emitter: Emitter, buffer: str) -> tuple[SegmentInput | str, ...]:
    """Through which inputs a buffer is read and written."""
    reached = emitter.reach(buffer)
    if isinstance(reached, str):  # poison reaches it through the segment
        dtype = next(b.dtype for b in emitter.plan.problem.buffers if b.name == buffer)
        key = emitter.key(buffer, getattr(torch, dtype))
        return (reached, key) if key in emitter.inputs else (reached,)
    return (reached,)


def _of_group(emitter: Emitter, captured: Captured, group: str) -> fx.Node:
    """An input that lies in symmetric memory of a group."""
    named = {s.name for s in emitter.plan.segments if group in s.groups}
    for key, node in emitter.inputs.items():
        if key.segment in named:
            return node
    for kept in captured.kept:
        if kept.group == group:
            return kept.node
    buffers = captured.problem.buffers
    buffer = next(b for b in buffers if emitter.plan.placements[b.name].segment in named)
    return emitter.input(emitter.key(buffer.name, getattr(torch, buffer.dtype)))


def _crossings(
    emitter: Emitter,
    captured: Captured,
    keys: Mapping[str, tuple[SegmentInput | str, ...]],
    ends: Mapping[str, set[SegmentInput | str]],
) -> dict[str, set[SegmentInput | str]]:
    """``{operation: inputs}``: what first touches bytes that were in use through other inputs."""
    problem = captured.problem
    first: dict[str, str] = {}
    rank = {o.name: i for i, o in enumerate(problem.operations)}
    for access in sorted(problem.accesses, key=lambda a: rank[a.operation]):
        first.setdefault(access.buffer, access.operation)
    places = [(b.name, emitter.plan.placements[b.name]) for b in problem.buffers]
    places.sort(key=lambda item: (item[1].segment, item[1].offset, item[0]))
    found: dict[str, set[SegmentInput | str]] = {}
    active: list[tuple[str, Placement]] = []
    for buffer, place in places:
        active = [(b, p) for b, p in active if p.segment == place.segment and p.end > place.offset]
        for other, _ in active:
            old, new = sorted((other, buffer), key=lambda b: rank[first[b]])
            together = {*keys[old], *keys[new], *ends.get(old, ())}
            # What was given is first touched where the graph begins.
            if len(together) > 1 and new not in emitter.given:
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
        if at is not None and not ends[buffer] <= {*keys[buffer]}:
            name = problem.operations[at].name
            found.setdefault(name, set()).update({*keys[buffer], *ends[buffer]})
    return found


def _ends(
    emitter: Emitter, captured: Captured, keys: Mapping[str, tuple[SegmentInput | str, ...]]
) -> dict[str, set[SegmentInput | str]]:
    """``{buffer: lanes}``: what is waited for where asynchronous work on the buffer ends.

    To Inductor, the wait for a collective touches what the collective writes. Nothing else says
    that until then what it reads is in use, too.
    """
    waits = _wait_names(captured)
    problems = [p for p in (captured.problem, captured.residence) if p is not None]
    held: dict[str, list[str]] = {}
    for access in (a for p in problems for a in p.accesses if a.operation in waits):
        held.setdefault(access.operation, []).append(access.buffer)
    found: dict[str, set[SegmentInput | str]] = {}
    for buffers in held.values():
        lanes = {key for b in buffers if b in emitter.lanes for key in keys[b]}
        for buffer in buffers:
            found.setdefault(buffer, set()).update(lanes)
    return found


def _wait_names(captured: Captured) -> set[str]:
    return {captured.prefix + w.name for ends in captured.waits.values() for w in ends.values()}


def _updates(
    emitter: Emitter, captured: Captured, ends: Mapping[str, set[SegmentInput | str]]
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
