"""Plans of recorded steps, before they have memory: their problems and their contents."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attrs import evolve, field, frozen

from symmplan.capture.fsdp import problem_of
from symmplan.capture.fsdp_unsharded import kept_after_forward, most_alive, with_kept
from symmplan.model import Alternative
from symmplan.planner.parameters import plan_with_parameters

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
        held: What `symmplan.integrate.fsdp.memory.Memory.prepare` made for it.
    """

    plan: Plan
    stretches: Stretches
    tenants: Tenants = field(factory=dict)
    demoted: Demoted = field(factory=dict)
    held: tuple[Arena, int] | None = None


@frozen(eq=False, kw_only=True)
class StepProblem:
    """The problem of recorded steps.

    Attributes:
        recordings: The steps.
        ranks: The global ranks of each group.
        zero_copy: ``{site: bytes}`` of the modules whose parameters can live in placements.
        algorithm: The algorithm of a collective, given the demotions.
        effort: How long to search.
        live: How many modules may be unsharded at the same time; None as in the program.
    """

    recordings: Sequence[Recording]
    ranks: Mapping[str, tuple[int, ...]]
    zero_copy: Mapping[str, int]
    algorithm: Callable[[Demoted, Call], Algorithm]
    effort: Literal["fast", "optimal"]
    live: int | None

    def plan(self, tenants: Tenants, demoted: Demoted) -> StepPlan:
        """A plan, verified."""
        problem, parameters, slots, stretches = self._problem(tenants, demoted, self.live)
        plan = plan_with_parameters(problem, parameters, self.effort, slots)
        plan.verify()
        return StepPlan(plan, stretches, tenants, dict(demoted))

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
