"""What stands between a rewritten graph's operations: barriers, fences, poison."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from symmplan.capture.graphs import called, written_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from symmplan.capture.sites import Captured
    from symmplan.integrate.compile.emit import Emitter, SegmentInput
    from symmplan.model import Placement

#: Inputs through which segments are reached, as `Emitter.reach` names them.
Inputs: TypeAlias = "set[SegmentInput | str]"


def poison(emitter: Emitter) -> None:
    """For debugging, insert the overwriting of dead placements that `plan_poison` planned."""
    problem, steps = emitter.captured.problem, emitter.captured.steps
    buffers = {b.name: b for b in problem.buffers}
    nodes = emitter.operations
    at = emitter.graph.output_node()
    last: fx.Node | None = None  # the node of the operation before each
    before: dict[str, fx.Node | None] = {}
    for operation in problem.operations:
        before[operation.name] = last
        last = nodes.get(operation.name, last)
    for operation in reversed(problem.operations):
        step = steps[operation.name]
        if step.kind in ("given", "saved"):
            continue  # the ends of the graph
        if step.kind != "poison":
            at = nodes[operation.name]
            continue
        buffer = buffers[step.buffer]
        dtype = getattr(torch, buffer.dtype)
        like = torch.empty(buffer.nbytes // dtype.itemsize, dtype=dtype, device="meta")
        emitter.origin = before[operation.name]
        with emitter.graph.inserting_before(at):
            view = emitter.placement(buffer.name, like)
            emitter.doing(operation.name)
            at = emitter.add(torch.ops.symmplan.poison_.default, (view,))
    emitter.origin = None


def keep_order(emitter: Emitter) -> None:
    """Insert the program's barriers, and the fences, behind all else. See [Note: fences]."""
    captured, nodes = emitter.captured, emitter.operations
    reached = {b.name: {*emitter.reach(b.name)} for b in captured.problem.buffers}
    ends = _ends(emitter, reached)
    crossing = _crossings(emitter, reached, ends)
    written: dict[str, Inputs] = {}
    for access in captured.problem.accesses:
        if access.write:
            inputs = reached[access.buffer]
            written.setdefault(access.operation, set()).update(inputs)
            if len(inputs) > 1:
                crossing.setdefault(access.operation, set()).update(inputs)
    for operation in sorted({*crossing, *written}):
        together = crossing.get(operation, set())
        if together:
            emitter.fence(nodes[operation], _nodes(emitter, together))
        for key, alone in emitter.nodes.items():
            if key in written.get(operation, ()) and key not in together:
                emitter.fence(nodes[operation], alone)
    for operation, covered in _updates(emitter, ends).items():
        emitter.fence(nodes[operation], covered)
    edges = {"given": emitter.begin, "saved": emitter.graph.output_node()}
    for barrier in emitter.program.barriers:
        step, group = captured.steps.get(barrier.before), barrier.group
        at = edges.get("" if step is None else step.kind) or nodes[barrier.before]
        node = _of_group(emitter, group)
        everything = [*_nodes(emitter, {*emitter.nodes}), *(k.node for k in captured.kept)]
        emitter.fence(at, everything)
        with emitter.graph.inserting_before(at):
            emitter.add(torch.ops.symmplan.barrier_.default, (node, group))
        emitter.fence(at, everything)


def _nodes(emitter: Emitter, inputs: Inputs) -> list[fx.Node]:
    return [node for key, nodes in emitter.nodes.items() if key in inputs for node in nodes]


def _of_group(emitter: Emitter, group: str) -> fx.Node:
    """An input that lies in symmetric memory of a group."""
    plan, captured = emitter.program.plan, emitter.captured
    named = {s.name for s in plan.segments if group in s.groups}
    inputs = [node for key, node in emitter.inputs.items() if key.segment in named]
    inputs += [kept.node for kept in captured.kept if kept.group == group]
    if inputs:
        return inputs[0]
    names = (b.name for b in captured.problem.buffers)
    buffer = next(name for name in names if plan.placements[name].segment in named)
    return emitter.input(emitter.key(buffer))


def _crossings(
    emitter: Emitter, reached: Mapping[str, Inputs], ends: Mapping[str, Inputs]
) -> dict[str, Inputs]:
    """``{operation: inputs}``: what first touches bytes that were in use through other inputs."""
    problem, placements = emitter.captured.problem, emitter.program.plan.placements
    first: dict[str, str] = {}
    rank = {o.name: i for i, o in enumerate(problem.operations)}
    for access in sorted(problem.accesses, key=lambda a: rank[a.operation]):
        first.setdefault(access.buffer, access.operation)
    places = [(b.name, placements[b.name]) for b in problem.buffers]
    places.sort(key=lambda item: (item[1].segment, item[1].offset, item[0]))
    found: dict[str, Inputs] = {}
    active: list[tuple[str, Placement]] = []
    for buffer, place in places:
        active = [(b, p) for b, p in active if p.segment == place.segment and p.end > place.offset]
        for other, _ in active:
            old, new = sorted((other, buffer), key=lambda b: rank[first[b]])
            together = reached[old] | reached[new] | ends.get(old, set())
            # What was given is first touched where the graph begins.
            if len(together) > 1 and new not in emitter.given:
                found.setdefault(first[new], set()).update(together)
        active.append((buffer, place))
    # What writes a buffer itself once more, after asynchronous work on it has ended.
    waits = _wait_names(emitter.captured)
    ended = {(a.buffer, rank[a.operation]) for a in problem.accesses if a.operation in waits}
    for buffer, end in ended:
        later = (
            rank[a.operation]
            for a in problem.accesses
            if a.buffer == buffer and a.write and rank[a.operation] > end
        )
        at = min(later, default=None)
        if at is not None and not ends[buffer] <= reached[buffer]:
            name = problem.operations[at].name
            found.setdefault(name, set()).update(reached[buffer] | ends[buffer])
    return found


def _ends(emitter: Emitter, reached: Mapping[str, Inputs]) -> dict[str, Inputs]:
    """``{buffer: inputs}``: what is waited for where asynchronous work on the buffer ends.

    To Inductor, the wait for a collective touches what the collective writes. Nothing else says
    that until then what it reads is in use, too.
    """
    captured = emitter.captured
    waits = _wait_names(captured)
    problems = [p for p in (captured.problem, captured.residence) if p is not None]
    held: dict[str, list[str]] = {}
    for access in (a for p in problems for a in p.accesses if a.operation in waits):
        held.setdefault(access.operation, []).append(access.buffer)
    found: dict[str, Inputs] = {}
    for buffers in held.values():
        awaited = {key for b in buffers if b in emitter.apart for key in reached[b]}
        for buffer in buffers:
            found.setdefault(buffer, set()).update(awaited)
    return found


def _wait_names(captured: Captured) -> set[str]:
    return {captured.prefix + w.name for ends in captured.waits.values() for w in ends.values()}


def _updates(emitter: Emitter, ends: Mapping[str, Inputs]) -> dict[str, list[fx.Node]]:
    """``{operation: inputs}``: what writes pinned inputs that asynchronous work has read."""
    captured = emitter.captured
    found: dict[str, list[fx.Node]] = {}
    for kept in captured.kept:
        awaited = ends.get(captured.prefix + kept.node.name)
        if captured.residence is None or not awaited:
            continue
        for user in kept.node.users:
            if kept.node in written_nodes(called(user), user):
                nodes = found.setdefault(captured.prefix + user.name, [])
                nodes += [kept.node, *(n for k, n in emitter.inputs.items() if k in awaited)]
    return found
