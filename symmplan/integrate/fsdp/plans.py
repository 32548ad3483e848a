"""From what FSDP2 did in a step to a plan that has its memory, agreed by all ranks.

[Note: another program]
    Later steps may do what the first did not, as after ``set_reshard_after_forward(False)``. A plan
    of both has to do with the bytes that the first step had. If it has no room for something then,
    what the program has by itself is not known any more. So its segments are given back, and the
    next step is recorded without a plan, as the first was. A program in which both kinds of steps
    take turns would come to that again and again: it happens once for each kind.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from attrs import evolve

from symmplan.capture.fsdp_recording import with_widest
from symmplan.capture.fsdp_unsharded import kept_after_forward
from symmplan.coordination.all_gather import all_agree, all_gather_json, telling
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.world import current
from symmplan.integrate.fsdp.drops import merged
from symmplan.integrate.fsdp.fitting import StepFitting, demotables
from symmplan.integrate.fsdp.parameter_storage import ParameterStorage
from symmplan.integrate.fsdp.schedule import Schedule
from symmplan.memory.cache import fits
from symmplan.memory.device_memory import device_memory
from symmplan.memory.meeting.topology import served
from symmplan.memory.streams import synchronize
from symmplan.model import Buffer
from symmplan.place import engines
from symmplan.runtime.leases import in_use
from symmplan.runtime.tenants import timed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from symmplan.capture.fsdp_recording import Call, Key, Recording
    from symmplan.choose.choice import Choice
    from symmplan.choose.chooser import Chosen
    from symmplan.integrate.fsdp.layout import Layout
    from symmplan.integrate.fsdp.segments import Memory
    from symmplan.integrate.fsdp.step_plans import StepPlan, StepProblem
    from symmplan.integrate.fsdp.zero_copy import ZeroCopyUnshard
    from symmplan.memory import Arena
    from symmplan.model import Plan
    from symmplan.runtime.options import Options
    from symmplan.runtime.tenants import Tenant

__all__ = ["Planning"]

#: Where parts of FSDP2's segment begin, in bytes.
_ALIGN = 512


class Planning:
    """Makes the plans of one model.

    Args:
        options: How `apply` was asked to work.
        memory: What the plans lie in.
        live: How many modules may be unsharded at the same time; None as in the program.

    Attributes:
        live: The same.
        plan: The last plan, None before the first.
        unshards: The parameter groups whose parameters may live in placements.
        gradients_move: Whether sharded gradients are to be allocated on the program's stream.
        layouts: ``{site: layout}`` of those whose parameters can.
        flat: ``{site: why}`` of those whose parameters cannot.
        fitting: What of the steps has room, and how it runs.
        left: Whether the last recording has gathers that its plan has no room for.
    """

    def __init__(self, options: Options, memory: Memory, live: int | None = None) -> None:
        self.live = live
        self.plan: Plan | None = None
        self.unshards: list[ZeroCopyUnshard] = []
        self.gradients_move = False
        self.layouts: dict[str, Layout] = {}
        self.flat: dict[str, str] = {}
        self.fitting = StepFitting(options, memory, live, self.layouts)
        self._options = options
        self._memory = memory
        self.left = False
        self._kept: list[Recording] = []
        self._last: StepProblem | None = None
        self._made: StepPlan | None = None
        self._after_forward: Sequence[str] = ()
        # By the collectives of each, the steps after which all began again.
        self._others: set[tuple[Key, ...]] = set()

    def make(self, recording: Recording, followed: Schedule | None) -> Schedule | None:
        """Plan what was recorded, besides what was planned before.

        Returns:
            What to follow from now on: ``followed`` if that would be no other plan than the last;
            None if the next step is to be recorded, see [Note: another program].

        Raises:
            AgreementError: Ranks recorded different programs; raised on all of them.

        Collective: yes, over all groups of the model.
        """
        recordings = with_widest([*self._kept, recording])
        with (
            telling(self._memory.groups, self._options.timeout),
            # What is made here outlives the program's mode.
            torch.inference_mode(mode=False),
        ):
            try:
                return self._make(recordings, followed)
            except BaseException:
                self._vacate()
                raise

    def _make(self, recordings: Sequence[Recording], followed: Schedule | None) -> Schedule | None:
        memory, groups = self._memory, self._memory.groups
        preparation = memory.preparation
        self._agree()
        recordings = self._sent_alike(recordings)
        memory.program.had(recordings[-1], self.fitting.unsharded, memory.device)
        preparation.keeps_cache = memory.program.keeps_cache
        chosen, limit = self.fitting.choose(recordings)
        recordings = merged(recordings, groups, self._options.timeout)
        problem, last = self.fitting.problem(recordings, chosen), self._last
        if last is not None:
            problem, same = preparation.attempt(lambda: problem.compared(last), groups)
            self.left = bool(problem.recordings[-1].unplaced)
            if all_agree("same plan", same, groups, self._options.timeout):
                return followed
        self._vacate()
        prepare = functools.partial(self._prepared, problem, chosen, limit)
        made = preparation.attempt(prepare, groups, lambda made: memory.undo(made.held))
        if made is None:
            self._begin_again()
            return None
        plan, calls = made.plan, [p for stretch in made.stretches for p in stretch]
        memory.adopt(made.held)
        for number, needs in made.tenants.items():
            tenant = memory.tenants[number]
            assert tenant is not None
            places = [plan.placements[g.name] for g in needs]
            assert memory.arena is not None
            there = dict(zip(tenant.arena.segments, places, strict=True))
            tenant.move_in(timed(tenant, memory.arena, there))
        self.plan, self._last = plan, problem
        recordings = self._kept = list(problem.recordings)
        kept = kept_after_forward(recordings, self.layouts, self.live)
        self._made, self._after_forward = evolve(made, held=None), kept
        self._settle()
        if made.held is not None:
            memory.take_back_replaced()
        first = made.algorithms(recordings[0].collectives)
        moves = memory.program.gradients_move(plan.peak_bytes, first, memory.device)
        self.gradients_move = moves and bool(self.unshards)  # which say whether there are gradients
        algorithms = ["ordinary" if p.buffer is None else p.algorithm.name for p in calls]
        preparation.log(plan, algorithms)
        return Schedule(plan, made.stretches)

    def _sent_alike(self, recordings: Sequence[Recording]) -> Sequence[Recording]:
        """The recordings, in which all ranks push a reduce-scatter's gradients in one type.

        A rank that alone accumulates over micro-batches has wider ones than its peers: then
        gradients travel in the type in which FSDP2 reduces.

        Collective: yes, over all groups of the model.
        """
        sent = [call.sent for recording in recordings for call in recording.collectives]
        timeout = self._options.timeout
        if all_agree("types of gradients", [*sent, ""], self._memory.groups, timeout):
            return recordings
        return [
            evolve(r, collectives=[evolve(call, sent="") for call in r.collectives])
            for r in recordings
        ]

    def _agree(self) -> str:
        """Name of the memory backend, where all ranks were given the same options.

        Collective: yes, over the groups of the model that did not agree before.
        """
        memory = self._memory
        device, groups = memory.device, memory.groups
        name = memory.preparation.agree(device, groups, unsharded_modules=self.live)
        memory.levels, memory.unreached = served(groups, name, device, self._options.timeout)
        return name

    def _begin_again(self) -> None:
        """Follow no plan, as in the beginning. Collective: yes, over all groups of the model."""
        self._last = self._made = None
        self._kept, self._after_forward = [], ()
        self.left = self.gradients_move = False
        for unshard in self.unshards:
            unshard.settle(None, kept=False)
        self._memory.begin_again()

    def _is_another(self, made: StepPlan, recording: Recording) -> bool:
        """Whether a step is to be recorded without a plan. See [Note: another program].

        Args:
            made: A plan that has this step, too.
            recording: The step.

        Collective: yes, over all groups of the model, if there was a plan before.
        """
        memory = self._memory
        given = self._options.capacity is not None
        if self._last is None or given or device_memory(memory.device) is None:
            return False
        step = tuple(recording.collectives[index].key for index in recording.ran)
        another = self._alone("another program", made.leaves_out and step not in self._others)
        if another:
            self._others.add(step)
        return another

    def _prepared(
        self, problem: StepProblem, chosen: Chosen[Call], limit: int | None
    ) -> StepPlan | None:
        """Plan what is not left out, in ``limit`` bytes if that is given, and make room for that.

        None if there is to be no plan.

        Collective: yes, over all groups of the model.
        """
        memory = self._memory
        preparation, recordings = memory.preparation, problem.recordings

        def finished(made: StepPlan) -> StepPlan:
            arena = memory.arena
            if arena is not None and self._alone("other segments", _moves(made.plan, arena)):
                memory.leave()  # both together may be more than there is room for
            held = memory.prepare(made.plan, made.by_engines)
            return evolve(problem.advised(made, demotables(made, chosen)), held=held)

        room = None
        if preparation.refusal is None:
            # Who asks for more modules with bytes asks for more bytes.
            room = limit
            if room is None:
                room = memory.room(below=self.live is None).nbytes
            if tenants := self._tenants(recordings):
                made = problem.plan(tenants, {})
                if self._alike(made, tenants, room, recordings[0].collectives):
                    return finished(made)

        made = self.fitting.within(room, problem, chosen)
        return None if self._is_another(made, recordings[-1]) else finished(made)

    def _tenants(self, recordings: Sequence[Recording]) -> dict[int, tuple[Buffer, ...]]:
        """Who ran meanwhile and can live in suballocations; the same on all ranks.

        Collective: yes, over all groups of the model.
        """
        memory, groups, name = self._memory, self._memory.groups, self._memory.preparation.memory
        ran = sorted({i for r in recordings for what, i in r.events if what == "tenant"})
        found = {
            i: _needs(i, tenant)
            for i in ran
            if (tenant := memory.tenants[i]) is not None
            and tenant.movable
            and tenant.arena.memory == name
        }
        mine = [[i, *(g.nbytes for g in needs)] for i, needs in found.items()]
        said = all_gather_json(
            "tenants", dict.fromkeys(groups, mine), groups, self._options.timeout
        )
        return {} if any(x != mine for of in said.values() for x in of) else found

    def _alike(
        self,
        made: StepPlan,
        tenants: Mapping[int, Sequence[Buffer]],
        room: int,
        first: Sequence[Call],
    ) -> bool:
        """Whether all ranks that meet, in the model or in a tenant, have the same plan that fits.

        Collective: yes, over all groups of the model and of the tenants.
        """
        names = dict.fromkeys(g.group for needs in tenants.values() for g in needs)
        groups = {n: g.process_group for n, g in resolve_groups(names).items()}
        fits = self.fitting.taken(made, first) <= room and not made.plan.barriers
        mine = made.plan.fingerprint if fits else ""
        groups = {**self._memory.groups, **groups}
        return all_agree("suballocations", mine, groups, self._options.timeout)

    def _alone(self, what: str, mine: bool) -> bool:
        """Whether all ranks say so, and on none anybody else was seen in the segments.

        Then the work of all ranks in the segments is done: each waits for its own before it says
        so, as peers reach into them.

        Args:
            what: Name of the exchange, for messages.
            mine: What this rank says.

        Collective: yes, over all groups of the model.
        """
        memory = self._memory
        mine = mine and memory.turns is None and not any(memory.tenants)
        if mine:
            synchronize(memory.device)
        return all_agree(what, mine, memory.groups, self._options.timeout) and mine

    def can_move(self) -> bool:
        """Whether all can move: on no rank anybody has views of parameters, or has captured them.

        Collective: yes, over all groups of the model.
        """
        memory = self._memory
        arenas = (arena for t in memory.tenants if t is not None for arena in t.captured)
        captured = memory.capture or any(arena.parent is memory.arena for arena in arenas)
        free = not captured and all(unshard.can_leave() for unshard in self.unshards)
        return all_agree("can move", free, memory.groups, self._options.timeout)

    def _vacate(self) -> None:
        """Let all parameters leave the last plan's bytes."""
        for unshard in self.unshards:
            if unshard.storage is not None:
                unshard.vacate()

    def sleep(self) -> None:
        """Give the memory back; parameters that lie there have memory of their own meanwhile.

        Collective: yes, over all groups of the model.
        """
        self._vacate()
        self._memory.sleep()

    def wake(self) -> Schedule | None:
        """Have the last plan's memory again.

        Returns:
            What to follow from now on, where a rank cannot have it: nothing is placed then. None
            if the plan is followed as before.

        Raises:
            AgreementError: Ranks have other plans.

        Collective: yes, over all groups of the model.
        """
        memory, made = self._memory, self._made
        assert made is not None
        preparation, groups = memory.preparation, memory.groups

        def again() -> tuple[Arena, int] | None:
            if preparation.refusal is not None:
                return None
            by_engines = {n: memory.reached[n] for n in memory.reached if n in made.by_engines}
            engines.again(by_engines, preparation.memory, memory.device, self._options.timeout)
            return memory.prepare(made.plan, made.by_engines)

        with telling(groups, self._options.timeout), torch.inference_mode(mode=False):
            held = preparation.attempt(again, groups, memory.undo)
            if preparation.refusal is not None:
                self._last = None  # all of it is ordinary from now on
                return self._make(self._kept, None)
            memory.adopt(held)
            self._settle()
        return None

    def _settle(self) -> None:
        """Let parameters live where the plan puts them, until when it says."""
        if current() is not None:
            return
        memory, made = self._memory, self._made
        assert made is not None
        plan, kept = made.plan, self._after_forward
        gathers = (p for stretch in made.stretches for p in stretch if p.zero_copy)
        storages: dict[str, ParameterStorage] = {}
        for p in gathers:
            site = p.call.key.site
            if site not in storages:
                assert p.buffer is not None
                place = plan.placements[p.buffer]
                storages[site] = ParameterStorage(
                    site,
                    self.layouts[site],
                    memory.at(place),
                    memory.users(place),
                    place.offset,
                    memory.over(p.call, p.algorithm),
                    memory.name,
                )
        for unshard in self.unshards:
            unshard.settle(storages.get(unshard.site), kept=unshard.site in kept)

    def measured(self, recording: Recording) -> tuple[str, tuple[Choice, ...]]:
        """The memory backend, and the choice for each collective that was recorded.

        Collective: yes, over all groups.
        """
        return self._agree(), self.fitting.choose([recording])[0].choices


def _moves(plan: Plan, arena: Arena) -> bool:
    """Whether a plan is to have other segments than these: larger ones, or less in all."""
    if not fits(plan, arena):
        return True
    return plan.peak_bytes < arena.segment_bytes and not in_use(arena.segments.values())


def _needs(number: int, tenant: Tenant) -> tuple[Buffer, ...]:
    """What a tenant has of each of its segments."""
    return tuple(
        Buffer(
            f"tenant{number}.{name}",
            s.nbytes,
            s.spec.groups[0],
            align=max(tenant.align, _ALIGN),
            op=tenant.arena.user,
            where="suballocation",
        )
        for name, s in tenant.arena.segments.items()
    )
