"""One Dynamo graph: its parts, their plan, their turns in the segments."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, evolve, field, frozen

from symmplan import _compat as compat
from symmplan.capture import Captured, capture_fx, join
from symmplan.capture.bounds import limit
from symmplan.capture.graphs import called, hidden_calls
from symmplan.capture.producers import writes_eager, writes_inductor
from symmplan.integrate.choice import Choice, refused
from symmplan.integrate.fsdp_bytes import lend
from symmplan.integrate.lowering import Lowerings
from symmplan.integrate.poison import plan_poison
from symmplan.integrate.residents import Residents
from symmplan.integrate.rewrite import rewrite
from symmplan.memory import resolve_backend
from symmplan.memory.groups import resolve_groups
from symmplan.memory.own import own_work
from symmplan.planner import plan as plan_problem
from symmplan.planner.barriers import barriers_of
from symmplan.planner.items import items_of
from symmplan.registry import resolve_group_name, spec_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch
    from torch import fx

    from symmplan.integrate.emit import SegmentInput
    from symmplan.integrate.pool import Pool, Shared
    from symmplan.model import Barrier, Plan, Problem

__all__ = [
    "Record",
    "Rewritten",
    "Settings",
    "Unit",
    "fake_mode_of",
    "with_segments",
]

_LOG = logging.getLogger("symmplan")


@frozen
class Settings:
    """How a compile backend was asked to work.

    Attributes:
        inner: Who compiles the rewritten graphs, ``"inductor"`` or ``"eager"``.
        memory: Name of the memory backend.
        effort: How hard the planner tries, ``"fast"`` or ``"optimal"``.
        timeout: Seconds that ranks wait for each other before they raise.
        choose: ``"measure"``, ``"placed"``, or ``"auto"``: measure on devices.
        debug: Overwrite every placement when its buffer dies, so that a late reader shows.
        bind: Keep static inputs of declared ops in symmetric memory.
    """

    inner: str
    memory: str
    effort: Literal["fast", "optimal"]
    timeout: float
    choose: Literal["auto", "measure", "placed"]
    debug: bool
    bind: bool

    def chooses(self, device: torch.device) -> bool:
        """Whether collectives are measured before they are planned."""
        return self.choose == "measure" or (self.choose == "auto" and device.type != "cpu")


@frozen
class Rewritten:
    """A part that follows a plan.

    Attributes:
        part: ``"forward"``, ``"backward"`` or ``"inference"``.
        inputs: What it takes of the segments after its own inputs, in order.
    """

    part: str
    inputs: tuple[SegmentInput, ...]


@define(eq=False)
class Record:
    """What is remembered of a graph, also when its code is gone.

    Attributes:
        plans: The plan of each part.
        kept: Plans of inputs that lie in symmetric memory from run to run.
        sites: ``(operation, op, argument or result, how, reason)`` of every declared tensor.
        choices: What was measured.
        outgrown: Of each size that had become too large for an earlier plan, what was logged.
        seconds: Symmplan's part of compiling it.
    """

    plans: dict[str, Plan] = field(init=False, factory=dict)
    kept: dict[str, Plan] = field(init=False, factory=dict)
    sites: list[tuple[str, str, str, str | None, str]] = field(init=False, factory=list)
    choices: list[Choice] = field(init=False, factory=list)
    outgrown: list[str] = field(init=False, factory=list)
    seconds: float = field(init=False, default=0.0)

    def add(self, captured: Captured) -> None:
        """Remember the declared tensors of a part."""
        self.sites += [
            (
                f"{captured.prefix}{s.node.name}",
                captured.specs[s.node].op,
                s.where,
                s.how,
                s.reason,
            )
            for s in captured.sites
        ]


@define(eq=False)
class Unit:
    """One Dynamo graph: its parts (forward, backward or inference) and their plan.

    The parts run one after the other and nothing in a placement outlives its part, so they are
    planned as one program: the first gets the offsets it likes best, the second is planned around
    the first, whose placements are fixed by then.
    """

    settings: Settings
    device: torch.device
    pool: Pool
    record: Record = field(init=False, factory=Record)
    lowerings: Lowerings | None = field(init=False, default=None)
    plans: dict[str, Plan] = field(init=False, factory=dict)
    barriers: dict[str, tuple[tuple[str, str], ...]] = field(init=False, factory=dict)
    shared: dict[str, Shared] = field(init=False, factory=dict)
    given: dict[str, tuple[Any, list[torch.Tensor]]] = field(init=False, factory=dict)
    residents: Residents = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.residents = Residents(self.pool, self.device, self.settings.timeout, self.record.kept)

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
        lowerings = Lowerings(backend.name)
        if names:
            self.lowerings = lowerings
        return lowerings

    def rewrite(self, module: fx.GraphModule, part: str, fake_mode: Any) -> Rewritten | None:
        """Make one part follow its plan; None if it has nothing in symmetric memory."""
        with self.timed():
            return self._rewrite(module, part, fake_mode)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count what runs inside as symmplan's part of compiling."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.record.seconds += time.perf_counter() - begin

    def _rewrite(self, module: fx.GraphModule, part: str, fake_mode: Any) -> Rewritten | None:
        if not self.declares(module):
            return None
        lowerings = self._prepare(module)
        self._limit(module)
        other = writes_inductor if self.settings.inner == "inductor" else writes_eager
        producer = functools.partial(lowerings.producer, other=other)
        capture = functools.partial(
            capture_fx,
            module,
            prefix=f"{part}.",
            lookup=lowerings.lookup,
            skip=lowerings.skip,
            producer=producer,
            keep=self.residents.candidates(module, part) if self.settings.bind else frozenset(),
        )
        captured = capture()
        reasons: dict[fx.Node, str] = {}
        while partly := lowerings.partly(captured):
            reasons |= partly
            captured = capture(refused=reasons)
        if self.settings.chooses(self.device):
            slower, choices = refused(captured, lowerings, self.device, self.settings.timeout)
            self.record.choices += choices
            if slower:
                reasons |= slower
                captured = capture(refused=reasons)
        if not captured.sites and not captured.problem.unplanned:
            return None
        if self.settings.debug:
            captured = evolve(captured, problem=plan_poison(captured.problem))
        self.record.add(captured)
        plan = self._plan(captured, part)
        self.record.plans[part] = plan
        self.residents.plan(captured, part, lowerings.memory)
        if not captured.problem.buffers and not captured.kept:
            return None
        # Parts may run in another order than planned (two forwards, then two backwards), so each
        # part also gets the barriers that it needs when it follows itself.
        alone = barriers_of(captured.problem, items_of(captured.problem), plan.placements)
        kept = self.residents.barriers(part)
        self.barriers[part] = tuple(dict.fromkeys(_points([*plan.barriers, *alone, *kept])))
        inputs = rewrite(
            module,
            captured,
            plan,
            self.barriers[part],
            lowerings,
            fake_mode,
        )
        return Rewritten(part, inputs)

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
            fixed = evolve(
                before.problem,
                buffers=[
                    evolve(b, offset=before.placements[b.name].offset)
                    for b in before.problem.buffers
                ],
            )
            plan = _checked_plan(join([fixed, captured.problem]), effort)
            if self._keeps(before, plan):
                for name in (*self.plans, part):
                    self.plans[name] = self.record.plans[name] = plan
                return plan
        plan = _checked_plan(captured.problem, effort)
        self.plans[part] = plan
        return plan

    def _keeps(self, before: Plan, plan: Plan) -> bool:
        """Whether the parts that are already compiled are right under the new plan, too."""
        if any(plan.placements[name] != place for name, place in before.placements.items()):
            return False
        compiled = {o.name for o in before.problem.operations}
        inserted = {point for points in self.barriers.values() for point in points}
        return all(p in inserted for p in _points(plan.barriers) if p[0] in compiled)

    def enter(self, rewritten: Rewritten) -> list[torch.Tensor]:
        """Begin to run a part: what it takes of the segments.

        Collective: the first time, over the groups of the plan; it agrees and allocates.
        """
        part = rewritten.part
        shared = self.shared.get(part)
        if shared is None:
            shared = self._settle(part)
        shared.enter(self.plans[part])
        try:
            arena, given = self.given.get(part, (None, []))
            if arena is not shared.arena or shared.arena.released:
                arena = shared.arena
                given = [_bytes_of(arena.segments[i.segment].tensor, i) for i in rewritten.inputs]
                self.given[part] = (arena, given)
        except BaseException:
            shared.leave()
            raise
        return given

    def leave(self, rewritten: Rewritten) -> None:
        """End the run of a part."""
        self.shared[rewritten.part].leave()

    def _settle(self, part: str) -> Shared:
        assert self.lowerings is not None
        plan = self.plans[part]
        shared = self.pool.take(plan, self.lowerings.memory, self.device)
        for name, other in self.plans.items():
            if other is plan:
                self.shared[name] = shared
        return shared


def _bytes_of(segment: torch.Tensor, wanted: SegmentInput) -> torch.Tensor:
    """What a rewritten graph takes of a segment."""
    begin = wanted.lane or 0
    part = segment[begin : begin + wanted.numel * wanted.dtype.itemsize]
    if wanted.lane is not None:
        part = lend(part, _nothing)
    return part.view(wanted.dtype)


def _nothing() -> None:
    """The segment outlives the program that runs in it."""


def _checked_plan(problem: Problem, effort: Literal["fast", "optimal"]) -> Plan:
    """A plan that is verified before anything runs in it."""
    plan = plan_problem(problem, effort=effort)
    plan.verify()
    return plan


def _points(barriers: Iterable[Barrier]) -> Iterable[tuple[str, str]]:
    return ((b.before, b.group) for b in barriers)


def fake_mode_of(example_inputs: Sequence[Any]) -> Any:
    """The fake mode of the inputs, or a new one."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    return detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)


def with_segments(
    compiled: Callable[[list[Any]], Any], unit: Unit, rewritten: Rewritten
) -> Callable[[list[Any]], Any]:
    """Pass the segments after the graph's own inputs."""
    residents, part = unit.residents, rewritten.part

    def run(args: list[Any]) -> Any:
        segments = unit.enter(rewritten)
        try:
            copies = residents.enter(part, args)
            args.extend(segments)
            with own_work:
                results = compiled(args)
            return residents.leave(copies, results) if copies else results
        finally:
            unit.leave(rewritten)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
