"""The parts of a graph, its forward and its backward: what each has to know of the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from attrs import define, evolve, field
from torch import fx

from symmplan.capture.graphs import is_pure_view
from symmplan.integrate.compile.crossing import Given, overlap
from symmplan.model import Access, Buffer, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.capture.sites import Captured
    from symmplan.integrate.compile.emit import SegmentInput
    from symmplan.integrate.compile.pool import Shared
    from symmplan.model import Placement, Plan
    from symmplan.place.choice import Choice
    from symmplan.place.program import PlacedProgram

__all__ = [
    "Part",
    "PartName",
    "Record",
    "alike",
    "keep_away",
    "pinned",
    "protect",
]

PartName: TypeAlias = Literal["forward", "backward", "inference"]


@define(eq=False)
class Part:
    """A part that follows a plan.

    Attributes:
        name: Which it is.
        record: What is remembered of the graph that it is a part of.
        order: Names of its operations in the problem.
        barriers: ``(operation, group)`` of the barriers that it runs.
        inputs: What it takes of the segments after its own inputs, in order.
        saved: ``{output: where it stays}`` of what its backward reads in its placement.
        given: Its inputs that its forward left in placements.
        writes: The bytes that it writes.
        calls: How many declared calls run in placements.
        copies: How many copies it makes into and out of placements.
        ways: How each of its declared calls runs.
        shared: The segments that it runs in; None before it first runs.
        agreed: The first plan that showed peers what its own does.
        groups: The process groups of whatever it has in symmetric memory, once it has run.
        taken: The arena that it last ran in, and its inputs there.
    """

    name: PartName
    record: Record
    order: tuple[str, ...]
    barriers: tuple[tuple[str, str], ...]
    inputs: tuple[SegmentInput, ...]
    saved: dict[int, Placement]
    given: tuple[Given, ...]
    writes: tuple[Placement, ...]
    calls: int
    copies: int
    ways: tuple[str, ...]
    shared: Shared | None = field(init=False, default=None)
    agreed: Plan = field(init=False)
    groups: list[Any] | None = field(init=False, default=None)
    taken: tuple[Any, Sequence[torch.Tensor]] = field(init=False, default=(None, ()))

    @classmethod
    def of(
        cls,
        name: PartName,
        record: Record,
        graph: fx.Graph,
        program: PlacedProgram,
        barriers: tuple[tuple[str, str], ...],
        inputs: tuple[SegmentInput, ...],
        *,
        fixed: bool,
    ) -> Part:
        """A part that was rewritten to follow a program.

        Where ``fixed``, what its forward left in placements has to lie there again: a CUDA graph
        knows it by its address.
        """
        captured, placements = program.captured, program.plan.placements
        needed = {s.buffer for s in captured.sites if s.buffer is not None}
        written = sorted({a.buffer for a in captured.problem.accesses if a.write})
        writes = [placements[buffer] for buffer in written]
        index = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
        given = []
        for node, buffer in captured.given.items():
            place, offset = placements[buffer], node.meta["val"].storage_offset()
            given.append(
                Given(
                    index=index[node],
                    place=place,
                    offset=offset if isinstance(offset, int) else 0,
                    needed=fixed or buffer in needed,
                    overwritten=any(overlap(other, place) for other in writes),
                )
            )
        return cls(
            name=name,
            record=record,
            order=tuple(o.name for o in captured.problem.operations),
            barriers=barriers,
            inputs=inputs,
            saved={i: placements[buffer] for i, buffer in captured.saved.items()},
            given=tuple(given),
            writes=tuple(dict.fromkeys([*writes, *(g.place for g in given if g.needed)])),
            calls=len(program.calls),
            copies=sum(i.kind.startswith("copy") for i in program.instructions),
            ways=program.ways,
        )

    @property
    def copies_back(self) -> bool:
        """Whether its entry may copy into placements what it needs there."""
        return any(given.needed for given in self.given)


@define(eq=False)
class Record:
    """What is remembered of a graph, also when its code is gone.

    Attributes:
        plans: The plan of each part.
        kept: Plans of inputs that lie in symmetric memory from run to run.
        sites: ``(operation, op, argument or result, how, reason)`` of every declared tensor.
        choices: What was measured.
        replanned: Whether a size had become too large for an earlier plan.
        seconds: Symmplan's part of compiling it.
        crossing_bytes: Bytes that stay in their placements between forward and backward.
        runs: How often its parts ran.
        served: How many declared calls ran in placements.
        copies: How many copies they made into and out of placements.
    """

    plans: dict[str, Plan] = field(init=False, factory=dict)
    kept: dict[str, Plan] = field(init=False, factory=dict)
    sites: list[tuple[str, str, str, str | None, str]] = field(init=False, factory=list)
    choices: list[Choice] = field(init=False, factory=list)
    replanned: bool = field(init=False, default=False)
    seconds: float = field(init=False, default=0.0)
    crossing_bytes: int = field(init=False, default=0)
    runs: int = field(init=False, default=0)
    served: int = field(init=False, default=0)
    copies: int = field(init=False, default=0)

    def ran(self, part: Part) -> None:
        """Count a run."""
        self.runs += 1
        self.served += part.calls
        self.copies += part.copies

    def add(self, captured: Captured) -> None:
        """Remember the declared tensors of a part."""
        self.sites += [
            (captured.prefix + s.node.name, captured.specs[s.node].op, s.where, s.how, s.reason)
            for s in captured.sites
        ]


def pinned(plan: Plan) -> Problem:
    """The problem of a plan, every buffer where the plan has it."""
    buffers = [evolve(b, offset=plan.placements[b.name].offset) for b in plan.problem.buffers]
    return evolve(plan.problem, buffers=buffers)


def keep_away(problem: Problem, kept: Sequence[tuple[Placement, str]]) -> Problem:
    """A problem that leaves alone what other graphs' forwards have saved; it may overlap."""
    ranges: list[list[Any]] = []  # segment, group, first byte, end
    for segment, group, begin, end in sorted((p.segment, g, p.offset, p.end) for p, g in kept):
        last = ranges[-1] if ranges else []
        if last[:2] == [segment, group] and begin <= last[3]:
            last[3] = max(last[3], end)
        else:
            ranges.append([segment, group, begin, end])
    buffers = [
        Buffer(
            f":kept.{segment}.{begin}", end - begin, group, align=1, offset=begin, persistent=True
        )
        for segment, group, begin, end in ranges
    ]
    first = problem.operations[0].name
    return evolve(
        problem,
        buffers=(*problem.buffers, *buffers),
        accesses=(*problem.accesses, *(Access(first, b.name) for b in buffers)),
    )


def protect(module: fx.GraphModule, inputs: Sequence[fx.Node]) -> None:
    """Let a backward return no part of these inputs, which lie in placements, and name them.

    Inductor may let results take the memory of inputs that end with the graph, but not of these
    (see `keep_inputs`). Its code cache keys on names, and not on that.
    """
    for node in inputs:
        node.name = node.target = f"{node.name}_kept"
    output = module.graph.output_node()
    for node in output.all_input_nodes:
        source: Any = node
        while source not in inputs and source.op == "call_function" and is_pure_view(source):
            source = source.args[0]
        if source in inputs:
            with module.graph.inserting_before(output):
                copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta["val"] = node.meta["val"].clone()
            output.replace_input_with(node, copy)
    module.recompile()


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
