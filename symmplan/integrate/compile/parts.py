"""What the parts of a graph, its forward and its backward, have to know of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch import fx

from symmplan.capture.graphs import is_pure_view
from symmplan.integrate.compile.crossing import Given, overlap
from symmplan.model import Access, Buffer, Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from symmplan.capture.sites import Captured
    from symmplan.model import Placement, Plan

__all__ = [
    "alike",
    "given_of",
    "keep_away",
    "kept_name",
    "mark",
    "pinned",
    "unreturned",
    "writes_of",
]


def pinned(plan: Plan) -> Problem:
    """The problem of a plan, every buffer where the plan has it."""
    buffers = [evolve(b, offset=plan.placements[b.name].offset) for b in plan.problem.buffers]
    return evolve(plan.problem, buffers=buffers)


def kept_name(place: Placement) -> str:
    """Name of the buffer that stands for bytes that another graph's forward has saved."""
    return f":kept.{place.segment}.{place.offset}"


def keep_away(problem: Problem, kept: Sequence[tuple[Placement, str]]) -> Problem:
    """A problem that leaves alone what other graphs' forwards have saved.

    Args:
        problem: The problem.
        kept: ``(placement, group)`` of what they saved; some may overlap.
    """
    buffers: list[Buffer] = []
    end: dict[tuple[str, str], int] = {}
    for place, group in sorted(kept, key=lambda k: (k[0].segment, k[1], k[0].offset)):
        begin = max(place.offset, end.get((place.segment, group), 0))
        if begin >= place.end:
            continue
        if buffers and end.get((place.segment, group)) == begin and buffers[-1].group == group:
            buffers[-1] = evolve(buffers[-1], nbytes=buffers[-1].nbytes + place.end - begin)
        else:
            name = kept_name(evolve(place, offset=begin))
            buffers.append(
                Buffer(name, place.end - begin, group, align=1, offset=begin, persistent=True)
            )
        end[(place.segment, group)] = place.end
    first = problem.operations[0].name
    return evolve(
        problem,
        buffers=(*problem.buffers, *buffers),
        accesses=(*problem.accesses, *(Access(first, b.name) for b in buffers)),
    )


def mark(module: fx.GraphModule, inputs: Sequence[fx.Node]) -> None:
    """Name the inputs of a backward that lie in placements.

    Inductor may let results take the memory of inputs that end with the graph, but not of these
    (see `keep_inputs`). Its code cache keys on names, and not on that.
    """
    for node in inputs:
        node.name = node.target = f"{node.name}_kept"
    module.recompile()


def unreturned(module: fx.GraphModule, inputs: Sequence[fx.Node]) -> None:
    """Let a backward return copies of these inputs, where it returns them or views of them."""
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    for node in output.all_input_nodes:
        source = node
        while source not in inputs and source.op == "call_function" and is_pure_view(source):
            source = source.args[0]
        if source in inputs:
            with module.graph.inserting_before(output):
                copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta["val"] = node.meta["val"].clone()
            output.replace_input_with(node, copy)


def given_of(
    module: fx.GraphModule, captured: Captured, plan: Plan, *, fixed: bool
) -> tuple[Given, ...]:
    """The inputs that lie in placements when a backward begins.

    Args:
        module: The backward.
        captured: Its decisions.
        plan: Its plan.
        fixed: Whether all of them have to lie there: a CUDA graph knows them by their addresses.
    """
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    needed = {s.buffer for s in captured.sites if s.buffer is not None}
    written = _written(captured)
    found = []
    for node, buffer in captured.given.items():
        place = plan.placements[buffer]
        offset = node.meta["val"].storage_offset()
        found.append(
            Given(
                index=inputs.index(node),
                place=place,
                offset=offset if isinstance(offset, int) else 0,
                needed=fixed or buffer in needed,
                overwritten=any(overlap(plan.placements[b], place) for b in written),
            )
        )
    return tuple(found)


def writes_of(captured: Captured, plan: Plan, given: Iterable[Given]) -> tuple[Placement, ...]:
    """The bytes that a part writes, itself or on its entry."""
    places = [plan.placements[b] for b in _written(captured)]
    places += [g.place for g in given if g.needed]
    return tuple(dict.fromkeys(places))


def _written(captured: Captured) -> Collection[str]:
    return sorted({a.buffer for a in captured.problem.accesses if a.write})


def alike(one: Any, other: Any) -> bool:
    """Whether two fake values may be the same tensor."""
    return (
        isinstance(one, torch.Tensor)
        and one.dtype == other.dtype
        and one.ndim == other.ndim
        and all(
            not (isinstance(a, int) and isinstance(b, int)) or a == b
            for a, b in zip(one.shape, other.shape, strict=True)
        )
    )
