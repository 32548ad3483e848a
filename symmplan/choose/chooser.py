"""The algorithm of each collective of a program: ruled, or measured in it, the same on all ranks.

Before a program is planned, each of its collectives is timed by every algorithm: at its size, with
its copies, and beside as many matrix products as the program has between its start and its wait. A
collective without a clear gain stays out of the plan, with the times as the reason.

A case is measured once in a process, see [Note: who measures] in `symmplan.choose.trials`. Who
prepares a program has what is new measured (`symmplan.runtime.measure`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attrs import evolve, field, frozen

from symmplan.choose.choice import DEMOTED
from symmplan.choose.trials import all_slowest, choice_in, choices_of, chosen_by
from symmplan.choose.tuning_table import ruled
from symmplan.memory.backends.torch_symm import SPLIT_WORDS
from symmplan.model import Algorithm
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from symmplan.choose.cases import Case
    from symmplan.choose.choice import Choice
    from symmplan.choose.tuning_table import Table
    from symmplan.model import AlgorithmName

_Call = TypeVar("_Call")

#: What a collective takes that is to run by some algorithm: the first of these that it has.
_INSTEAD: Mapping[str, tuple[AlgorithmName, ...]] = {
    "symmetric": ("symmetric", "two-level"),
    "copy engine": ("copy engine", "symmetric", "two-level"),
    "push": ("push", "copy engine", "symmetric", "two-level"),
    "shared push": ("shared push", "copy engine", "symmetric", "two-level"),
    "two-level": ("two-level", "symmetric"),
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


def chosen_among(
    cases: Mapping[_Call, Case],
    fixed: Mapping[_Call, Algorithm],
    choose: str,
    table: Table | None,
    memory: str,
    groups: Mapping[str, Any],
    engines: Mapping[str, Any],
    why_demoted: str,
) -> Chosen[_Call]:
    """How collectives run, where all that is to be measured was.

    Args:
        cases: Those with more than one algorithm.
        fixed: The algorithms of the others.
        choose: ``"measure"``, ``"table"``, or the algorithm of all that have it.
        table: The tuning table, if there is one.
        memory: Name of the memory backend.
        groups: ``{name: process group}``.
        engines: The communicators for copy engines of those that have one, by the group's name.
        why_demoted: The reason for those that are demoted to ordinary memory later.
    """
    algorithms, of = dict(fixed), {}
    if choose == "measure":
        of = {
            call: choice_in(case, choices_of(groups[case.group])[case])
            for call, case in cases.items()
        }
        algorithms |= {
            call: Algorithm(c.algorithm, c.reason, not (c.placed or c.ruled))
            for call, c in of.items()
        }
    elif choose == "table":
        algorithms |= {call: ruled_by(table, case, memory) for call, case in cases.items()}
    else:
        algorithms |= {call: nearest(choose, case) for call, case in cases.items()}
    over = {
        call: c10d.group_name(engines[case.group])
        for call, case in cases.items()
        if algorithms[call].name == "copy engine" and case.engine and case.group in engines
    }
    return Chosen(algorithms, over, of, cases, why_demoted)


def ruled_by(table: Table | None, case: Case, memory: str) -> Algorithm:
    """The algorithm by a table, or by the rules if no row fits."""
    facts = {"pushes": "push" in case.algorithms, "levels": "two-level" in case.algorithms}
    name, why = ruled(table, case.op, case.ranks, case.nbytes, memory, **facts)
    return Algorithm(name, why) if name == "ordinary" else nearest(name, case)


def nearest(algorithm: str, case: Case) -> Algorithm:
    """The algorithm of a collective that comes nearest to a given one."""
    found = next((w for w in _INSTEAD[algorithm] if w in case.algorithms), None)
    return Algorithm("ordinary", SPLIT_WORDS) if found is None else Algorithm(found)


def unmeasured(
    cases: Iterable[Case], groups: Mapping[str, Any]
) -> tuple[list[Case], dict[Case, Case]]:
    """The cases to be timed, and all kinds of the program, each with most products beside it."""
    most: dict[Case, Case] = {}
    for case in cases:
        have = most.setdefault(case, case)
        if (case.beside or 0) > (have.beside or 0):
            most[case] = case
    return [c for case, c in most.items() if case not in choices_of(groups[case.group])], most


def unmeasurable(case: Case) -> Choice:
    """The choices by rule, if some rank has no room to measure."""
    algorithm = ruled_by(None, case, case.memory)
    why = f"there was no room to measure it, and {algorithm.reason or 'by rule it gains'}"
    return evolve(case.unmeasured, algorithm=algorithm.name, ruled=why)


def settle(
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
            choices_of(groups[case.group])[case] = unmeasurable(case)
        elif seconds != known[case].seconds:
            choices_of(groups[case.group])[case] = chosen_by(known[case], seconds, case, device)


def algorithm_of(case: Case, groups: Mapping[str, Any]) -> AlgorithmName:
    """The measured algorithm of a case; ordinary while there is none."""
    choice = choices_of(groups[case.group]).get(case)
    return "ordinary" if choice is None else choice_in(case, choice).algorithm
