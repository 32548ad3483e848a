"""Times collectives by each of their algorithms, on all ranks alike, once in a process.

[Note: who measures]
    All ranks of a group must measure the same cases. So a case is found again by facts that are the
    same on all of them: the collective, its sizes, its process group, and whether any products run
    beside it. The number of products is not among these facts. It depends on the rest of the
    program, and so on a batch that may be smaller on one rank. The first program with a case
    decides for later ones; if it has several such collectives, the one with most products does.

    A process group is known by the object and not by its name, because an earlier group with other
    ranks may have had that name.

[Note: how much memory measuring takes]
    Measuring takes at most `BEYOND` bytes, including those of the clock and both copies of the
    tensors. A larger collective is measured on a part, and the seconds are scaled: at such sizes
    the ratio of its algorithms hardly depends on the size any more. If a rank has fewer bytes to
    spare, the parts are smaller on all ranks. If they would be too small to tell anything, nothing
    is measured, and the rules of `symmplan.choose.tuning_table` choose. All of it is given back,
    also to the driver, before anything is planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from symmplan.choose.choice import fastest
from symmplan.choose.clock import clock_bytes, clock_of, seconds_of
from symmplan.coordination.all_gather import all_gather_json, leaders, least
from symmplan.coordination.own import own_work
from symmplan.device import kind_of
from symmplan.errors import AgreementError
from symmplan.memory.beyond import counting
from symmplan.memory.cache import borrowed
from symmplan.memory.device_memory import device_memory, empty_cache, require_left
from symmplan.memory.room import LEFT, free_bytes
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.place.engines import engines_of, register
from symmplan.planner import plan as plan_problem
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from symmplan.choose.cases import Case
    from symmplan.choose.choice import Choice
    from symmplan.choose.clock import Act
    from symmplan.memory import Arena

#: Bytes that measuring may take on a rank, beside what plans take.
BEYOND = 256 << 20
#: Parts of fewer bytes on a device are not timed: what passes once decides there.
_LEAST = 1 << 20
#: Collectives of fewer bytes are repeated until they come to as many: what passes once, at the
#: begin and the end of what is timed, must not decide.
_ENOUGH = 512 << 20


def forget() -> None:
    """Measure everything anew from now on. Must be called on all ranks, or on none."""
    PROCESS.measured.clear()


def choices_of(group: Any) -> dict[Hashable, Choice]:
    """The measured choices of a process group, by `Case`."""
    return PROCESS.measured.setdefault(group, {})


def choice_in(case: Case, choice: Choice) -> Choice:
    """A measured choice in the program of a case, whose plan may have no barriers for it."""
    if case.barriers or choice.ruled:
        return choice
    algorithm = fastest(choice.seconds, kernels=True, beside=False, barriers=False)
    return evolve(choice, algorithm=algorithm)


@own_work
def measure(
    cases: Sequence[Case],
    groups: Mapping[str, Any],
    *,
    memory: str,
    device: torch.device,
    timeout: float,
    keeps: bool = False,
) -> bool:
    """Time collectives by every algorithm there is, and let the slowest rank count.

    What it took is free when it returns; torch's allocator may have it cached.

    Args:
        cases: What is timed. Without any, ranks only meet the groups' copy engines.
        groups: ``{name: process group}`` of all that run, in the order of first use.
        memory: Name of the memory backend.
        device: Where the tensors lie.
        timeout: Seconds that ranks wait for each other.
        keeps: Whether torch's allocator keeps what it has cached.

    Returns:
        Whether all ranks have room to measure; else nothing was timed.

    Raises:
        AgreementError: Ranks measure different collectives; raised on all of them.
        PeerTimeoutError: A rank did not come, or its part of a collective did not.

    Collective: yes, over those groups.
    """
    leader = leaders(groups)
    together: dict[str, list[Case]] = {name: [] for name in dict.fromkeys(leader.values())}
    for case in cases:
        together[leader[case.group]].append(case)
    keys = {name: [case.key for case in of] for name, of in together.items()}
    # Before anybody starts a collective that others do not join.
    for name, said in all_gather_json("cases", keys, groups, timeout).items():
        _same(keys[name], said, name, groups[name])
    met = {name: groups[name] for name in together}
    trials = _Trials(cases, device, _bytes_for(memory, device, met, timeout, keeps))
    # Communicators take bytes of a device, so only who may use them gets them.
    used = {c.group for c in trials.parts if {"copy engine", "push"} & {*c.algorithms}}
    able = {n: g for n, g in groups.items() if n in used or n not in trials.groups}
    if able:
        require_left(device)
    with counting("communicators", device):
        engines = engines_of(able, memory, timeout)
    if not cases or not trials.has_room:
        return not cases
    trials.allocate()
    plan = plan_problem(trials.problem)
    given: dict[str, Any] = {"memory": memory, "device": device, "timeout": timeout}

    def meet_engines(arena: Arena) -> None:
        register(arena, engines)

    with borrowed(plan, groups, **given, meet=meet_engines) as (_, there):
        acts = {case: trials.acts(case, there, engines) for case in trials.parts}
        clock = clock_of(device, timeout)
        all_gather_json(
            "measuring", dict.fromkeys(keys, 0), groups, timeout
        )  # nobody has failed so far

        def timed(case: Case) -> dict[str, float]:
            part, scale = trials.parts[case], trials.scale(case)
            found = seconds_of(
                clock,
                acts[case],
                groups[case.group],
                max(part.sizes()),
                beside=None if case.beside is None else case.beside / scale,
                enough=_ENOUGH,
            )
            return {algorithm: seconds * scale for algorithm, seconds in found.items()}

        with clock.together(groups):
            times = {case: timed(case) for of in together.values() for case in of}
            mine = {name: [times[case] for case in of] for name, of in together.items()}
            for name, said in all_gather_json("times", mine, groups, timeout).items():
                for place, case in enumerate(together[name]):
                    seconds = _slowest(times[case], [rank[place] for rank in said])
                    choices_of(groups[case.group])[case] = chosen_by(
                        case.unmeasured, seconds, case, device
                    )
    return True


def _bytes_for(
    memory: str, device: torch.device, groups: Mapping[str, Any], timeout: float, keeps: bool
) -> int:
    """Bytes that measuring may take; equal on all ranks.

    Torch's allocator returns what it has cached, unless it ``keeps`` that: communicators and
    windows come on top of it.

    Collective: yes, over those groups.
    """
    there = device_memory(device)
    if there is None:
        free = free_bytes(memory)
    else:
        free = there.free - LEFT
        if not keeps:
            free += there.reserved - there.allocated
            empty_cache(device)
    return least("room to measure", (min(BEYOND, free),), groups, timeout)[0]


def measure_there(
    choice: Choice,
    acts: Mapping[str, Act],
    group: Any,
    device: torch.device,
    timeout: float,
) -> Choice:
    """Time a collective in memory that is there already; the slowest rank counts.

    Args:
        choice: All that is known of its choice before.
        acts: ``{algorithm: what runs it}``, torch's own first.
        group: The process group.
        device: Where the tensors lie.
        timeout: Seconds that ranks wait for each other.

    Collective: yes, over ``group``.
    """
    name, computes = choice.group, kind_of(device).is_accelerator  # nobody says how much meanwhile
    with counting("trials", device):
        clock = clock_of(device, timeout)
        all_gather_json("measuring", {name: 0}, {name: group}, timeout)  # nobody has failed so far
        with clock.together({name: group}):
            beside = None if computes else 0.0
            mine = seconds_of(clock, acts, group, choice.nbytes, beside=beside, enough=_ENOUGH)
        del clock
        empty_cache(device)
    said = all_gather_json("times", {name: mine}, {name: group}, timeout)[name]
    seconds = _slowest(mine, said)
    algorithm = fastest(seconds, kernels=computes, beside=computes)
    return evolve(choice, seconds=seconds, algorithm=algorithm)


class _Trials:
    """The parts of collectives that are timed, and the bytes that this takes.

    Args:
        cases: What is timed.
        device: Where.
        nbytes: That all of it may take.

    Attributes:
        parts: ``{collective: what is timed of it}``.
        groups: Over which they run.
        problem: The symmetric bytes.
        has_room: Whether the parts are large enough that their times say anything.
    """

    def __init__(self, cases: Sequence[Case], device: torch.device, nbytes: int) -> None:
        self.groups = list(dict.fromkeys(c.group for c in cases))
        # Inputs and results: ordinary ones, symmetric ones of each group, and what torch's own way
        # makes.
        tensors = 2 + 2 * len(self.groups) + 1
        largest = (nbytes - clock_bytes(device)) // tensors
        self.has_room = largest >= (_LEAST if kind_of(device).is_accelerator else 1)
        largest = max(largest, 0)
        self.parts = {c: c.part(largest) for c in cases}
        sizes = [part.sizes() for part in self.parts.values()]
        most = {w: max((s[i] for s in sizes), default=0) for i, w in enumerate(("in", "out"))}
        # Names of groups may differ between ranks.
        pads = {c.group for c in cases if c.signal_pad}
        buffers = [
            Buffer(f"{w} {i}", n, g, signal_pad=g in pads)
            for i, g in enumerate(self.groups)
            for w, n in most.items()
        ]
        self.problem = Problem(
            buffers=tuple(buffers),
            operations=(Operation("all"),),
            accesses=tuple(Access("all", b.name, write=True) for b in buffers),
        )
        self._most, self._device = most, device
        self._plain: list[torch.Tensor] = []

    def allocate(self) -> None:
        """Have the ordinary bytes."""
        device = self._device
        self._plain += [
            torch.ones(n, dtype=torch.uint8, device=device) for n in self._most.values()
        ]
        # A rank that has no room for what torch's own way makes must not find out among its peers.
        result = torch.empty(self._most["out"], dtype=torch.uint8, device=device)
        del result

    def scale(self, case: Case) -> float:
        """How many times larger a collective is than what is timed of it."""
        return case.times(self.parts[case])

    def acts(
        self, case: Case, there: Mapping[str, torch.Tensor], engines: Mapping[str, Any]
    ) -> Mapping[str, Act]:
        """Functions that run a collective alone, in the symmetric bytes ``there``."""
        number = self.groups.index(case.group)
        places = [there[f"{w} {number}"] for w in ("in", "out")]
        return self.parts[case].acts(self._plain, places, engines.get(case.group))


def _slowest(mine: Mapping[str, float], said: Sequence[Any]) -> dict[str, float]:
    """Of each algorithm that all ranks have the seconds of the slowest."""
    algorithms = [algorithm for algorithm in mine if all(algorithm in theirs for theirs in said)]
    return {algorithm: max(float(theirs[algorithm]) for theirs in said) for algorithm in algorithms}


def all_slowest(
    mine: Mapping[str, Mapping[str, float]], groups: Mapping[str, Any], timeout: float
) -> dict[str, dict[str, float]]:
    """Of each case the seconds of the slowest rank of some groups, and of what these meet.

    Asked as often as in `symmplan.coordination.all_gather.all_agree`. What a rank does not time,
    it says nothing of.

    Args:
        mine: ``{case: {algorithm: seconds}}``.
        groups: ``{name: process group}``.
        timeout: Seconds that ranks wait for each other.

    Collective: yes, over those groups.
    """
    found = {case: dict(seconds) for case, seconds in mine.items()}
    for _ in range(3):
        heard = all_gather_json("times", dict.fromkeys(groups, found), groups, timeout)
        said = [theirs for of in heard.values() for theirs in of]
        found = {
            case: _slowest(seconds, [theirs[case] for theirs in said if case in theirs])
            for case, seconds in found.items()
        }
    return found


def chosen_by(
    choice: Choice, seconds: Mapping[str, float], case: Case, device: torch.device
) -> Choice:
    """A choice by other seconds than it was made by, or by the first."""
    kernels = kind_of(device).is_accelerator
    algorithm = fastest(seconds, kernels=kernels, beside=case.beside != 0)
    return evolve(choice, seconds=seconds, algorithm=algorithm)


def _same(keys: list[Any], said: Sequence[Any], name: str, group: Any) -> None:
    for rank, theirs in enumerate(said):
        if theirs != keys:
            here, there = _first_apart(keys, theirs or []), _first_apart(theirs or [], keys)
            raise AgreementError(
                f"ranks {group.rank()} and {rank} measure different collectives",
                expected=f"{here} (rank {group.rank()})",
                got=f"{there} (rank {rank})",
                fix="run the same program with the same shapes on every rank of the group",
                group=name,
                rank=group.rank(),
                ranks=(group.rank(), rank),
            )


def _first_apart(keys: Sequence[Any], others: Sequence[Any]) -> Any:
    """The first that differs from the other at its place; how many there are if none does."""
    for key, other in zip(keys, others, strict=False):
        if key != other:
            return key
    return f"{len(keys)} collectives"
