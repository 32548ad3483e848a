"""Plans of recorded steps, before they have memory: their problems and their contents."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import evolve, field, frozen

from symmplan.capture.fsdp import problem_of
from symmplan.capture.fsdp_unsharded import kept_after_forward, most_alive, with_kept
from symmplan.memory.beyond import expected_beyond
from symmplan.model import Alternative
from symmplan.planner.parameters import plan_with_parameters, without_room

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.capture.fsdp import Planned
    from symmplan.capture.fsdp_recording import Call, Recording
    from symmplan.memory import Arena
    from symmplan.model import Algorithm, AlgorithmName, Buffer, Plan, Problem
    from symmplan.planner.budget import Demotable

    #: The collectives of each recording.
    Stretches: TypeAlias = tuple[tuple[Planned, ...], ...]
    #: By the number of a tenant what it has of each of its segments.
    Tenants: TypeAlias = Mapping[int, Sequence[Buffer]]
    Demoted: TypeAlias = Mapping[Any, AlgorithmName]

__all__ = ["StepPlan", "StepProblem"]


@frozen(eq=False)
class StepPlan:
    """A plan of recorded steps.

    Attributes:
        plan: The plan.
        stretches: The collectives of each recording.
        tenants: The tenants that have bytes in it, too.
        demoted: ``{key of a demoted collective: its algorithm}``.
        held: What `symmplan.integrate.fsdp.segments.Memory.prepare` made for it.
    """

    plan: Plan
    stretches: Stretches
    tenants: Tenants = field(factory=dict)
    demoted: Demoted = field(factory=dict)
    held: tuple[Arena, int] | None = None

    @property
    def by_engines(self) -> frozenset[str]:
        """Names of the groups of which copy engines run some collective."""
        placed = (p for stretch in self.stretches for p in stretch if p.buffer is not None)
        return frozenset(p.call.group for p in placed if p.algorithm.name == "copy engine")

    def beyond(self, memory: str) -> int:
        """Bytes of its communicators and windows, with a memory backend."""
        return expected_beyond(memory, [s.groups for s in self.plan.segments], self.by_engines)

    def algorithms(self, collectives: Sequence[Call]) -> list[AlgorithmName]:
        """How each collective of the first recording runs."""
        placed = {p.call: p.algorithm.name for p in self.stretches[0] if p.buffer is not None}
        return [placed.get(call, "ordinary") for call in collectives]

    @property
    def leaves_out(self) -> bool:
        """Whether something is ordinary because there is no room for it."""
        budget = self.plan.budget
        return budget is not None and any(d.after == "ordinary" for d in budget.demotions)


@frozen(eq=False, kw_only=True)
class StepProblem:
    """The problem of recorded steps.

    Attributes:
        recordings: The steps.
        ranks: The global ranks of each group.
        zero_copy: ``{site: bytes}`` of the modules whose parameters can live in placements.
        algorithm: The algorithm of a collective, given the demotions.
        live: How many modules may be unsharded at the same time; None as in the program.
    """

    recordings: Sequence[Recording]
    ranks: Mapping[str, tuple[int, ...]]
    zero_copy: Mapping[str, int]
    algorithm: Callable[[Demoted, Call], Algorithm]
    live: int | None

    def plan(self, tenants: Tenants, demoted: Demoted) -> StepPlan:
        """A plan, verified."""
        problem, parameters, slots, stretches = self._problem(tenants, demoted, self.live)
        plan = plan_with_parameters(problem, parameters, slots)
        plan.verify()
        return StepPlan(plan, stretches, tenants, dict(demoted))

    def compared(self, last: StepProblem) -> tuple[StepProblem, str]:
        """What is left of the problem where room is short, and its outcome if that is the last's.

        The latter is empty if a plan would change anything.
        """
        problem = self._with_room()
        outcome = problem._outcome()
        return problem, outcome if outcome == last._outcome() else ""

    def _with_room(self) -> StepProblem:
        """The problem without the gathers that a plan has no room for, behind the first recording.

        See [Note: room for one module more] in `symmplan.planner.parameters`.
        """
        problem, parameters, _, stretches = self._problem({}, {}, self.live)
        asked = {
            p.buffer: (number, p.index)
            for number, recording in enumerate(self.recordings)
            for p in stretches[number]
            if number and p.buffer in parameters and p.index in recording.outside
        }
        left = without_room(problem, parameters, [*asked]) if asked else ()
        if not left:
            return self
        recordings = [
            evolve(r, unplaced=r.unplaced | {asked[b][1] for b in left if asked[b][0] == number})
            for number, r in enumerate(self.recordings)
        ]
        return evolve(self, recordings=recordings)

    def _outcome(self) -> str:
        """What a plan means for the program.

        Where the parameters of each module are, how each collective runs, and how many bytes all
        that takes.
        """
        made = self.plan({}, {})
        calls = [p for stretch in made.stretches for p in stretch]
        places = made.plan.placements
        lies = {p.call.key.site: places[p.buffer].offset for p in calls if p.zero_copy and p.buffer}
        runs = {repr((p.call, p.algorithm.name)) for p in calls}
        ran = {index for r in self.recordings for what, index in r.events if what == "tenant"}
        return repr((made.plan.peak_bytes, sorted(lies.items()), sorted(runs), sorted(ran)))

    def advised(self, made: StepPlan, demotables: Sequence[Demotable]) -> StepPlan:
        """A plan that knows what it would take otherwise.

        With one module more or less that has its parameters, and with each of ``demotables`` in
        algorithms that take fewer bytes.
        """
        alive = self._alive(self.live)
        others = {}
        if alive:
            others = {self._alive(live): live for live in (alive - 1, alive + 1) if live}
            others.pop(alive, None)
        alternatives = []
        for other, live in others.items():
            problem, parameters, slots, _ = self._problem(made.tenants, made.demoted, live)
            alternatives.append(Alternative(other, problem, parameters, slots))
        for demotable in demotables:
            for algorithm in demotable.less:
                demoted = {**made.demoted, demotable.key: algorithm}
                problem, parameters, slots, _ = self._problem(made.tenants, demoted, self.live)
                gave = demotable.demoted(algorithm)
                alternatives.append(Alternative(alive, problem, parameters, slots, gave))
        plan = evolve(made.plan, unsharded_modules=alive or None, alternatives=tuple(alternatives))
        return evolve(made, plan=plan)

    def _as_kept(self, live: int | None) -> list[Recording]:
        """The recordings, as if modules that are to stay unsharded had stayed so."""
        kept = kept_after_forward(self.recordings, self.zero_copy, live)
        return [with_kept(recording, kept) for recording in self.recordings]

    def _alive(self, live: int | None) -> int:
        """How many modules are unsharded at the same time in a plan with this option."""
        return most_alive(self._as_kept(live), self.zero_copy, live)

    def _problem(
        self, tenants: Tenants, demoted: Demoted, live: int | None
    ) -> tuple[Problem, frozenset[str], frozenset[str], Stretches]:
        """What is needed, which buffers are parameters and shared slots, and the collectives."""
        algorithm = functools.partial(self.algorithm, demoted)
        problem, stretches = problem_of(
            self._as_kept(live), self.ranks, algorithm, self.zero_copy, tenants, live
        )
        planned = [p for s in stretches for p in s]
        parameters = frozenset(p.buffer for p in planned if p.zero_copy and p.buffer)
        shared = (p.buffer for p in planned if p.algorithm.name == "shared push" and p.buffer)
        return problem, parameters, frozenset(shared), stretches
