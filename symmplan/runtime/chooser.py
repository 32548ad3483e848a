"""The algorithm of each collective of a program: ruled, or measured in it, the same on all ranks.

Before a program is planned, each of its collectives is timed by every algorithm: at its size, with
its copies, and beside as many matrix products as the program has between its start and its wait. A
collective without a clear gain stays out of the plan, with the times as the reason.

A case is measured once in a process, see [Note: who measures] in `symmplan.runtime.trials`.
"""

from __future__ import annotations

import contextlib
import json
from concurrent import futures
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from attrs import evolve, field, frozen

from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.world import current
from symmplan.device import device_of
from symmplan.memory.beyond import counting
from symmplan.memory.device_memory import empty_cache
from symmplan.memory.torch_symm import SPLIT_WORDS
from symmplan.model import Algorithm
from symmplan.runtime.choice import DEMOTED, NO_ROOM
from symmplan.runtime.engines import asked, known_of, require
from symmplan.runtime.trials import all_slowest, choices_of, chosen_by, measure
from symmplan.runtime.tuning_table import ruled
from symmplan.torch_private import c10d, dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from symmplan.model import AlgorithmName
    from symmplan.runtime.cases import Case
    from symmplan.runtime.choice import Choice
    from symmplan.runtime.prepare import Preparation
    from symmplan.runtime.tuning_table import Table

_Call = TypeVar("_Call")

#: What a collective takes that is to run by some algorithm: the first of these that it has.
_INSTEAD: Mapping[str, tuple[AlgorithmName, ...]] = {
    "symmetric": ("symmetric", "two-level"),
    "copy engine": ("copy engine", "symmetric", "two-level"),
    "push": ("push", "copy engine", "symmetric", "two-level"),
    "shared push": ("shared push", "copy engine", "symmetric", "two-level"),
    "two-level": ("two-level", "symmetric"),
    "pipelined": ("pipelined", "copy engine", "symmetric", "two-level"),
}


@frozen(eq=False)
class Chosen(Generic[_Call]):
    """How the collectives of a program run.

    Attributes:
        algorithms: How each runs.
        engines: The communicators of those collectives whose own op runs on copy engines, by name.
        of: The measured choice of each.
        cases: The case of each, for the measurement.
        why_demoted: The reason for those that are demoted to ordinary memory.
    """

    algorithms: Mapping[_Call, Algorithm] = field(factory=dict)
    engines: Mapping[_Call, str] = field(factory=dict)
    of: Mapping[_Call, Choice] = field(factory=dict)
    cases: Mapping[_Call, Case] = field(factory=dict)
    why_demoted: str = DEMOTED

    @property
    def ordinary(self) -> dict[_Call, str]:
        """The reason for each collective that stays in ordinary memory."""
        return {
            call: algorithm.reason
            for call, algorithm in self.algorithms.items()
            if algorithm.name == "ordinary"
        }

    @property
    def slower(self) -> frozenset[_Call]:
        """The collectives that symmetric memory does not make faster, as measured."""
        return frozenset(c for c, algorithm in self.algorithms.items() if algorithm.fastest)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The measured choices, in the order of the program."""
        return tuple(dict.fromkeys(self.of.values()))

    def placed(self, call: _Call) -> AlgorithmName:
        """The algorithm of a collective that has placements."""
        if call in self.engines:
            return "copy engine"
        found = self.algorithms.get(call)
        return "symmetric" if found is None or found.name != "two-level" else "two-level"

    def algorithm(self, call: _Call, demoted: Mapping[Any, AlgorithmName]) -> Algorithm:
        """The algorithm of a collective after some cases were demoted."""
        instead = demoted.get(self.cases.get(call))
        if instead is None:
            return self.algorithms[call]
        return Algorithm(instead, self.why_demoted if instead == "ordinary" else "")


def choose_algorithms(
    cases: Mapping[_Call, Case],
    left_out: Mapping[_Call, str],
    device: torch.device,
    preparation: Preparation,
    *,
    memory: str = "",
    gather: Callable[[Mapping[str, Any]], object] = lambda _: None,
    planned: Mapping[str, Any] = MappingProxyType({}),
    traces: bool = True,
) -> Chosen[_Call]:
    """Decide how the collectives of a program run.

    Args:
        cases: The collectives with more than one algorithm, in the order of the program.
        left_out: The collectives that stay in ordinary memory whatever is measured, and why.
        device: Where their tensors lie.
        preparation: The program's preparation. It has the reason if some rank cannot measure.
        memory: Name of the memory backend, if not the one that was last agreed on.
        gather: Waits until all ranks of the groups it is given have come to measure.
        planned: ``{name: process group}`` of those over which the plan is agreed, whatever is
            chosen.
        traces: Whether the caller may be tracing a program.

    Raises:
        AgreementError: The ranks have other collectives; raised on all of them.
        BackendError: It was asked for copy engines, and there are none.

    Collective: yes, over ``planned`` and the groups of the program; without ``planned`` not where
    these are known, and all was measured before or nothing is to be.
    """
    options = preparation.options
    choose = options.chosen(device)
    levels = any("two-level" in case.algorithms for case in cases.values())
    if options.choose == "auto" and levels and current() is None:
        choose = "measure"  # a network may be as fast
    memory = memory or preparation.memory
    fixed = {call: Algorithm("ordinary", reason) for call, reason in left_out.items()}
    known: dict[str, Any] = {"cases": cases}
    known["why_demoted"] = NO_ROOM if options.capacity is None else DEMOTED
    if choose == "ordinary":
        algorithms = dict.fromkeys(cases, Algorithm("ordinary", "choose='ordinary'"))
        return Chosen({**fixed, **algorithms}, **known)
    if choose == "symmetric" or not cases:
        algorithms = {call: _nearest("symmetric", case) for call, case in cases.items()}
        return Chosen({**fixed, **algorithms}, **known)
    named = resolve_groups(dict.fromkeys(case.group for case in cases.values()))
    groups = {name: group.process_group for name, group in named.items()}
    if any(group is None for group in groups.values()):
        return Chosen(fixed)  # without torch.distributed there is no other way
    if current() is None:
        new, most = _unmeasured(cases.values(), groups) if choose == "measure" else ([], {})
        where = _apart(device) if traces else _here(device)
        _learn(new, most, groups, planned, device, preparation, memory, gather, where)
        if preparation.refusal is not None:
            algorithms = dict.fromkeys(cases, Algorithm("ordinary", preparation.reason))
            return Chosen({**fixed, **algorithms}, **known)
    engines = known_of(groups)
    if choose == "copy engine" and current() is None:
        near = (case for case in cases.values() if "two-level" not in case.algorithms)
        require(dict.fromkeys(case.group for case in near), engines, memory)
    of: dict[_Call, Choice] = {}
    if choose == "measure":
        of = {call: choices_of(groups[case.group])[case] for call, case in cases.items()}
        fixed |= {
            call: Algorithm(c.algorithm, c.reason, not (c.placed or c.ruled))
            for call, c in of.items()
        }
    elif choose == "table":
        fixed |= {call: _ruled(options.table, case, memory) for call, case in cases.items()}
    else:
        fixed |= {call: _nearest(choose, case) for call, case in cases.items()}
    over = {
        call: c10d.group_name(engines[case.group])
        for call, case in cases.items()
        if fixed[call].name == "copy engine" and case.engine and case.group in engines
    }
    return Chosen(fixed, over, of, **known)


def _ruled(table: Table | None, case: Case, memory: str) -> Algorithm:
    """The algorithm by a table, or by the rules if no row fits."""
    facts = {"pushes": "push" in case.algorithms, "levels": "two-level" in case.algorithms}
    name, why = ruled(table, case.op, case.ranks, case.nbytes, memory, **facts)
    return Algorithm(name, why) if name == "ordinary" else _nearest(name, case)


def _nearest(algorithm: str, case: Case) -> Algorithm:
    """The algorithm of a collective that comes nearest to a given one."""
    found = next((w for w in _INSTEAD[algorithm] if w in case.algorithms), None)
    return Algorithm("ordinary", SPLIT_WORDS) if found is None else Algorithm(found)


def _unmeasured(
    cases: Iterable[Case], groups: Mapping[str, Any]
) -> tuple[list[Case], dict[Case, Case]]:
    """The cases to be timed, and all kinds of the program, each with most products beside it."""
    most: dict[Case, Case] = {}
    for case in cases:
        have = most.setdefault(case, case)
        if (case.beside or 0) > (have.beside or 0):
            most[case] = case
    return [c for case, c in most.items() if case not in choices_of(groups[case.group])], most


def _learn(
    new: Sequence[Case],
    program: Mapping[Case, Case],
    groups: Mapping[str, Any],
    planned: Mapping[str, Any],
    device: torch.device,
    preparation: Preparation,
    memory: str,
    gather: Callable[[Mapping[str, Any]], object],
    where: contextlib.AbstractContextManager[Callable[..., Any]],
) -> None:
    """Measure new cases, and set up copy engines for groups that have not been asked for them.

    Where nothing is new nobody is waited for: ranks that compile other collectives than their peers
    have something new, or another plan. Of several groups each measures by itself, so then all that
    make the plan settle on one choice for each case; those of ``planned`` make it together anyway.

    Collective: yes, over the groups of the plan, where something is new or ``planned`` is given.
    """
    if program:
        engines = (c for c in program if _algorithm_of(c, groups) == "copy engine")
        gone = [c for c in engines if not asked(groups[c.group])]
        ask = {c.group: groups[c.group] for c in (*new, *gone)}
    else:
        ask = {} if all(map(asked, groups.values())) else dict(groups)
    # What may be placed: the plan is agreed over these.
    known = {c.group: groups[c.group] for c in program if _algorithm_of(c, groups) != "ordinary"}
    together = {**known, **planned, **ask} if program else ask
    if not ask and (not planned or len(together) < 2):
        return
    with where as run:

        def measured() -> None:
            if preparation.refusal is not None:
                return
            timeout = preparation.options.timeout
            given = {"memory": memory, "device": device, "timeout": timeout}
            with counting("trials", device):
                if ask and run(measure, new, ask, **given):
                    if new:  # what they were measured on is not the program's
                        run(empty_cache, device)
                elif ask:
                    for case in new:
                        choices_of(groups[case.group])[case] = _unmeasurable(case)
            if len(together) > 1:
                _settle(program, groups, together, device, timeout)

        run(gather, together)
        preparation.attempt(measured, together)


@contextlib.contextmanager
def _apart(device: torch.device) -> Iterator[Callable[..., Any]]:
    """What runs a function in a thread of its own.

    This one may be tracing, on fake tensors, and work that it starts may need its interpreter lock
    to end. But cuBLAS has a handle for each thread that multiplies matrices, and torch a workspace
    for each handle, of 32 MiB on an H100: neither is ever given back.
    """
    start = device_of(device).set_current
    with futures.ThreadPoolExecutor(1, initializer=start) as thread:
        yield lambda act, *args, **kwargs: thread.submit(act, *args, **kwargs).result()


@contextlib.contextmanager
def _here(device: torch.device) -> Iterator[Callable[..., Any]]:
    """What runs a function in this thread, whatever the program has set for its own work."""
    with (
        dispatch.no_modes(),
        torch.inference_mode(mode=False),
        torch.autocast(device.type, enabled=False),
    ):
        yield lambda act, *args, **kwargs: act(*args, **kwargs)


def _unmeasurable(case: Case) -> Choice:
    """The choices by rule, if some rank has no room to measure."""
    algorithm = _ruled(None, case, case.memory)
    why = f"there was no room to measure it, and {algorithm.reason or 'by rule it gains'}"
    return evolve(case.unmeasured, algorithm=algorithm.name, ruled=why)


def _settle(
    cases: Iterable[Case],
    groups: Mapping[str, Any],
    together: Mapping[str, Any],
    device: torch.device,
    timeout: float,
) -> None:
    """Let all ranks that make a plan choose alike, by the slowest of them.

    Groups of the same number in their ranks' programs measure the same, each by itself: those that
    each host has inside a plan over all hosts, the rows of a mesh.

    Collective: yes, over ``together``.
    """
    number = {name: i for i, name in enumerate(groups)}
    known = {case: choices_of(groups[case.group])[case] for case in cases}
    labels = {json.dumps([number[case.group], case.key]): case for case in known}
    mine = {label: dict(known[case].seconds) for label, case in labels.items()}
    for label, seconds in all_slowest(mine, together, timeout).items():
        case = labels[label]
        if not seconds:
            choices_of(groups[case.group])[case] = _unmeasurable(case)
        elif seconds != known[case].seconds:
            choices_of(groups[case.group])[case] = chosen_by(known[case], seconds, case, device)


def _algorithm_of(case: Case, groups: Mapping[str, Any]) -> AlgorithmName:
    """The measured algorithm of a case; ordinary while there is none."""
    choice = choices_of(groups[case.group]).get(case)
    return "ordinary" if choice is None else choice.algorithm
