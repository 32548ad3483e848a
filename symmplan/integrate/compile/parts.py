"""The parts of a graph, its forward and its backward: what each has to know of the other."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from attrs import define, evolve, field
from torch import fx

from symmplan.capture.bounds import limit
from symmplan.capture.graphs import called, is_pure_view
from symmplan.integrate.compile.plans import Given, group_names, is_unmet, overlap
from symmplan.model import Access, Buffer, Problem
from symmplan.planner.barriers import in_turn
from symmplan.planner.order import order_of
from symmplan.registry import spec_for
from symmplan.report.log import LOG
from symmplan.torch_private.compilers import compiled_frame, takes_a_list

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from symmplan.capture.sites import Captured
    from symmplan.choose.choice import Choice
    from symmplan.integrate.compile.emit import SegmentInput
    from symmplan.model import Barrier, OpSpec, Placement, Plan
    from symmplan.place.expected import Expected
    from symmplan.place.program import PlacedProgram

    _Compiled: TypeAlias = Callable[[list[Any]], Any]

PartName: TypeAlias = Literal["forward", "backward", "inference"]


@define(eq=False)
class PlannedPart:
    """A part that follows a plan.

    Attributes:
        name: Which it is.
        record: The record of its graph.
        order: Names of its operations in the problem.
        barriers: ``(operation, group)`` of the barriers that it runs.
        inputs: The views of segments that it takes after its own inputs, in order.
        saved: ``{output: placement}`` of outputs that its backward reads in place.
        given: Its inputs that its forward left in placements.
        spans: The bytes that it writes: of which segments, from where to where.
        calls: How many declared calls run in placements.
        expected: How the collectives among them are to run.
        copies: How many copies it makes into and out of placements.
        algorithms: How each of its declared calls runs.
        left_out: ``{reason: calls}`` of its declared calls that stay in ordinary memory.
        shared: The `turns.Shared` segments that it runs in; None before it first runs.
        agreed: The first agreed plan that looks the same to peers.
        groups: The process groups of its symmetric tensors, once it has run.
        taken: The arena that it last ran in, and its inputs there.
        plain: Compiles it without a plan.
    """

    name: PartName
    record: Record
    order: tuple[str, ...]
    barriers: tuple[tuple[str, str], ...]
    inputs: tuple[SegmentInput, ...]
    saved: dict[int, Placement]
    given: tuple[Given, ...]
    spans: tuple[tuple[str, int, int], ...]
    calls: int
    expected: tuple[Expected, ...]
    copies: int
    algorithms: tuple[str, ...]
    left_out: Mapping[str, int]
    shared: Any = field(init=False, default=None)
    agreed: Plan = field(init=False)
    groups: list[Any] | None = field(init=False, default=None)
    taken: tuple[Any, Sequence[torch.Tensor]] = field(init=False, default=(None, ()))
    plain: Callable[[], _Compiled] | None = field(init=False, default=None)
    _plain: _Compiled | None = field(init=False, default=None)

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
    ) -> PlannedPart:
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
            spans=tuple(
                merged(
                    (p.segment, p.offset, p.end)
                    for p in (*writes, *(g.place for g in given if g.needed))
                )
            ),
            calls=len(program.calls),
            expected=tuple(c.expected for c in program.calls.values() if c.expected is not None),
            copies=sum(step.site is not None for step in captured.steps.values()),
            algorithms=program.algorithms,
            left_out=left_out(captured),
        )

    def run_plainly(self, args: list[Any]) -> Any:
        """Run it in torch's own way."""
        if self._plain is None:
            assert self.plain is not None
            self._plain = self.plain()
        self.record.ran_plainly({self.record.refused: self.calls})
        self.record.ran_plainly(self.left_out)
        return self._plain(args)

    @property
    def copies_back(self) -> bool:
        """Whether its entry may copy into placements what it needs there."""
        return any(given.needed for given in self.given)


@define(eq=False)
class Record:
    """Facts of a graph that stay when its code is gone.

    Attributes:
        plans: The plan of each part.
        kept: Plans of inputs that lie in symmetric memory from run to run.
        sites: ``(operation, op, argument or result, how, reason)`` of every declared tensor.
        choices: The measured choices.
        seconds: Symmplan's part of compiling it.
        counts: What its parts did, by the names of `Stats`.
        refused: Why nothing of it is in symmetric memory; empty if there is no reason.
        reasons: Why calls ran in ordinary memory, and how often.
    """

    plans: dict[str, Plan] = field(init=False, factory=dict)
    kept: dict[str, Plan] = field(init=False, factory=dict)
    sites: list[tuple[str, str, str, str | None, str]] = field(init=False, factory=list)
    choices: list[Choice] = field(init=False, factory=list)
    seconds: float = field(init=False, default=0.0)
    counts: Counter[str] = field(init=False, factory=Counter)
    refused: str = field(init=False, default="")
    reasons: Counter[str] = field(init=False, factory=Counter)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count what runs inside as symmplan's part of compiling."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin

    def refuse(self, why: str) -> None:
        """Nothing of it is in symmetric memory."""
        self.refused = why
        self.plans.clear()
        self.sites = [(name, op, where, None, why) for name, op, where, _, _ in self.sites]

    def ran(self, part: PlannedPart) -> None:
        """Count a run."""
        self.counts.update(iterations=1, served=part.calls, copies=part.copies)
        self.ran_plainly(part.left_out)

    def ran_plainly(self, reasons: Mapping[str, int]) -> None:
        """Count calls that ran in ordinary memory, ``{reason: calls}``."""
        self.counts["plain"] += sum(reasons.values())
        self.reasons.update(reasons)

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
    ranges = merged(((p.segment, g), p.offset, p.end) for p, g in kept)
    buffers = [
        Buffer(
            f":kept.{segment}.{begin}",
            end - begin,
            group,
            align=1,
            offset=begin,
            persistent=True,
            op="symmplan::kept",
        )
        for (segment, group), begin, end in ranges
    ]
    first = problem.operations[0].name
    return evolve(
        problem,
        buffers=(*problem.buffers, *buffers),
        accesses=(*problem.accesses, *(Access(first, b.name) for b in buffers)),
    )


def merged(ranges: Iterable[tuple[Any, int, int]]) -> list[tuple[Any, int, int]]:
    """``(where, begin, end)``, those of one place that touch each other as one."""
    found: list[tuple[Any, int, int]] = []
    for where, begin, end in sorted(ranges):
        last = found[-1] if found else None
        if last is not None and last[0] == where and begin <= last[2]:
            found[-1] = (where, last[1], max(last[2], end))
        else:
            found.append((where, begin, end))
    return found


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own, and the same values."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, values)
    graph.output(output)
    last: Any = graph.output_node()
    last.meta = dict(module.graph.output_node().meta)
    for node, copy in values.items():
        copy.meta = dict(node.meta)
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    return made


def inserted(plan: Plan, parts: Iterable[PlannedPart]) -> list[tuple[int, str]]:
    """``(place in the plan's order, group)`` of the barriers that its parts run.

    This includes barriers that a part may run on its entry, or make all later parts run. See [Note:
    turns] in `symmplan.integrate.compile.turns`.
    """
    index = order_of(plan.problem).index
    groups = group_names(plan) if is_unmet(plan) else []
    found: list[tuple[int, str]] = []
    for part in parts:
        mine = [index[name] for name in part.order]
        end = max(mine) + 1  # where its output is
        found += [(min(mine), g) for g in groups if part.copies_back]
        found += [(index.get(before, end), group) for before, group in part.barriers]
        found += [(end, g) for g in groups if part.saved]
    return found


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


def declared(graph: fx.Graph) -> Iterator[tuple[fx.Node, Any, OpSpec]]:
    """``(node, overload, what is declared of it)`` of the graph's own calls."""
    for node in graph.nodes:
        overload = called(node)
        spec = None if overload is None else spec_for(overload)
        if spec is not None:
            yield node, overload, spec


def bound(
    module: fx.GraphModule, bounds: dict[Any, int], record: Record, but: Collection[fx.Node] = ()
) -> None:
    """Bound the sizes of declared tensors, so that they can be planned.

    ``bounds`` are ``{(frame, size): largest}`` of all graphs of the backend. Calls of ``but`` stay
    in ordinary memory.
    """
    calls = [n for n, *_ in declared(module.graph) if n not in but]
    wanted = [t for n in calls for t in (n, *n.all_input_nodes)]
    for name, (now, largest) in limit(module.graph, wanted).items():
        key = (compiled_frame(), name)
        before = bounds.get(key)
        bounds[key] = largest
        if before is not None and now > before:
            record.counts["replans"] = 1
            LOG.warning(
                "a size outgrew its plan: %s is %s, planned were up to %s; the graph is "
                "compiled and planned again, on all ranks, for up to %s",
                *(name, now, before, largest),
            )


def keeps(parts: Iterable[PlannedPart], before: Plan, plan: Plan) -> bool:
    """Whether the parts that are already compiled are right under the new plan, too."""
    if any(plan.placements[name] != place for name, place in before.placements.items()):
        return False
    compiled = {o.name for o in before.problem.operations}
    points = [point for part in parts for point in part.barriers]
    asked = (p for p in points_of(plan.barriers) if p[0] in compiled)
    return len(in_turn(points, asked)) == len(points)


def points_of(barriers: Iterable[Barrier]) -> Iterable[tuple[str, str]]:
    """Before what, and over which group, each of them is."""
    return ((b.before, b.group) for b in barriers)


def left_out(captured: Captured) -> Counter[str]:
    """``{reason: calls}`` of the declared calls of which nothing is in a placement."""
    placed = {s.node for s in captured.sites if s.buffer is not None}
    why = {s.node: s.reason for s in reversed(captured.sites) if s.reason}
    return Counter(reason for node, reason in why.items() if node not in placed)


def counted(
    compiled: Callable[[list[Any]], Any],
    on_idle: Callable[[], None],
    record: Record,
    reasons: Mapping[str, int],
) -> Callable[[list[Any]], Any]:
    """A part that follows no plan; when it runs again, all of the program has been compiled.

    ``reasons`` are those of its declared calls, ``{reason: calls}``.
    """
    runs = itertools.count()

    def run(args: list[Any]) -> Any:
        record.ran_plainly(reasons)
        if next(runs) == 1:
            on_idle()
        return compiled(args)

    return takes_a_list(run)
