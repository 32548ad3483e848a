"""How the collectives of a program run: what was not measured yet is, on all ranks together."""

from __future__ import annotations

import contextlib
from concurrent import futures
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from attrs import evolve

from symmplan.choose.choice import DEMOTED, NO_ROOM
from symmplan.choose.chooser import (
    Chosen,
    algorithm_of,
    chosen_among,
    nearest,
    settle,
    unmeasurable,
    unmeasured,
)
from symmplan.choose.trials import choices_of, measure
from symmplan.coordination.groups import resolve_groups
from symmplan.coordination.world import current
from symmplan.device import device_of, kind_of
from symmplan.memory.beyond import counting
from symmplan.memory.device_memory import empty_cache
from symmplan.model import Algorithm
from symmplan.place.engines import asked, known_of, require, unask
from symmplan.torch_private import dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from symmplan.choose.cases import Case
    from symmplan.runtime.prepare import Preparation

_Call = TypeVar("_Call")


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
    why_demoted = NO_ROOM if options.capacity is None else DEMOTED
    known: dict[str, Any] = {"cases": cases, "why_demoted": why_demoted}
    if choose == "ordinary":
        algorithms = dict.fromkeys(cases, Algorithm("ordinary", "choose='ordinary'"))
        return Chosen({**fixed, **algorithms}, **known)
    if choose == "symmetric" or not cases:
        algorithms = {call: nearest("symmetric", case) for call, case in cases.items()}
        return Chosen({**fixed, **algorithms}, **known)
    named = resolve_groups(dict.fromkeys(case.group for case in cases.values()))
    groups = {name: group.process_group for name, group in named.items()}
    if any(group is None for group in groups.values()):
        return Chosen(fixed)  # without torch.distributed there is no other way
    if current() is None:
        new, most = unmeasured(cases.values(), groups) if choose == "measure" else ([], {})
        where = _apart(device) if traces else _here(device)
        _learn(new, most, groups, planned, device, preparation, memory, gather, where)
        if preparation.refusal is not None:
            algorithms = dict.fromkeys(cases, Algorithm("ordinary", preparation.reason))
            return Chosen({**fixed, **algorithms}, **known)
    engines = known_of(groups)
    if choose == "copy engine" and current() is None:
        near = (case for case in cases.values() if "two-level" not in case.algorithms)
        require(dict.fromkeys(case.group for case in near), engines, memory)
    given = (options.table, memory, groups, engines, why_demoted)
    return chosen_among(cases, fixed, choose, *given)


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
        engines = (c for c in program if algorithm_of(c, groups) == "copy engine")
        gone = [c for c in engines if not asked(groups[c.group])]
        ask = {c.group: groups[c.group] for c in (*new, *gone)}
    else:
        ask = {} if all(map(asked, groups.values())) else dict(groups)
    # What may be placed, as if no barrier were charged: the plan is agreed over these.
    kernels = kind_of(device).is_accelerator
    free = (evolve(case, barriers=not (kernels and case.lone_all_reduce)) for case in program)
    known = {c.group: groups[c.group] for c in free if algorithm_of(c, groups) != "ordinary"}
    together = {**known, **planned, **ask} if program else ask
    if not ask and (not planned or len(together) < 2):
        return
    with where as run:
        fresh = [group for group in ask.values() if not asked(group)]

        def forget(_: object = None) -> None:
            """What some rank has failed at is known to none, so that all ask again."""
            for case in new:
                choices_of(groups[case.group]).pop(case, None)
            unask(fresh)

        def measured() -> bool:
            if preparation.refusal is not None:
                return True
            try:
                learned()
            except BaseException:
                forget()
                raise
            return True

        def learned() -> None:
            timeout = preparation.options.timeout
            keeps = preparation.keeps_cache
            given = {"memory": memory, "device": device, "timeout": timeout, "keeps": keeps}
            with counting("trials", device):
                if ask and run(measure, new, ask, **given):
                    if new and not keeps:  # what they were measured on is not the program's
                        run(empty_cache, device)
                elif ask:
                    for case in new:
                        choices_of(groups[case.group])[case] = unmeasurable(case)
            if len(together) > 1:
                settle(program, groups, together, device, timeout)

        run(gather, together)
        preparation.attempt(measured, together, forget)


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
