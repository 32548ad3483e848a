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
    collective that is too large for that is measured on a part, of which the ratio of its
    algorithms hardly depends on the size any more, and the seconds are scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from symmplan.coordination.all_gather import all_agree, all_gather_json, leaders
from symmplan.coordination.own import own_work
from symmplan.errors import AgreementError
from symmplan.memory.spares import borrowed
from symmplan.planner import plan as plan_problem
from symmplan.process import PROCESS
from symmplan.runtime.choice import Choice, fastest
from symmplan.runtime.clock import clock_bytes, clock_of, seconds_of
from symmplan.runtime.engines import Engines, engines_of, register

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import torch

    from symmplan.model import Problem
    from symmplan.runtime.clock import Act

__all__ = ["BEYOND", "Concurrent", "Trial", "choices_of", "forget", "measure", "room_for"]

#: Bytes that measuring may take on a rank, beside what plans take.
BEYOND = 256 << 20


@frozen(eq=False)
class Concurrent:
    """Another group's collective that runs beside one that is timed.

    See [Note: concurrent collectives] in `symmplan.runtime.concurrent`.

    Attributes:
        group: Name of its group.
        now: What was chosen for it so far.
        often: How often it runs for each of the other.
        acts: As those of a `Trial`.
    """

    group: str
    now: Callable[[], Choice]
    often: int
    acts: Callable[[Mapping[str, torch.Tensor], Engines | None], Mapping[str, Act]]


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
        acts: What runs it by each algorithm, torch's own first, given ``{buffer: symmetric bytes}``
            and the group's copy engines. It starts nothing that waits for peers.
        concurrent: What runs beside it; None for nothing.
        alone: Under what is found what was measured of it without concurrent collectives.
    """

    key: Hashable
    same: list[Any]
    choice: Choice
    nbytes: int
    beside: float | None
    scale: float
    acts: Callable[[Mapping[str, torch.Tensor], Engines | None], Mapping[str, Act]]
    concurrent: Concurrent | None = None
    alone: Hashable = None


def forget() -> None:
    """Measure everything anew from now on. Must be called on all ranks, or on none."""
    PROCESS.measured.clear()


def choices_of(group: Any) -> dict[Hashable, Choice]:
    """What was measured over a process group."""
    return PROCESS.measured.setdefault(group, {})


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
        if trial.concurrent is None:
            together[leader[trial.choice.group]].append(i)
    keys = {name: [trials[i].same for i in of] for name, of in together.items()}
    # Before anybody starts a collective that others do not join.
    for name, said in all_gather_json("cases", keys, groups, timeout).items():
        _same(keys[name], said, name, groups[name])
    met = {name: groups[name] for name in together}
    beside = [t for t in trials if t.concurrent is not None]
    alike = all_agree("concurrent", _with_concurrent(beside, groups), met, timeout)
    # Who is only measured beside others needs no symmetric bytes.
    needs = {*(t.choice.group for t in trials), *(b.group for b in problem.buffers)}
    concurrent = {t.concurrent.group for t in beside if t.concurrent is not None} - needs
    served = {name: group for name, group in groups.items() if name not in concurrent}
    engines = engines_of(served, memory, timeout)
    if not trials:
        return
    plan = plan_problem(problem)
    with borrowed(plan, served, memory=memory, device=device, timeout=timeout) as (arena, there):
        register(arena, engines)
        acts = [t.acts(there, engines.get(t.choice.group)) for t in trials]
        clock = clock_of(device, timeout)
        all_gather_json(
            "measuring", dict.fromkeys(keys, 0), groups, timeout
        )  # nobody has failed so far

        def timed(trial: Trial, concurrent: Act | None = None) -> dict[str, float]:
            found = seconds_of(
                clock,
                acts[trials.index(trial)],
                groups[trial.choice.group],
                trial.nbytes,
                beside=trial.beside,
                enough=enough,
                concurrent=concurrent,
            )
            return {algorithm: seconds * trial.scale for algorithm, seconds in found.items()}

        with clock.together(groups):
            times = {i: timed(trials[i]) for of in together.values() for i in of}
            mine = {name: [times[i] for i in of] for name, of in together.items()}
            for name, said in all_gather_json("times", mine, groups, timeout).items():
                for place, i in enumerate(together[name]):
                    _choose(trials[i], _slowest(times[i], [r[place] for r in said]), groups, device)
            if alike:
                for trial in (*beside, *beside):
                    assert trial.concurrent is not None
                    now = trial.concurrent.now()
                    others = trial.concurrent.acts(there, engines.get(trial.concurrent.group))
                    algorithm = now.algorithm if now.algorithm in others else next(iter(others))
                    seconds = timed(trial, _often(others[algorithm], trial.concurrent.often))
                    for _ in range(3):  # as `symmplan.coordination.all_gather.throughout`
                        heard = all_gather_json(
                            "times", dict.fromkeys(met, seconds), groups, timeout
                        )
                        seconds = _slowest(seconds, [r for of in heard.values() for r in of])
                    text = f"{now.op} with {now.nbytes:,} bytes, {algorithm}"
                    _choose(trial, seconds, groups, device, concurrent=text)
    if not alike:
        for trial in beside:
            found = choices_of(groups[trial.choice.group])
            found[trial.key] = found[trial.alone]


def _with_concurrent(trials: Sequence[Trial], groups: Mapping[str, Any]) -> list[Any]:
    """Who is timed beside whom; the same on ranks that may do so together."""
    number = {name: i for i, name in enumerate(groups)}
    return [
        [number[t.choice.group], number[t.concurrent.group], t.concurrent.often, t.same]
        for t in trials
        if t.concurrent is not None
    ]


def _often(act: Act, times: int) -> Act:
    """The same several times, one after the other."""

    def run(beside: Callable[[], None]) -> None:
        for _ in range(times - 1):
            act(lambda: None)
        act(beside)

    return run


def _slowest(mine: Mapping[str, float], said: Sequence[Any]) -> dict[str, float]:
    """Of each algorithm that all ranks have the seconds of the slowest."""
    algorithms = [algorithm for algorithm in mine if all(algorithm in theirs for theirs in said)]
    return {algorithm: max(float(theirs[algorithm]) for theirs in said) for algorithm in algorithms}


def _choose(
    trial: Trial,
    seconds: Mapping[str, float],
    groups: Mapping[str, Any],
    device: torch.device,
    concurrent: str = "",
) -> None:
    # What has concurrent collectives was timed with all that it may hold up.
    busy = trial.beside != 0 and not concurrent
    algorithm = fastest(seconds, kernels=device.type == "cuda", beside=busy)
    choice = evolve(trial.choice, seconds=seconds, algorithm=algorithm, concurrent=concurrent)
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
