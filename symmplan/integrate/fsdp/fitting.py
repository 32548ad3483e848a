"""FSDP2's steps on their way to a plan: how collectives run, and which bytes they may take."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from attrs import define, evolve, field

from symmplan.choose.choice import NO_ROOM
from symmplan.choose.chooser import Chosen
from symmplan.coordination.all_gather import all_agree
from symmplan.integrate.fsdp.cases import case_of, demotables_of, smallest_of, why_not_measured
from symmplan.integrate.fsdp.step_plans import StepPlan, StepProblem
from symmplan.memory.device_memory import device_memory
from symmplan.memory.room import LEFT
from symmplan.model import Algorithm
from symmplan.planner.budget import within
from symmplan.runtime.measure import choose_algorithms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from symmplan.capture.fsdp_recording import Call, Recording
    from symmplan.choose.cases import Case
    from symmplan.choose.choice import Choice
    from symmplan.integrate.fsdp.cases import CallCase
    from symmplan.integrate.fsdp.layout import Layout
    from symmplan.integrate.fsdp.segments import Memory
    from symmplan.model import AlgorithmName, Plan
    from symmplan.planner.budget import Demotable
    from symmplan.runtime.options import Options

__all__ = ["StepFitting", "demotables"]


@define(eq=False)
class StepFitting:
    """What the plans of one model may place, and by which algorithms.

    Args:
        options: How `apply` was asked to work.
        memory: What the plans lie in.
        live: How many modules may be unsharded at the same time; None as in the program.
        layouts: ``{site: layout}`` of the modules whose parameters can live in placements.

    Attributes:
        choices: What was measured of all plans, in the order of the program.
    """

    _options: Options
    _memory: Memory
    _live: int | None
    _layouts: Mapping[str, Layout]
    choices: tuple[Choice, ...] = field(init=False, default=())

    def choose(self, recordings: Sequence[Recording]) -> tuple[Chosen[Call], int | None]:
        """How the collectives that were recorded run, and what `limited` says of them.

        Collective: yes, over all groups of the model, where anything is new.
        """
        memory, device = self._memory, self._memory.device
        preparation = memory.preparation
        if preparation.refusal is not None:
            return Chosen(), None
        measures = self._options.chosen(device) == "measure"

        def case(call: Call) -> CallCase:
            ranks, levels = memory.groups[call.group].size(), call.group in memory.levels
            return case_of(call, preparation.memory, device, ranks, levels=levels)

        cases: dict[Call, Case] = {}
        left_out: dict[Call, str] = {}
        for call in (r.collectives[i] for r in recordings for i in r.ran):
            known = case(call)
            why = memory.unreached.get(call.group, "")
            if measures and not why:
                why = why_not_measured(known, device)
            if why:
                left_out[call] = why
            else:
                cases[call] = known
        limit = self.limited(recordings, cases, left_out) if measures and cases else None
        if limit == 0:
            left_out |= dict.fromkeys(cases, NO_ROOM)
            cases = {}
        given = (cases, left_out, device, preparation)
        chosen = choose_algorithms(*given, planned=memory.groups, traces=False)
        self.choices = tuple(dict.fromkeys((*self.choices, *chosen.choices)))
        return chosen, limit

    def limited(
        self,
        recordings: Sequence[Recording],
        cases: Mapping[Call, Case],
        left_out: Mapping[Call, str],
    ) -> int | None:
        """Bytes to which a full device limits the first plan that places anything.

        See [Note: what the program had] in `symmplan.memory.room`: that plan leaves nothing out, so
        each collective takes as few bytes as it can.

        Returns:
            None if the device is not full. 0 if no plan would place anything, or if it is full and
            has no room for such a plan and what measuring takes: communicators and loaded kernels
            keep their bytes, which the program would lack. Segments that nobody uses are room for
            it, as those of a handle that was removed.

        Collective: yes, over all groups of the model, if it has no segments.
        """
        memory, given = self._memory, self._options.capacity is not None
        placed = memory.arena is not None and memory.arena.segment_bytes > 0
        if given or placed or device_memory(memory.device) is None:
            return None
        free = memory.room(below=False, reserve=LEFT)
        if not (free.whole or free.held):
            return 0
        ordinary = {call: Algorithm("ordinary", why) for call, why in left_out.items()}
        smallest = {call: Algorithm(smallest_of(case)) for call, case in cases.items()}
        chosen = Chosen({**ordinary, **smallest}, cases=cases)
        problem, first = self.problem(recordings, chosen), recordings[0].collectives
        room = memory.room(below=self._live is None)

        def tried() -> tuple[int, bool, StepPlan]:
            made = self.within(room.nbytes, problem, chosen)
            budget = made.plan.budget
            nbytes = self.taken(made, first) if budget is None else budget.wanted_bytes
            places = any(p.buffer is not None for s in made.stretches for p in s)
            return nbytes, places, made if budget is None else problem.plan({}, {})

        whole, places, made = memory.preparation.attempt(tried, memory.groups)
        timeout = self._options.timeout
        if not all_agree("a whole plan", [whole, places], memory.groups, timeout):
            return None
        nbytes = made.plan.peak_bytes + made.beyond(memory.preparation.memory)
        means = made.algorithms(first)
        program, fits = memory.program, whole <= room.whole
        if free.held and memory.keeps_for(made.plan):  # it takes nothing more of the device
            nbytes, fits = 0, True
        elif not free.whole:
            return 0
        full, fits = program.filled(nbytes, means, memory.device, memory.groups, fits=fits)
        if full or whole > free.nbytes:
            return whole if fits else 0
        return None if places else 0

    def _algorithm(
        self, chosen: Chosen[Call], gave: Mapping[Any, AlgorithmName], call: Call
    ) -> Algorithm:
        """How a collective runs, where those of some cases were demoted."""
        preparation = self._memory.preparation
        if preparation.refusal is not None:
            return Algorithm("ordinary", preparation.reason)
        return chosen.algorithm(call, gave)

    def problem(self, recordings: Sequence[Recording], chosen: Chosen[Call]) -> StepProblem:
        """What recordings need, with collectives that run as was chosen."""
        groups = self._memory.groups
        return StepProblem(
            recordings=recordings,
            ranks={n: tuple(dist.get_process_group_ranks(g)) for n, g in groups.items()},
            zero_copy=self.unsharded,
            algorithm=functools.partial(self._algorithm, chosen),
            live=self._live,
        )

    def within(self, room: int | None, problem: StepProblem, chosen: Chosen[Call]) -> StepPlan:
        """The plan that takes no more than ``room`` bytes; None for no limit.

        Communicators and windows count, unless a plan leaves nothing out only if they do not.
        """
        counted = self._fitting(room, problem, chosen, communicators=True)
        if not counted.leaves_out:
            return counted
        other = self._fitting(room, problem, chosen, communicators=False)
        return counted if other.leaves_out else other

    def _fitting(
        self, room: int | None, problem: StepProblem, chosen: Chosen[Call], *, communicators: bool
    ) -> StepPlan:
        first = problem.recordings[0].collectives

        def planned(
            demoted: Mapping[Any, AlgorithmName],
        ) -> tuple[Plan, list[Demotable], StepPlan]:
            made = problem.plan({}, demoted)
            return made.plan, demotables(made, chosen), made

        plan, made = within(
            room, planned, lambda _, made: self.taken(made, first, communicators=communicators)
        )
        return evolve(made, plan=plan)

    def taken(self, made: StepPlan, first: Sequence[Call], *, communicators: bool = True) -> int:
        """Bytes of a plan, and those that the program has besides where nobody set a limit.

        Args:
            made: The plan.
            first: The collectives of the step whose memory was looked at.
            communicators: Whether those that the plan needs count, and its windows.

        Collective: as `ProgramUsage.needed_besides`.
        """
        if self._options.capacity is not None:
            return made.plan.peak_bytes
        memory, nbytes = self._memory, made.plan.peak_bytes
        beyond = made.beyond(memory.preparation.memory) if communicators else 0
        given = nbytes, beyond, first, self.unsharded, made.algorithms(first)
        slack = memory.preparation.slack
        return nbytes + memory.program.needed_besides(*given, slack, memory.groups)

    @property
    def unsharded(self) -> dict[str, int]:
        """``{site: bytes}`` of the unsharded parameters that a plan may place."""
        return {site: x.nbytes for site, x in self._layouts.items()}


def demotables(made: StepPlan, chosen: Chosen[Call]) -> list[Demotable]:
    """What can be demoted in a plan."""
    return demotables_of((p for stretch in made.stretches for p in stretch), chosen)
