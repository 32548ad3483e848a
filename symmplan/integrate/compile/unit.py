"""One Dynamo graph: its parts, their plan, their turns in the segments."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from symmplan import _compat as compat
from symmplan._compat_autograd import keep_inputs, keeps_graph, saved_outputs
from symmplan.capture import Captured, capture_fx, join
from symmplan.capture.bounds import limit
from symmplan.capture.graphs import called, hidden_calls
from symmplan.capture.producers import writes_eager, writes_inductor
from symmplan.capture.steps import plan_poison
from symmplan.integrate.compile.crossing import Reservation
from symmplan.integrate.compile.parts import Part, Record, alike, keep_away, pinned, protect
from symmplan.integrate.compile.pool import group_names, is_unmet, structure_of
from symmplan.integrate.compile.residents import Residents
from symmplan.integrate.compile.rewrite import rewrite
from symmplan.memory import BACKENDS, resolve_backend
from symmplan.memory.groups import resolve_groups
from symmplan.memory.own import own_work
from symmplan.model import Barrier
from symmplan.place.chooser import choose_ways
from symmplan.place.program import place
from symmplan.place.watching import Watching
from symmplan.place.ways import Lowerings
from symmplan.planner import plan as plan_problem
from symmplan.planner.barriers import barriers_of, in_turn
from symmplan.planner.items import items_of
from symmplan.planner.order import order_of
from symmplan.registry import resolve_group_name, spec_for
from symmplan.report.log import LOG, log_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import fx

    from symmplan.integrate.compile.backend import CompileOptions
    from symmplan.integrate.compile.parts import PartName
    from symmplan.integrate.compile.pool import Pool, Shared
    from symmplan.model import Buffer, OpSpec, Plan, Problem

__all__ = ["Unit"]


@define(eq=False)
class Unit:
    """One Dynamo graph: its parts (forward, backward or inference) and their plan.

    The parts run one after the other, so they are planned as one program: the first gets the
    offsets it likes best, the second is planned around the first, whose placements are fixed by
    then. What crosses from the forward to the backward stays where it is in between.
    """

    settings: CompileOptions
    device: torch.device
    pool: Pool
    on_idle: Callable[[], None]
    record: Record = field(init=False, factory=Record)
    parts: dict[str, Part] = field(init=False, factory=dict)
    lowerings: Lowerings | None = field(init=False, default=None)
    crossing: dict[int, tuple[Buffer, Any]] = field(init=False, factory=dict)
    engines: set[str] = field(init=False, factory=set)
    reservation: Reservation | None = field(init=False, default=None)
    residents: Residents = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.residents = Residents(self.pool, self.device, self.settings.timeout, self.record.kept)

    @property
    def watches(self) -> bool:
        """Whether races are looked for. What runs must then be seen op by op."""
        races = self.lowerings is not None and BACKENDS[self.lowerings.memory].races
        return races and self.settings.debug is True

    def declares(self, module: fx.GraphModule) -> bool:
        """Whether any op of the graph, or of what its nodes run, has something declared."""
        hidden = (spec_for(overload) for _, overload, _ in hidden_calls(module.graph, module))
        return any(hidden) or any(_declared(module.graph))

    def _prepare(self, module: fx.GraphModule) -> Lowerings:
        """How declared ops run; decided by the groups of the first part that has any."""
        if self.lowerings is not None:
            return self.lowerings
        names = dict.fromkeys(
            resolve_group_name(spec, overload, node.args, node.kwargs)
            for node, overload, spec in _declared(module.graph)
        )
        backend = resolve_backend(self.settings.memory, self.device, resolve_groups(names))
        lowerings = Lowerings(backend.name, self.settings.collectives)
        if names:
            self.lowerings = lowerings
        return lowerings

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count what runs inside as symmplan's part of compiling."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.record.seconds += time.perf_counter() - begin

    def rewrite(
        self, module: fx.GraphModule, name: PartName, fake_mode: Any, *, fixed: bool = False
    ) -> Part | None:
        """Make one part follow its plan; None if it has nothing in symmetric memory.

        Where ``fixed``, what its forward saved must have the same addresses in each run.
        """
        with self.timed():
            saved, given = self._cross(module, name)
            if not self.declares(module):
                return None
            captured, engines, lowerings = self._capture(module, name, saved, given)
            if not captured.sites and not captured.problem.unplanned:
                return None
            self.record.add(captured)
            plan = self.record.plans[name] = self._plan(captured)
            self.residents.plan(captured, name, lowerings.memory)
            if all(s.buffer is None for s in captured.sites):
                log_plan(f"compiled graph ({name})", plan, ["ordinary"] * len(captured.specs))
                return None
            # Parts may run in another order than planned (two forwards, then two backwards), so
            # each also gets the barriers that it needs when it follows itself.
            alone = barriers_of(captured.problem, items_of(captured.problem), plan.placements)
            kept = self.residents.barriers(name)
            points = in_turn(*map(_points, (plan.barriers, alone, kept)))
            self.engines.update(engines.values())
            self._reserve(module, captured, plan)
            barriers = [Barrier(before, group) for before, group in points]
            program = place(captured, plan, lowerings, engines, barriers)
            inputs = rewrite(module, program, fake_mode)
            self.parts[name] = Part.of(
                name, self.record, module.graph, program, points, inputs, fixed=fixed
            )
            return self.parts[name]

    def _capture(
        self,
        module: fx.GraphModule,
        name: PartName,
        saved: Sequence[int],
        given: dict[str, Buffer],
    ) -> tuple[Captured, Mapping[fx.Node, str], Lowerings]:
        """The part as it will be placed, the communicators of its copy engines, how ops run."""
        lowerings = self._prepare(module)
        self._limit(module)
        other = writes_inductor if self.settings.inner == "inductor" else writes_eager
        producer = functools.partial(lowerings.producer, other=other)
        capture = functools.partial(
            capture_fx,
            module,
            prefix=f"{name}.",
            lookup=lowerings.lookup,
            skip=lowerings.skip,
            producer=producer,
            keep=self.residents.candidates(module, name) if self.settings.bind else frozenset(),
            saved=saved,
            given=given,
        )
        captured = capture()
        reasons: dict[fx.Node, str] = {}
        while partly := lowerings.partly(captured):
            reasons |= partly
            captured = capture(refused=reasons)
        chosen = choose_ways(
            captured, lowerings, self.device, self.settings, self.pool.progress.gather
        )
        self.record.choices += chosen.choices
        if chosen.ordinary:
            captured = capture(refused={**reasons, **chosen.ordinary})
        if self.settings.debug:
            captured = plan_poison(captured)
        return captured, chosen.engines, lowerings

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

    def _reserve(self, module: fx.GraphModule, captured: Captured, plan: Plan) -> None:
        """Remember what a forward leaves in placements."""
        if not captured.saved:
            return
        output: Any = module.graph.output_node()
        buffers = {b.name: b for b in pinned(plan).buffers}
        for i, name in captured.saved.items():
            self.crossing[i] = (buffers[name], output.args[0][i].meta["val"])
        names = sorted({*captured.saved.values()})
        places = tuple((plan.placements[n], buffers[n].group) for n in names)
        self.reservation = Reservation(structure_of(plan), places)
        self.pool.reserve(self.reservation)
        self.record.crossing_bytes += sum(buffers[n].nbytes for n in names)

    def _limit(self, module: fx.GraphModule) -> None:
        """Bound the sizes of declared tensors, so that they can be planned."""
        wanted = [t for n, *_ in _declared(module.graph) for t in (n, *n.all_input_nodes)]
        for name, (now, largest) in limit(module.graph, wanted).items():
            key = (compat.compiled_frame(), name)
            before = self.pool.bounds.get(key)
            self.pool.bounds[key] = largest
            if before is not None and now > before:
                self.record.replanned = True
                LOG.warning(
                    "a size outgrew its plan: %s is %s, planned were up to %s; the graph is "
                    "compiled and planned again, on all ranks, for up to %s",
                    *(name, now, before, largest),
                )

    def _plan(self, captured: Captured) -> Plan:
        """Plan one part, together with the parts before it if they have not run yet."""
        effort, plans = self.settings.effort, self.record.plans
        before = next(iter(plans.values()), None)
        if before is not None and all(p.shared is None for p in self.parts.values()):
            plan = _checked_plan(join([pinned(before), captured.problem]), effort)
            if self._keeps(before, plan):
                plans.update(dict.fromkeys(plans, plan))
                return plan
        plan = _checked_plan(captured.problem, effort)
        reserved = self.pool.reserved(structure_of(plan), but=self.reservation)
        if reserved:
            apart = _checked_plan(keep_away(captured.problem, reserved), effort)
            if structure_of(apart) == structure_of(plan):
                return apart
        return plan

    def _keeps(self, before: Plan, plan: Plan) -> bool:
        """Whether the parts that are already compiled are right under the new plan, too."""
        if any(plan.placements[name] != place for name, place in before.placements.items()):
            return False
        compiled = {o.name for o in before.problem.operations}
        inserted = [point for part in self.parts.values() for point in part.barriers]
        asked = (p for p in _points(plan.barriers) if p[0] in compiled)
        return len(in_turn(inserted, asked)) == len(inserted)

    def runner(
        self, compiled: Callable[[list[Any]], Any], name: PartName, part: Part | None = None
    ) -> Callable[[list[Any]], Any]:
        """Compiled code of a part as it is to be called; ``part`` is what `rewrite` returned.

        Also one that follows no plan may be the backward of a part that does.
        """
        if part is None and (name != "backward" or self.reservation is None):
            return _counted(compiled, self.on_idle)

        def run(args: list[Any]) -> Any:
            if part is not None:
                return self._run(part, compiled, args)
            self._passed(name)
            return compiled(args)

        def watch(args: list[Any]) -> Any:
            with Watching(self.settings.timeout):
                return run(args)

        chosen = watch if part is not None and self.watches else run
        chosen._boxed_call = True  # type: ignore[attr-defined]
        return chosen

    def _run(self, part: Part, compiled: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run a part in the segments, and see that all is where it has to be.

        Collective: the first time, over the groups of the plan; it agrees and allocates.
        """
        shared = self._settled(part, args)
        shared.enter(part, args)
        try:
            arena = shared.arena
            if arena.races is not None:
                arena.races.follow(self.record.plans[part.name].placements)
            if part.taken[0] is not arena or arena.released:
                taken = [i.of(arena.segments[i.segment].tensor) for i in part.inputs]
                part.taken = (arena, taken)
            args.extend(part.taken[1])
            copies = self.residents.enter(part.name, args)
            with own_work:
                results = compiled(args)
            if copies:
                results = self.residents.leave(copies, results)
            self._passed(part.name)
            shared.finish(part.agreed)
            return shared.loans.hand_over(part, list(results)) if part.saved else results
        finally:
            self.record.ran(part)
            shared.leave()

    def _passed(self, name: PartName) -> None:
        """Note that a part has run: a backward is due behind its forward."""
        if self.reservation is not None:
            self.reservation.due = name == "forward" or keeps_graph()

    def _settled(self, part: Part, args: list[Any]) -> Shared:
        """The segments of a part, found or made before it first runs."""
        if not all(map(compat.is_registered, part.groups or ())):
            # A process group is gone. Another may have its name, and other ranks.
            part.shared = part.groups = None
            part.taken = (None, ())
            self.residents.forget(part.name)
        shared = part.shared or self._take(part)
        if part.groups is None:
            self.residents.settle(part.name, args)
            names = [*group_names(part.agreed), *self.residents.groups(part.name)]
            members = resolve_groups(names).values()
            part.groups = [g.process_group for g in members if g.process_group is not None]
        return shared

    def _take(self, part: Part) -> Shared:
        assert self.lowerings is not None
        plan = self.record.plans[part.name]
        same = [p for p in self.parts.values() if self.record.plans[p.name] is plan]
        shared, agreed = self.pool.take(
            plan,
            self.lowerings.memory,
            self.device,
            self._inserted(plan, same),
            engines=self.engines,
            crosses=any(p.saved for p in same),
        )
        for each in same:
            each.shared, each.agreed = shared, agreed
        names = ", ".join(p.name for p in same)
        log_plan(f"compiled graph ({names})", plan, [way for p in same for way in p.ways])
        return shared

    def _inserted(self, plan: Plan, parts: Iterable[Part]) -> list[tuple[int, str]]:
        """``(place in the plan's order, group)`` of the barriers that its parts run.

        Also of those that a part may run on its entry, or make all later ones run. See
        [Note: turns] in `symmplan.integrate.compile.pool`.
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


def _counted(
    compiled: Callable[[list[Any]], Any], on_idle: Callable[[], None]
) -> Callable[[list[Any]], Any]:
    """A part that follows no plan; when it runs again, all of the program has been compiled."""
    runs = itertools.count()

    def run(args: list[Any]) -> Any:
        if next(runs) == 1:
            on_idle()
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _declared(graph: fx.Graph) -> Iterator[tuple[fx.Node, Any, OpSpec]]:
    """``(node, overload, what is declared of it)`` of the graph's own calls."""
    for node in graph.nodes:
        overload = called(node)
        spec = None if overload is None else spec_for(overload)
        if spec is not None:
            yield node, overload, spec


def _checked_plan(problem: Problem, effort: Literal["fast", "optimal"]) -> Plan:
    """A plan that is verified before anything runs in it."""
    plan = plan_problem(problem, effort=effort)
    plan.verify()
    return plan


def _points(barriers: Iterable[Barrier]) -> Iterable[tuple[str, str]]:
    return ((b.before, b.group) for b in barriers)
