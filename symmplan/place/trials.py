"""Collectives timed in every way there is, by all ranks alike, and remembered for the process.

[Note: who measures]
    All ranks of a group must measure the same, or nobody. So what decides it, and under what the
    result is found again, is the same on all of them: the collective, its sizes, its process group
    and whether any products run beside it. How many do depends on the rest of the program, and so
    on a batch that may be smaller on one rank: the first program with a case decides for later
    ones, and of several such collectives in it that with most products.

    A process group is known by itself and not by its name: another one may have had that before,
    and other ranks.

[Note: how much memory measuring takes]
    At most `BEYOND` bytes, those of the clock and of both copies of what is measured together. A
    collective that is too large for that is measured on a part, of which the ratio of its ways
    hardly depends on the size any more, and the seconds are scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attrs import evolve, frozen

from symmplan.errors import AgreementError
from symmplan.memory.own import own_work
from symmplan.memory.spares import borrowed
from symmplan.memory.tell import leaders, tell
from symmplan.place.choice import Choice, fastest
from symmplan.place.clock import clock_bytes, clock_of, seconds_of
from symmplan.place.engines import Engines, engines_of, register
from symmplan.planner import plan as plan_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import torch

    from symmplan.model import Problem
    from symmplan.place.clock import Act

__all__ = ["BEYOND", "Trial", "choices_of", "forget", "measure", "room_for"]

#: Bytes that measuring may take on a rank, beside what plans take.
BEYOND = 256 << 20


@frozen(eq=False)
class Trial:
    """One kind and size of collective that is to be timed.

    Attributes:
        key: Under what its choice is found again.
        same: What must be the same on all ranks, as plain data; names of groups may differ.
        choice: All that is known of its choice before.
        nbytes: Its size as it is measured, in bytes.
        beside: Floating-point operations of the matrix products that run at the same time; None if
            that is not known.
        scale: How many times larger it is than what is measured.
        acts: What runs it in each way, torch's own first, given ``{buffer: symmetric bytes}`` and
            the group's copy engines. It starts nothing that waits for peers.
    """

    key: Hashable
    same: list[Any]
    choice: Choice
    nbytes: int
    beside: float | None
    scale: float
    acts: Callable[[Mapping[str, torch.Tensor], Engines | None], Mapping[str, Act]]


#: By process group. See [Note: who measures].
_FOUND: WeakKeyDictionary[Any, dict[Hashable, Choice]] = WeakKeyDictionary()


def forget() -> None:
    """Measure everything anew from now on. Must be called on all ranks, or on none."""
    _FOUND.clear()


def choices_of(group: Any) -> dict[Hashable, Choice]:
    """What was measured over a process group."""
    return _FOUND.setdefault(group, {})


def room_for(tensors: float, device: torch.device) -> int:
    """How large a tensor may be where so many as large are needed to measure, in bytes."""
    return int((BEYOND - clock_bytes(device)) / tensors)


@own_work
def measure(
    trials: Sequence[Trial],
    problem: Problem,
    groups: Mapping[str, Any],
    *,
    memory: str,
    device: torch.device,
    timeout: float,
    enough: int,
) -> None:
    """Time collectives in every way there is, and let the slowest rank count.

    Args:
        trials: What is timed. Without any, ranks only meet the groups' copy engines.
        problem: The symmetric bytes that this takes.
        groups: ``{name: process group}``, in the order of first use.
        memory: Name of the memory backend.
        device: Where the tensors lie.
        timeout: Seconds that ranks wait for each other.
        enough: Collectives of fewer bytes are repeated until they come to as many.

    Raises:
        AgreementError: Ranks measure different collectives; raised on all of them.
        PeerTimeoutError: A rank did not come, or its part of a collective did not.

    Collective: yes, over those groups.
    """
    leader = leaders(groups)
    together: dict[str, list[int]] = {name: [] for name in dict.fromkeys(leader.values())}
    for i, trial in enumerate(trials):
        together[leader[trial.choice.group]].append(i)
    keys = {name: [trials[i].same for i in of] for name, of in together.items()}
    # Before anybody starts a collective that others do not join.
    for name, said in tell("cases", keys, groups, timeout).items():
        _same(keys[name], said, name, groups[name])
    engines = engines_of(groups, memory, timeout)
    if not trials:
        return
    plan = plan_problem(problem)
    with borrowed(plan, groups, memory=memory, device=device, timeout=timeout) as (arena, there):
        register(arena, engines)
        acts = [t.acts(there, engines.get(t.choice.group)) for t in trials]
        clock = clock_of(device, timeout)
        tell("measuring", dict.fromkeys(keys, 0), groups, timeout)  # nobody has failed so far
        times = []
        for trial, ways in zip(trials, acts, strict=True):
            group, beside = groups[trial.choice.group], trial.beside
            found = seconds_of(clock, ways, group, trial.nbytes, beside=beside, enough=enough)
            times.append({way: seconds * trial.scale for way, seconds in found.items()})
    mine = {name: [times[i] for i in of] for name, of in together.items()}
    kernels = device.type == "cuda"
    for name, said in tell("times", mine, groups, timeout).items():
        for place, i in enumerate(together[name]):
            trial = trials[i]
            seconds = {way: max(float(rank[place][way]) for rank in said) for way in times[i]}
            way = fastest(seconds, kernels=kernels, beside=trial.beside != 0)
            choice = evolve(trial.choice, seconds=seconds, way=way)
            choices_of(groups[choice.group])[trial.key] = choice


def _same(keys: list[Any], said: Sequence[Any], name: str, group: Any) -> None:
    for rank, theirs in enumerate(said):
        if theirs != keys:
            here, there = (
                next((k for k, o in zip(a, b, strict=False) if k != o), f"{len(a)} collectives")
                for a, b in ((keys, theirs or []), (theirs or [], keys))
            )
            raise AgreementError(
                f"ranks {group.rank()} and {rank} measure different collectives",
                expected=f"{here} (rank {group.rank()})",
                got=f"{there} (rank {rank})",
                fix="run the same program with the same shapes on every rank of the group",
                group=name,
                rank=group.rank(),
                ranks=(group.rank(), rank),
            )
