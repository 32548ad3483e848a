"""The algorithm of each collective of a captured program: measured in it, the same on all ranks.

Before a program is planned each of its collectives is timed in every way there is, at its size,
with its copies, and beside as many matrix products as the program has between its start and its
wait; where another group's may run meanwhile, beside that, too, see [Note: concurrent collectives]
in `symmplan.runtime.concurrent`. What does not gain clearly stays out of the plan, with the times
as the reason.

A case is measured once in a process, see [Note: who measures] in `symmplan.runtime.trials`.
"""

from __future__ import annotations

from concurrent import futures
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.world import current
from symmplan.memory.topology import unreached
from symmplan.runtime.cases import Case, cases_of, measure_cases
from symmplan.runtime.engines import Engines, asked, known_of, require
from symmplan.runtime.trials import choices_of
from symmplan.runtime.tuning_table import ruled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

    from symmplan.capture import Captured
    from symmplan.runtime.algorithms import Lowering, Lowerings
    from symmplan.runtime.choice import Choice
    from symmplan.runtime.options import Options
    from symmplan.runtime.prepare import Preparation
    from symmplan.runtime.tuning_table import Table

__all__ = ["Chosen", "choose_algorithms"]


@frozen(eq=False)
class Chosen:
    """How the collectives of a program run.

    Attributes:
        ordinary: ``{node: reason}`` of those that stay as they are.
        engines: ``{node: name of the communicator}`` of those that copy engines run.
        choices: What was measured, in the order of the program.
        of: ``{node: what was measured of it}``.
    """

    ordinary: Mapping[fx.Node, str] = field(factory=dict)
    engines: Mapping[fx.Node, str] = field(factory=dict)
    choices: Sequence[Choice] = ()
    of: Mapping[fx.Node, Choice] = field(factory=dict)


def choose_algorithms(
    captured: Captured,
    lowerings: Lowerings,
    device: torch.device,
    preparation: Preparation,
    gather: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Chosen:
    """Decide how the collectives of a program run.

    Args:
        captured: The program's decisions if everything is placed.
        lowerings: How each op is run on the memory backend.
        device: Where its tensors lie.
        preparation: Of the program; has the reason where nothing can be measured on some rank.
        gather: Waits until all ranks of the groups it is given have come to measure.

    Raises:
        AgreementError: The ranks have other collectives; raised on all of them.
        BackendError: It was asked for copy engines, and there are none.

    Collective: yes, over the groups of the program, unless they are known, and all was measured
    before or nothing is to be.
    """
    options = preparation.options
    choose = options.chosen(device)
    apart = _apart(captured, lowerings.memory, device, options)
    sites = (site for site in captured.sites if site.buffer is not None)
    nodes = [n for n in dict.fromkeys(site.node for site in sites) if n not in apart]
    rows = {n: row for n in nodes if (row := lowerings.row(captured.specs[n])) is not None}
    if choose in ("symmetric", "push") or not rows:
        return Chosen(apart)
    if choose == "ordinary":
        return Chosen({**apart, **dict.fromkeys(rows, "choose='ordinary'")})
    cases = cases_of(captured, rows, lowerings.memory)
    names = dict.fromkeys(c.group for c in cases.values())
    groups = {n: g.process_group for n, g in resolve_groups(names).items()}
    if any(group is None for group in groups.values()):
        return Chosen(apart)  # without torch.distributed there is no other way
    new: list[Case] = []
    most: dict[Case, Case] = {}
    if choose in ("copy engine", "table"):
        ask = {n: g for n, g in groups.items() if not asked(g)} and groups
    else:
        # What has concurrent collectives is first measured without.
        for case in (*(c.by_itself for c in cases.values()), *cases.values()):
            have = most.setdefault(case, case)
            if case.beside > have.beside:
                most[case] = case
        new = [c for case, c in most.items() if case not in choices_of(groups[case.group])]
        gone = [c for c in most if _runs_on_engines(c, groups) and not asked(groups[c.group])]
        beside = [c.concurrent for c in new if c.concurrent is not None]
        ask = {c.group: groups[c.group] for c in (*new, *beside, *gone)}
    # Where nothing is new nobody is waited for: ranks that compile other collectives than their
    # peers have something new, or another plan.
    if ask and current() is None:
        # In a thread of its own: this one is tracing, on fake tensors, and work that it starts may
        # need its interpreter lock to end.
        with futures.ThreadPoolExecutor(1) as thread:

            def measured() -> None:
                if preparation.refusal is None:
                    given = (new, most, ask, lowerings, device, options)
                    thread.submit(measure_cases, *given).result()

            thread.submit(gather, ask).result()
            preparation.attempt(measured, ask)
        if preparation.refusal is not None:
            return Chosen(dict.fromkeys(rows, preparation.reason))
    engines = known_of(groups)
    if choose == "copy engine":
        require(groups, engines, lowerings.memory)
        return Chosen(apart, engines=_over(cases, rows, engines))
    if choose == "table":
        return _by_table(apart, cases, rows, groups, engines, options.table)
    choices = {node: choices_of(groups[case.group])[case] for node, case in cases.items()}
    by_engines = {n: cases[n] for n, c in choices.items() if c.algorithm == "copy engine"}
    return Chosen(
        {**apart, **{node: c.reason for node, c in choices.items() if not c.placed}},
        _over(by_engines, rows, engines),
        list(dict.fromkeys(choices.values())),
        choices,
    )


def _apart(
    captured: Captured, memory: str, device: torch.device, options: Options
) -> dict[fx.Node, str]:
    """The calls over groups that the memory backend cannot serve, and why.

    Collective: yes, over the groups that were not asked before.
    """
    calls = {s.node: captured.groups[s.node] for s in captured.sites if s.buffer is not None}
    groups = {n: g.process_group for n, g in resolve_groups(calls.values()).items()}
    why = unreached(groups, memory, device, options.timeout)
    return {node: why[group] for node, group in calls.items() if group in why}


def _by_table(
    apart: Mapping[fx.Node, str],
    cases: Mapping[fx.Node, Case],
    rows: Mapping[fx.Node, Lowering],
    groups: Mapping[str, Any],
    engines: Mapping[str, Engines],
    table: Table | None,
) -> Chosen:
    """As it was measured elsewhere, else by rule."""
    found = {}
    for node, case in cases.items():
        ranks = groups[case.group].size()
        nbytes = sum(case.numels) * int(getattr(torch, case.dtype).itemsize)
        found[node] = ruled(table, case.op, ranks, nbytes, case.memory)
    by_engines = {n: cases[n] for n, (algorithm, _) in found.items() if algorithm == "copy engine"}
    return Chosen(
        {
            **apart,
            **{n: reason for n, (algorithm, reason) in found.items() if algorithm == "ordinary"},
        },
        _over(by_engines, rows, engines),
    )


def _over(
    cases: Mapping[fx.Node, Case],
    rows: Mapping[fx.Node, Lowering],
    engines: Mapping[str, Engines],
) -> dict[fx.Node, str]:
    """The communicators on which copy engines run what they can."""
    return {
        node: engines[case.group].name(engine)
        for node, case in cases.items()
        if case.group in engines and (engine := rows[node].engine)
    }


def _runs_on_engines(case: Case, groups: Mapping[str, Any]) -> bool:
    choice = choices_of(groups[case.group]).get(case)
    return choice is not None and choice.algorithm == "copy engine"
