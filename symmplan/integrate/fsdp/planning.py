"""From what FSDP2 did in a step to a plan that has its memory, agreed by all ranks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from attrs import evolve

from symmplan import _compat as compat
from symmplan.capture.fsdp import GuestBytes, Recording, Way, problem_of
from symmplan.capture.fsdp_live import most_alive
from symmplan.integrate.fsdp.choice import Choices
from symmplan.integrate.fsdp.drops import merged
from symmplan.integrate.fsdp.home import Home
from symmplan.integrate.fsdp.offsets import plan_with_homes
from symmplan.integrate.fsdp.schedule import Schedule
from symmplan.memory import resolve_backend
from symmplan.memory.groups import resolve_groups
from symmplan.memory.tell import tell, telling, throughout
from symmplan.planner.advice import Advice
from symmplan.report.log import log_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.capture.fsdp import Call, Planned
    from symmplan.integrate.fsdp.direct import Direct
    from symmplan.integrate.fsdp.layout import Layout
    from symmplan.integrate.fsdp.memory import Memory
    from symmplan.model import Plan
    from symmplan.place.guests import Guest
    from symmplan.place.options import Options

__all__ = ["Planning"]

#: Where carve-outs begin, in bytes.
_ALIGN = 512


class Planning:
    """Makes the plans of one model.

    Args:
        options: How `apply` was asked to work.
        memory: What the plans lie in.
        live: How many modules may have their parameters at once; None as the program does.

    Attributes:
        live: The same.
        plan: The last plan, None before the first.
        choices: What was measured, None before the first plan.
        directs: The parameter groups whose parameters may live in placements.
        layouts: ``{site: layout}`` of those whose parameters can.
        flat: ``{site: why}`` of those whose parameters cannot.
    """

    def __init__(self, options: Options, memory: Memory, live: int | None = None) -> None:
        self.live = live
        self.plan: Plan | None = None
        self.choices: Choices | None = None
        self.directs: list[Direct] = []
        self.layouts: dict[str, Layout] = {}
        self.flat: dict[str, str] = {}
        self._options = options
        self._memory = memory
        self._kept: list[Recording] = []

    def make(self, recording: Recording) -> Schedule:
        """Plan what was recorded, besides what was planned before.

        Raises:
            AgreementError: Ranks recorded different programs; raised on all of them.

        Collective: yes, over all groups of the model.
        """
        with (
            telling(self._memory.groups, self._options.timeout),
            # What is made here outlives the program's mode.
            torch.inference_mode(mode=False),
        ):
            return self._make([*self._kept, recording])

    def _make(self, recordings: Sequence[Recording]) -> Schedule:
        options, memory = self._options, self._memory
        if self.choices is None:
            self.choices = Choices(memory.device, self._backend(), options, memory.groups)
        recordings = merged(recordings, memory.groups, options.timeout)
        if options.chosen(memory.device) == "measure":
            self._measure(recordings, self.choices)
        plan, stretches = self._planned(recordings, self.choices)
        self.plan = plan
        self._kept = list(recordings)
        self._settle(plan, [p for stretch in stretches for p in stretch if p.direct])
        ways = ["ordinary" if p.buffer is None else p.way.name for s in stretches for p in s]
        log_plan("FSDP2", plan, ways)
        return Schedule(plan, stretches)

    def _planned(
        self, recordings: Sequence[Recording], choices: Choices
    ) -> tuple[Plan, tuple[tuple[Planned, ...], ...]]:
        """Plan what was not left out, and give the plan its memory."""
        settled = {direct.site for direct in self.directs if direct.settled}
        direct = {site: x.nbytes for site, x in self.layouts.items() if site not in settled}

        def way_of(call: Call) -> Way:
            if call.key.kind == "all_gather" and call.key.site in settled:
                return Way("ordinary", "its parameters stay where an earlier plan put them")
            return choices.way(call)

        planned = functools.partial(
            _planned, recordings, self._ranks(), way_of, direct, self._options.effort
        )
        guests = self._guests(recordings)
        plan, stretches = planned(guests, self.live)
        if guests and not self._alike(plan, guests):
            guests = {}
            plan, stretches = planned(guests, self.live)
        self._memory.hold(plan, settled=bool(settled))
        for number, needs in guests.items():
            guest = self._memory.guests[number]
            places = [plan.placements[g.name] for g in needs]
            self._memory.host(guest, dict(zip(guest.arena.segments, places, strict=True)))
        alive = most_alive(recordings, set(direct), self.live)
        if not alive:
            return plan, stretches

        def other(live: int) -> tuple[int, int]:
            return most_alive(recordings, set(direct), live), planned(guests, live)[0].peak_bytes

        advisor = functools.partial(_advice, alive, plan.peak_bytes, other)
        return evolve(plan, live_gathers=alive, advisor=advisor), stretches

    def _guests(self, recordings: Sequence[Recording]) -> dict[int, tuple[GuestBytes, ...]]:
        """Who ran meanwhile and can live in carve-outs; the same on all ranks.

        Collective: yes, over all groups of the model.
        """
        memory, groups, name = self._memory, self._memory.groups, self._backend()
        ran = sorted({i for r in recordings for what, i in r.events if what == "guest"})
        found = {
            i: _needs(i, guest)
            for i in ran
            if (guest := memory.guests[i]).hostable and guest.arena.memory == name
        }
        mine = [[i, *(g.nbytes for g in needs)] for i, needs in found.items()]
        said = tell("guests", dict.fromkeys(groups, mine), groups, self._options.timeout)
        return found if all(x == mine for of in said.values() for x in of) else {}

    def _alike(self, plan: Plan, guests: Mapping[int, Sequence[GuestBytes]]) -> bool:
        """Whether all ranks that meet, in the model or in a guest, have the same plan.

        Collective: yes, over all groups of the model and of the guests.
        """
        names = dict.fromkeys(g.group for needs in guests.values() for g in needs)
        groups = {n: g.process_group for n, g in resolve_groups(names).items()}
        mine = plan.fingerprint if not plan.barriers else ""
        groups = {**self._memory.groups, **groups}
        return throughout("carve-outs", mine, groups, self._options.timeout)

    def loosen(self) -> None:
        """Let the next plan move parameters, if on no rank anybody has views of them.

        Collective: yes, over all groups of the model.
        """
        settled = [direct for direct in self.directs if direct.settled]
        free = not self._memory.captured and all(direct.can_leave() for direct in settled)
        if throughout("loosen", free, self._memory.groups, self._options.timeout):
            for direct in settled:
                direct.vacate()

    def _settle(self, plan: Plan, gathers: Sequence[Planned]) -> None:
        """Let parameters live where the plan puts them."""
        memory = self._memory
        homes: dict[str, Home] = {}
        for p in gathers:
            site = p.call.key.site
            if site not in homes:
                assert p.buffer is not None
                place = plan.placements[p.buffer]
                homes[site] = Home(
                    site,
                    self.layouts[site],
                    memory.at(place),
                    memory.users(place),
                    place.offset,
                    memory.over(p.call, p.way),
                    memory.name,
                )
        for direct in self.directs:
            if not direct.settled:
                direct.settle(homes.get(direct.site))

    def _measure(self, recordings: Sequence[Recording], choices: Choices) -> None:
        """Measure what was not measured yet, one after the other."""
        calls = (r.collectives[i] for r in recordings for i in r.ran)
        recording = Recording()
        for call in choices.unmeasured(calls):
            index = recording.begin(call.key, call.nbytes)
            recording.run(index, call.group)
            recording.drop(index)
        if not recording.events:
            return
        # In the way that needs most bytes.
        most: Literal["copy engine", "symmetric"] = "symmetric"
        if self._memory.device.type == "cuda" and compat.has_copy_engine_policy():
            most = "copy engine"
        problem, (planned,) = problem_of([recording], self._ranks(), lambda _: Way(most))
        choices.measure(problem, planned)

    def _backend(self) -> str:
        """Name of the memory backend."""
        groups = resolve_groups(self._memory.groups, self._memory.groups)
        return resolve_backend(self._options.memory, self._memory.device, groups).name

    def _ranks(self) -> dict[str, tuple[int, ...]]:
        """The global ranks of each group."""
        groups = self._memory.groups
        return {name: tuple(dist.get_process_group_ranks(g)) for name, g in groups.items()}


def _planned(
    recordings: Sequence[Recording],
    ranks: Mapping[str, tuple[int, ...]],
    way_of: Callable[[Call], Way],
    direct: Mapping[str, int],
    effort: Literal["fast", "optimal"],
    guests: Mapping[int, Sequence[GuestBytes]],
    live: int | None,
) -> tuple[Plan, tuple[tuple[Planned, ...], ...]]:
    """The plan of what was recorded, verified, and the collectives of each recording."""
    problem, stretches = problem_of(recordings, ranks, way_of, direct, guests, live)
    homes = frozenset(p.buffer for s in stretches for p in s if p.direct and p.buffer)
    plan = plan_with_homes(problem, homes, effort)
    plan.verify()
    return plan, stretches


def _advice(alive: int, peak: int, other: Callable[[int], tuple[int, int]]) -> tuple[Advice, ...]:
    """What fewer live gathers would save, and more would cost.

    Args:
        alive: How many there are.
        peak: Bytes of the plan.
        other: How many there would be if so many were asked for, and the bytes of that plan.
    """
    found = []
    fewer, less = other(alive - 1) if alive > 1 else (alive, peak)
    if fewer < alive and less < peak:
        text = (
            f"live_gathers={fewer} needs {peak - less:,} bytes less; a gather may then have to "
            "wait for the module before it"
        )
        found.append(Advice("live_gathers", peak - less, text))
    more, needs = other(alive + 1)
    if more > alive and needs >= peak:
        text = (
            f"live_gathers={more} needs {needs - peak:,} bytes more; prefetch lists may then be "
            "longer by one module"
        )
        found.append(Advice("live_gathers", 0, text))
    return tuple(found)


def _needs(number: int, guest: Guest) -> tuple[GuestBytes, ...]:
    """What a guest has of each of its segments."""
    align, user = max(guest.align, _ALIGN), guest.arena.user
    return tuple(
        GuestBytes(f"guest{number}.{name}", s.nbytes, s.spec.groups[0], align, user)
        for name, s in guest.arena.segments.items()
    )
