"""One Dynamo graph: its parts, their plan, their turns in the segments."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import TYPE_CHECKING, Any

from attrs import define, field

from symmplan.capture import Captured, capture_fx, join
from symmplan.capture.graphs import hidden_calls
from symmplan.capture.producers import writes_eager, writes_inductor
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.own import own_work
from symmplan.coordination.world import current
from symmplan.errors import BackendError, CaptureError
from symmplan.integrate.compile.exchanged import AllToAlls
from symmplan.integrate.compile.parts import (
    PlannedPart,
    Record,
    alike,
    bound,
    counted,
    declared,
    inserted,
    keep_away,
    keeps,
    left_out,
    pinned,
    points_of,
    protect,
)
from symmplan.integrate.compile.pinned_inputs import PinnedInputs
from symmplan.integrate.compile.plans import structure_of
from symmplan.integrate.compile.rewrite import rewrite
from symmplan.integrate.compile.undeclared import tell_undeclared
from symmplan.memory import BACKENDS
from symmplan.memory.meeting.topology import survey
from symmplan.model import Barrier
from symmplan.place.algorithms import Lowerings, only_sums
from symmplan.place.program import place
from symmplan.planner.barriers import barriers_of, in_turn
from symmplan.planner.items import items_of
from symmplan.registry import resolve_group_name, spec_for
from symmplan.runtime.fitting import Fitting
from symmplan.runtime.observe import launching_from
from symmplan.runtime.prepare import checked_plan
from symmplan.runtime.watching import Watching
from symmplan.torch_private import c10d
from symmplan.torch_private.autograd import keeps_graph
from symmplan.torch_private.compilers import keep_inputs, saved_outputs, takes_a_list

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import fx

    from symmplan.integrate.compile.options import CompileOptions
    from symmplan.integrate.compile.parts import PartName
    from symmplan.integrate.compile.pool import Pool
    from symmplan.integrate.compile.turns import Shared
    from symmplan.model import Buffer, Plan


@define(eq=False)
class CompiledGraph:
    """One Dynamo graph: its parts (forward, backward or inference) and their plan.

    The parts run one after the other, so they are planned as one program: the first part gets
    the best offsets, and the second is planned around the fixed placements of the first. Tensors
    that cross from the forward to the backward stay where they are in between.
    """

    settings: CompileOptions
    device: torch.device
    pool: Pool
    on_idle: Callable[[], None]
    record: Record = field(init=False, factory=Record)
    parts: dict[str, PlannedPart] = field(init=False, factory=dict)
    lowerings: Lowerings | None = field(init=False, default=None)
    crossing: dict[int, tuple[Buffer, Any]] = field(init=False, factory=dict)
    engines: set[str] = field(init=False, factory=set)
    pinned_inputs: PinnedInputs = field(init=False)
    #: ``{part: {reason: calls}}`` of the calls of parts without a plan.
    left_out: dict[str, Mapping[str, int]] = field(init=False, factory=dict)
    #: ``{part: groups of what was measured and left in ordinary memory, those just measured}``.
    ordinary: dict[str, tuple[list[str], list[str]]] = field(init=False, factory=dict)
    #: ``{part: groups that agreed on what its plan may take}``.
    agreed: dict[str, tuple[str, ...]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.pinned_inputs = PinnedInputs(
            self.pool, self.device, self.settings.timeout, self.record.kept
        )

    @property
    def watches(self) -> bool:
        """Whether races are looked for. A watched graph must run op by op."""
        races = self.lowerings is not None and BACKENDS[self.lowerings.memory].races
        return races and self.settings.debug is True

    def declares(self, module: fx.GraphModule) -> bool:
        """Whether any op of the graph, or of what its nodes run, has something declared."""
        hidden = (spec_for(overload) for _, overload, _ in hidden_calls(module.graph, module))
        return any(hidden) or any(declared(module.graph))

    def _prepare(self, names: Sequence[str], module: fx.GraphModule, name: PartName) -> Lowerings:
        """How declared ops run; decided by the groups of the first part that has any.

        Collective: over the groups that are new to the backend.
        """
        alone = name == "inference" and self.settings.may_sum  # nobody knows a backward before
        sums = alone and only_sums((node, spec) for node, _, spec in declared(module.graph))
        groups = {n: g.process_group for n, g in resolve_groups(names).items()}
        memory = self._agree(groups, sums=sums)
        if self.lowerings is not None:
            return self.lowerings
        lowerings = Lowerings(memory, self.settings.collectives)
        if names:
            self.lowerings = lowerings
        return lowerings

    def _agree(self, groups: Mapping[str, Any], *, sums: bool = False) -> str:
        """The memory backend that all ranks agree on. Collective: over groups that are new."""
        given = self.device, groups, self.pool.progress.planning
        more: dict[str, Any] = {"inner": self.settings.inner, "bind": self.settings.bind}
        return self.pool.preparation.agree(*given, sums=sums, **more)

    def _groups(self, module: fx.GraphModule) -> tuple[dict[fx.Node, str], dict[fx.Node, str]]:
        """The groups of declared ops, and why torch has none of an op's name here."""
        names: dict[fx.Node, str] = {}
        nowhere: dict[fx.Node, str] = {}
        for node, overload, spec in declared(module.graph):
            default = self.settings.default_group
            with contextlib.suppress(CaptureError):  # capture tells of it
                name = resolve_group_name(spec, overload, node.args, node.kwargs, default)
                try:
                    names[node] = next(iter(resolve_groups([name])))
                except BackendError as error:
                    nowhere[node] = error.what
                    warnings.warn(
                        f"symmplan: {spec.op}: {error.what}; it stays in ordinary memory",
                        stacklevel=2,
                    )
        return names, nowhere

    def rewrite(
        self, module: fx.GraphModule, name: PartName, fake_mode: Any, *, fixed: bool = False
    ) -> PlannedPart | None:
        """Make one part follow its plan; None if it has nothing in symmetric memory.

        Where ``fixed``, what its forward saved must have the same addresses in each run.
        """
        with self.record.timed():
            return self._rewrite(module, name, fake_mode, fixed=fixed)

    def _rewrite(
        self, module: fx.GraphModule, name: PartName, fake_mode: Any, *, fixed: bool
    ) -> PlannedPart | None:
        saved, given = self._cross(module, name)
        tell_undeclared(module)
        if not self.declares(module):
            return None
        fitting, room, all_to_alls = self._capture(module, name, saved, given)
        captured = fitting.captured
        if not captured.sites and not captured.problem.unplanned:
            return None
        lowerings, chosen = fitting.lowerings, fitting.chosen
        plan, captured = self._fit(fitting, captured, room)
        all_to_alls.settle(captured)
        self.record.add(captured)
        self.record.plans[name] = plan
        self.pinned_inputs.plan(captured, name, lowerings.memory)
        if all(s.buffer is None for s in captured.sites):
            algorithms = ["ordinary"] * len(captured.specs)
            self.pool.preparation.log(plan, algorithms, f"compiled graph ({name})")
            self.left_out[name] = left_out(captured)
            return None
        # Parts may run in another order than planned (two forwards, then two backwards), so
        # each also gets the barriers that it needs when it follows itself.
        alone = barriers_of(captured.problem, items_of(captured.problem), plan.placements)
        kept = self.pinned_inputs.barriers(name)
        points = in_turn(*map(points_of, (plan.barriers, alone, kept)))
        self.engines.update(chosen.engines.values())
        self._save(module, captured, plan)
        barriers = [Barrier(before, group) for before, group in points]
        how = (chosen.placed, chosen.engines)
        program = place(captured, plan, lowerings, *how, barriers)
        inputs = rewrite(module, program, fake_mode)
        self.parts[name] = PlannedPart.of(
            name, self.record, module.graph, program, points, inputs, fixed=fixed
        )
        return self.parts[name]

    def _capture(
        self,
        module: fx.GraphModule,
        name: PartName,
        saved: Sequence[int],
        given: dict[str, Buffer],
    ) -> tuple[Fitting, int | None, AllToAlls]:
        """The part, with how its collectives run, how many bytes plans may take, its all-to-alls.

        Collective: over the part's groups, the first time for them, and where algorithms are
            measured.
        """
        groups, refused = self._groups(module)
        names = list(dict.fromkeys(groups.values()))
        lowerings = self._prepare(names, module, name)
        preparation, room = self.pool.preparation, None
        all_to_alls = AllToAlls(module, name, groups, self.pool)
        bound(module, self.pool.bounds, self.record, all_to_alls.left_out)
        if preparation.refusal is None and current() is None:
            refused = {**refused, **all_to_alls.uneven(lowerings)}
        asked: list[str] = []
        gather = functools.partial(self.pool.progress.gather, asked=asked)
        other = writes_inductor if self.settings.inner == "inductor" else writes_eager
        capture = functools.partial(
            capture_fx,
            module,
            prefix=f"{name}.",
            producer=functools.partial(lowerings.producer, other=other),
            device=self.device,
            keep=self.pinned_inputs.candidates(module, name) if self.settings.bind else frozenset(),
            saved=saved,
            given=given,
            default_group=self.settings.default_group,
        )
        fitting = Fitting(capture, lowerings, self.device, preparation, refused)
        fitting.choose(gather, compiled=True)
        placed = fitting.placed
        if placed:
            used = (fitting.whole.groups[node] for node in placed)
            self.agreed[name] = tuple(dict.fromkeys(used))
            room = self._room(name, lowerings)
        measured = fitting.chosen.of.values()
        left = [c.group for c in measured if c.group not in self.agreed.get(name, ())]
        self.ordinary[name] = left, asked
        if preparation.refusal is not None:
            self.record.refused = preparation.reason
        self.record.choices += fitting.chosen.choices
        return fitting, room, all_to_alls

    def _room(self, name: str, lowerings: Lowerings) -> int | None:
        """Bytes that plans may take. Collective: the first time for the part's groups."""
        return self.pool.room(self.agreed.get(name, ()), lowerings.memory, self.device)

    def _fit(self, fitting: Fitting, captured: Captured, room: int | None) -> tuple[Plan, Captured]:
        """A plan of ``room`` bytes at most, and the part as it is placed then."""
        pool = self.pool
        keep: dict[str, Any] = {}
        joined = False

        def planned(made: Captured) -> Plan:
            nonlocal joined
            plan, joined = self._plan(made)
            return plan

        if room is not None and captured.residence is not None:
            kept = sum(b.nbytes for b in captured.residence.buffers)
            if pool.taken(self._plan(captured)[0]) + kept <= room:
                room -= kept
            else:  # pinned inputs are demoted first: they are bytes for good
                keep = {"keep": frozenset()}
        plan, made = fitting.fit(room, planned, lambda plan, _: pool.taken(plan), **keep)
        if joined:
            self.record.plans.update(dict.fromkeys(self.record.plans, plan))
        structure = structure_of(plan)
        pool.planned[structure] = max(plan.peak_bytes, pool.planned.get(structure, 0))
        return plan, made

    def _cross(
        self, module: fx.GraphModule, name: PartName
    ) -> tuple[Sequence[int], dict[str, Buffer]]:
        """The outputs that only the backward gets, and the inputs that lie in placements.

        A backward is changed, also if it declares nothing: it returns no part of a placement.
        """
        seen = saved_outputs()
        if seen is None or name == "inference":
            return (), {}
        first, sizes = seen
        if name == "forward":
            output: Any = module.graph.output_node()
            return range(first, len(output.args[0])), {}
        inputs = module.graph.find_nodes(op="placeholder")
        found = {
            at: buffer
            for i, (buffer, like) in self.crossing.items()
            if (at := sizes + i - first) < len(inputs) and alike(inputs[at].meta["val"], like)
        }
        keep_inputs(found)
        protect(module, [inputs[i] for i in found])
        return (), {inputs[i].name: buffer for i, buffer in found.items()}

    def _save(self, module: fx.GraphModule, captured: Captured, plan: Plan) -> None:
        """Remember what a forward leaves in placements."""
        if not captured.saved:
            return
        output: Any = module.graph.output_node()
        buffers = {b.name: b for b in pinned(plan).buffers}
        for i, name in captured.saved.items():
            self.crossing[i] = (buffers[name], output.args[0][i].meta["val"])
        nbytes = sum(buffers[name].nbytes for name in {*captured.saved.values()})
        self.record.counts["crossing_bytes"] += nbytes

    def _plan(self, captured: Captured) -> tuple[Plan, bool]:
        """Plan one part, and whether with the parts before it, which have not run yet then."""
        before = next(iter(self.record.plans.values()), None)
        if before is not None and all(p.shared is None for p in self.parts.values()):
            plan = checked_plan(join([pinned(before), captured.problem]))
            if keeps(self.parts.values(), before, plan):
                return plan, True
        plan = checked_plan(captured.problem)
        reserved = self.pool.reserved(structure_of(plan), but=self.record)
        if reserved:
            apart = checked_plan(keep_away(captured.problem, reserved))
            if structure_of(apart) == structure_of(plan):
                return apart, False
        return plan, False

    def runner(
        self,
        compiled: Callable[[list[Any]], Any],
        name: PartName,
        part: PlannedPart | None = None,
        plain: Callable[[], Callable[[list[Any]], Any]] | None = None,
    ) -> Callable[[list[Any]], Any]:
        """Compiled code of a part as it is to be called; ``part`` is what `rewrite` returned.

        ``plain`` compiles it without a plan. A part without a plan may be the backward of a part
        with one.
        """
        compiled = self.pool.progress.seen(compiled, *self.ordinary.get(name, ([], [])))
        if part is not None:
            part.plain = plain
        if part is None and (name != "backward" or not self.crossing):
            return counted(compiled, self.on_idle, self.record, self.left_out.get(name, {}))

        def run(args: list[Any]) -> Any:
            if part is not None:
                with launching_from(part.expected):
                    return self._run(part, compiled, args)
            self._passed(name)
            self.record.ran_plainly(self.left_out.get(name, {}))
            return compiled(args)

        def watch(args: list[Any]) -> Any:
            with Watching(self.settings.timeout):
                return run(args)

        return takes_a_list(watch if part is not None and self.watches else run)

    def _run(self, part: PlannedPart, compiled: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run a part in the segments, and see that all is where it has to be.

        Collective: the first time, over the groups of the plan; it agrees and allocates.
        """
        shared = self._settled(part, args)
        if shared is None:
            self._passed(part.name)
            return part.run_plainly(args)
        shared.enter(part, args)
        try:
            arena = shared.arena
            if arena.races is not None:
                arena.races.follow(self.record.plans[part.name].placements)
            if part.taken[0] is not arena or arena.released:
                taken = [i.of(arena.segments[i.segment].tensor) for i in part.inputs]
                part.taken = (arena, taken)
                shared.taken_by.add(part)
            args.extend(part.taken[1])
            copies = self.pinned_inputs.enter(part.name, args)
            with own_work:
                results = compiled(args)
            if copies:
                results = self.pinned_inputs.leave(copies, results)
            self._passed(part.name)
            shared.finish(part.agreed)
            if not part.saved:
                return results
            return shared.crossings.hand_over(arena, part, list(results))
        finally:
            self.record.ran(part)
            shared.leave()

    def _passed(self, name: PartName) -> None:
        """Note that a part has run: a backward is due behind its forward."""
        forward = self.parts.get("forward")
        if forward is not None and forward.shared is not None:
            due = name == "forward" or keeps_graph()
            forward.shared.crossings.expect(forward, backward=due)

    def _settled(self, part: PlannedPart, args: list[Any]) -> Shared | None:
        """The segments of a part, found or made before it first runs; None if there are none."""
        if self.record.refused:
            return None
        if not all(map(c10d.is_registered, part.groups or ())):
            # A process group is gone. Another may have its name, and other ranks.
            part.shared = part.groups = None
            part.taken = (None, ())
            self.pinned_inputs.forget()
        shared = part.shared or self._take(part)
        if shared is not None and shared.asleep and not self.pool.wake(shared):
            shared = None
        new = part.groups is None
        engines = bool(self.engines)
        if shared is None or (new and not self.pinned_inputs.settle(part.name, args, engines)):
            self.record.refuse(self.pool.preparation.reason)
            return None
        if new:
            groups = self.pinned_inputs.groups(part.name, part.agreed).values()
            part.groups = [group for group in groups if group is not None]
        return shared

    def _take(self, part: PlannedPart) -> Shared | None:
        assert self.lowerings is not None
        plan = self.record.plans[part.name]
        # Who compiles for groups that are new asks its peers; they come here with an old graph.
        groups = self.pinned_inputs.groups(part.name, plan)
        self._agree(groups)
        if self.pool.preparation.refusal is not None:
            return None
        survey(groups, self.device, self.settings.timeout)
        same = [p for p in self.parts.values() if self.record.plans[p.name] is plan]
        if any(self._room(p.name, self.lowerings) is None for p in same):
            return None
        found = self.pool.take(
            plan,
            self.lowerings.memory,
            self.device,
            inserted(plan, same),
            engines=self.engines,
            crosses=any(p.saved for p in same),
        )
        if found is None:
            return None
        for each in same:
            each.shared, each.agreed = found
        names = ", ".join(p.name for p in same)
        algorithms = [algorithm for p in same for algorithm in p.algorithms]
        self.pool.preparation.log(plan, algorithms, f"compiled graph ({names})")
        return found[0]
