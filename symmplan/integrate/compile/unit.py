"""One Dynamo graph: its parts, their plan, their turns in the segments."""

from __future__ import annotations

import contextlib
import functools
import logging
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
from symmplan.integrate.compile.crossing import Zone, hand_over, take_over
from symmplan.integrate.compile.parts import (
    alike,
    given_of,
    keep_away,
    mark,
    pinned,
    unreturned,
    writes_of,
)
from symmplan.integrate.compile.records import CompileOptions, Record, Rewritten
from symmplan.integrate.compile.residents import Residents
from symmplan.integrate.compile.rewrite import rewrite
from symmplan.integrate.compile.running import bytes_of
from symmplan.integrate.compile.structure import group_names, is_unmet, structure_of
from symmplan.memory import BACKENDS, resolve_backend
from symmplan.memory.groups import resolve_groups
from symmplan.model import Barrier
from symmplan.place.chooser import choose_ways
from symmplan.place.program import place
from symmplan.place.ways import Lowerings
from symmplan.planner import plan as plan_problem
from symmplan.planner.barriers import barriers_of, in_turn
from symmplan.planner.items import items_of
from symmplan.planner.order import order_of
from symmplan.registry import resolve_group_name, spec_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from torch import fx

    from symmplan.integrate.compile.pool import Pool, Shared
    from symmplan.model import Buffer, Plan, Problem

__all__ = ["Unit"]

_LOG = logging.getLogger("symmplan")


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
    record: Record = field(init=False, factory=Record)
    lowerings: Lowerings | None = field(init=False, default=None)
    plans: dict[str, Plan] = field(init=False, factory=dict)
    barriers: dict[str, tuple[tuple[str, str], ...]] = field(init=False, factory=dict)
    order: dict[str, tuple[str, ...]] = field(init=False, factory=dict)
    parts: dict[str, Rewritten] = field(init=False, factory=dict)
    shared: dict[str, Shared] = field(init=False, factory=dict)
    agreed: dict[str, Plan] = field(init=False, factory=dict)
    groups: dict[str, list[Any]] = field(init=False, factory=dict)
    taken: dict[str, tuple[Any, list[torch.Tensor]]] = field(init=False, factory=dict)
    crossing: dict[int, tuple[Buffer, Any]] = field(init=False, factory=dict)
    engines: set[str] = field(init=False, factory=set)
    zone: Zone | None = field(init=False, default=None)
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
        hidden = (overload for _, overload, _ in hidden_calls(module.graph, module))
        return any(spec_for(o) for o in [*hidden, *map(called, module.graph.nodes)] if o)

    def _prepare(self, module: fx.GraphModule) -> Lowerings:
        """How declared ops run; decided by the groups of the first part that has any."""
        if self.lowerings is not None:
            return self.lowerings
        names: dict[str, None] = {}
        for node in module.graph.nodes:
            overload = called(node)
            spec = None if overload is None else spec_for(overload)
            if overload is not None and spec is not None:
                names[resolve_group_name(spec, overload, node.args, node.kwargs)] = None
        backend = resolve_backend(self.settings.memory, self.device, resolve_groups(names))
        lowerings = Lowerings(backend.name, self.settings.collectives)
        if names:
            self.lowerings = lowerings
        return lowerings

    def rewrite(
        self, module: fx.GraphModule, part: str, fake_mode: Any, *, fixed: bool = False
    ) -> Rewritten | None:
        """Make one part follow its plan; None if it has nothing in symmetric memory.

        Args:
            module: The part.
            part: ``"forward"``, ``"backward"`` or ``"inference"``.
            fake_mode: The mode of its fake tensors.
            fixed: Whether what its forward saved must have the same addresses in each run.
        """
        with self.timed():
            return self._rewrite(module, part, fake_mode, fixed=fixed)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count what runs inside as symmplan's part of compiling."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.record.seconds += time.perf_counter() - begin

    def _rewrite(
        self, module: fx.GraphModule, part: str, fake_mode: Any, *, fixed: bool
    ) -> Rewritten | None:
        if not self.declares(module):
            return None
        lowerings = self._prepare(module)
        self._limit(module)
        other = writes_inductor if self.settings.inner == "inductor" else writes_eager
        producer = functools.partial(lowerings.producer, other=other)
        saved, given = self.cross(module, part)
        capture = functools.partial(
            capture_fx,
            module,
            prefix=f"{part}.",
            lookup=lowerings.lookup,
            skip=lowerings.skip,
            producer=producer,
            keep=self.residents.candidates(module, part) if self.settings.bind else frozenset(),
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
        if not captured.sites and not captured.problem.unplanned:
            return None
        if self.settings.debug:
            captured = plan_poison(captured)
        self.record.add(captured)
        plan = self._plan(captured, part)
        self.record.plans[part] = plan
        self.residents.plan(captured, part, lowerings.memory)
        if all(s.buffer is None for s in captured.sites):
            return None
        # Parts may run in another order than planned (two forwards, then two backwards), so each
        # part also gets the barriers that it needs when it follows itself.
        alone = barriers_of(captured.problem, items_of(captured.problem), plan.placements)
        kept = self.residents.barriers(part)
        self.barriers[part] = in_turn(*map(_points, (plan.barriers, alone, kept)))
        self.order[part] = tuple(o.name for o in captured.problem.operations)
        self.engines.update(chosen.engines.values())
        places = given_of(module, captured, plan, fixed=fixed)
        self._save(module, captured, plan)
        barriers = [Barrier(before, group) for before, group in self.barriers[part]]
        program = place(captured, plan, lowerings, chosen.engines, barriers)
        inputs = rewrite(module, program, fake_mode)
        leaves = {i: plan.placements[buffer] for i, buffer in captured.saved.items()}
        written = writes_of(captured, plan, places)
        copies = sum(i.kind.startswith("copy") for i in program.instructions)
        calls = len(program.calls)
        self.parts[part] = Rewritten(part, inputs, leaves, places, written, self, calls, copies)
        return self.parts[part]

    def cross(self, module: fx.GraphModule, part: str) -> tuple[Sequence[int], dict[str, Buffer]]:
        """The outputs that only the backward gets, and the inputs that lie in placements.

        A backward is changed, also if it declares nothing: it returns no part of a placement.
        """
        seen = saved_outputs()
        if seen is None or part == "inference":
            return (), {}
        first, sizes = seen
        if part == "forward":
            (output,) = (n for n in module.graph.nodes if n.op == "output")
            return range(first, len(output.args[0])), {}
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        found = {
            at: buffer
            for i, (buffer, like) in self.crossing.items()
            if (at := sizes + i - first) < len(inputs) and alike(inputs[at].meta["val"], like)
        }
        keep_inputs(found)
        kept = [inputs[i] for i in found]
        mark(module, kept)
        unreturned(module, kept)
        return (), {inputs[i].name: buffer for i, buffer in found.items()}

    def _save(self, module: fx.GraphModule, captured: Captured, plan: Plan) -> None:
        """Remember what a forward leaves in placements."""
        if not captured.saved:
            return
        (output,) = (n for n in module.graph.nodes if n.op == "output")
        buffers = {b.name: b for b in pinned(plan).buffers}
        for i, name in captured.saved.items():
            self.crossing[i] = (buffers[name], output.args[0][i].meta["val"])
        names = sorted({*captured.saved.values()})
        self.zone = Zone(
            structure_of(plan), tuple((plan.placements[n], buffers[n].group) for n in names)
        )
        self.pool.zone(self.zone)
        self.record.crossing_bytes += sum(buffers[n].nbytes for n in names)

    def _limit(self, module: fx.GraphModule) -> None:
        """Bound the sizes of declared tensors, so that they can be planned."""
        declared = [n for n in module.graph.nodes if (o := called(n)) is not None and spec_for(o)]
        wanted = [t for n in declared for t in (n, *n.all_input_nodes)]
        for name, size in limit(module.graph, wanted).items():
            self._note_outgrown(name, *size)

    def _note_outgrown(self, name: str, now: int, largest: int) -> None:
        """Say so where the graph is compiled again because a size was too large for the plan."""
        key = (compat.compiled_frame(), name)
        before = self.pool.bounds.get(key)
        self.pool.bounds[key] = largest
        if before is not None and now > before:
            text = (
                f"a size outgrew its plan: {name} is {now}, planned were up to {before}; the graph "
                f"is compiled and planned again, on all ranks, for up to {largest}"
            )
            self.record.outgrown.append(text)
            _LOG.warning(text)

    def _plan(self, captured: Captured, part: str) -> Plan:
        """Plan one part, together with the parts before it if they have not run yet."""
        effort = self.settings.effort
        before = next(iter(self.plans.values()), None)
        if before is not None and not self.shared:
            plan = _checked_plan(join([pinned(before), captured.problem]), effort)
            if self._keeps(before, plan):
                for name in (*self.plans, part):
                    self.plans[name] = self.record.plans[name] = plan
                return plan
        plan = _checked_plan(captured.problem, effort)
        kept = self.pool.kept(structure_of(plan), but=self.zone)
        if kept:
            apart = _checked_plan(keep_away(captured.problem, kept), effort)
            if structure_of(apart) == structure_of(plan):
                plan = apart
        self.plans[part] = plan
        return plan

    def _keeps(self, before: Plan, plan: Plan) -> bool:
        """Whether the parts that are already compiled are right under the new plan, too."""
        if any(plan.placements[name] != place for name, place in before.placements.items()):
            return False
        compiled = {o.name for o in before.problem.operations}
        inserted = [point for points in self.barriers.values() for point in points]
        asked = (p for p in _points(plan.barriers) if p[0] in compiled)
        return len(in_turn(inserted, asked)) == len(inserted)

    def enter(self, rewritten: Rewritten, args: list[Any]) -> None:
        """Begin to run a part: add to its inputs what it takes of the segments.

        Collective: the first time, over the groups of the plan; it agrees and allocates.
        """
        part = rewritten.part
        if not all(map(compat.is_registered, self.groups.get(part, ()))):
            self._forget(part)
        shared = self.shared.get(part) or self._settle(part)
        if part not in self.groups:
            self.residents.settle(part, args)
            names = [*group_names(self.agreed[part]), *self.residents.groups(part)]
            members = resolve_groups(names).values()
            self.groups[part] = [g.process_group for g in members if g.process_group is not None]
        shared.enter(
            self.agreed[part],
            functools.partial(_prepare, shared, rewritten, args),
            writes=rewritten.copies_back,
            groups=self.groups[part],
        )
        if shared.arena.races is not None:
            shared.arena.races.follow(self.plans[part].placements)
        try:
            arena, taken = self.taken.get(part, (None, []))
            if arena is not shared.arena or shared.arena.released:
                arena = shared.arena
                taken = [bytes_of(arena.segments[i.segment].tensor, i) for i in rewritten.inputs]
                self.taken[part] = (arena, taken)
            args.extend(taken)
        except BaseException:
            shared.leave()
            raise

    def hand_over(self, rewritten: Rewritten, results: Any) -> Any:
        """What a part returns: what it saved lies in its placements."""
        self.passed(rewritten.part)
        self.shared[rewritten.part].finish(self.agreed[rewritten.part])
        if not rewritten.saved:
            return results
        return hand_over(self.shared[rewritten.part], rewritten, list(results))

    def passed(self, part: str) -> None:
        """Note that a part has run: a backward is due behind its forward."""
        if self.zone is not None:
            self.zone.ahead = part == "forward" or keeps_graph()

    def leave(self, rewritten: Rewritten) -> None:
        """End the run of a part."""
        self.record.ran(rewritten)
        self.shared[rewritten.part].leave()

    def _forget(self, part: str) -> None:
        """A process group of a part is gone. Another may have its name, and other ranks."""
        for known in (self.groups, self.shared, self.agreed, self.taken):
            known.pop(part, None)
        self.residents.forget(part)

    def _settle(self, part: str) -> Shared:
        assert self.lowerings is not None
        plan = self.plans[part]
        shared, agreed = self.pool.take(
            plan,
            self.lowerings.memory,
            self.device,
            self._inserted(plan),
            engines=self.engines,
            crosses=any(p.saved for n, p in self.parts.items() if self.plans[n] is plan),
        )
        for name, other in self.plans.items():
            if other is plan:
                self.shared[name], self.agreed[name] = shared, agreed
        return shared

    def _inserted(self, plan: Plan) -> list[tuple[int, str]]:
        """``(place in the plan's order, group)`` of the barriers that its parts run.

        Also of those that a part may run on its entry, or make all later ones run. See
        [Note: turns] in `symmplan.integrate.compile.pool`.
        """
        index = order_of(plan.problem).index
        groups = [g for s in plan.segments for g in s.groups] if is_unmet(plan) else []
        found: list[tuple[int, str]] = []
        for part, points in self.barriers.items():
            if self.plans[part] is not plan:
                continue
            mine = [index[name] for name in self.order[part]]
            end = max(mine) + 1  # where its output is
            found += [(min(mine), g) for g in groups if self.parts[part].copies_back]
            found += [(index.get(before, end), group) for before, group in points]
            found += [(end, g) for g in groups if self.parts[part].saved]
        return found


def _prepare(shared: Shared, rewritten: Rewritten, args: list[Any]) -> None:
    """What a rank has to do before peers touch the bytes for a run."""
    take_over(shared, rewritten, args)
    shared.occupy(args)


def _checked_plan(problem: Problem, effort: Literal["fast", "optimal"]) -> Plan:
    """A plan that is verified before anything runs in it."""
    plan = plan_problem(problem, effort=effort)
    plan.verify()
    return plan


def _points(barriers: Iterable[Barrier]) -> Iterable[tuple[str, str]]:
    return ((b.before, b.group) for b in barriers)
