"""The way of each collective of a captured program: measured in it, the same on all ranks.

Before a program is planned each of its collectives is timed in every way there is, at its size,
with its copies, and beside as many matrix products as the program has between its start and its
wait. What does not gain clearly stays out of the plan, with the times as the reason.

A case is measured once in a process, see [Note: who measures] in `symmplan.place.trials`.
"""

from __future__ import annotations

import math
from concurrent import futures
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from symmplan.capture.bounds import bound as bound_of
from symmplan.capture.graphs import overload_of
from symmplan.memory.groups import resolve_groups
from symmplan.memory.own import own_work
from symmplan.memory.simulated import current
from symmplan.memory.topology import unreached
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.place.attempt import attempt
from symmplan.place.choice import Choice
from symmplan.place.engines import Engines, asked, known_of, require
from symmplan.place.table import agree_on, ruled
from symmplan.place.trials import Trial, choices_of, measure, room_for
from symmplan.place.ways import Lowering, Lowerings, overload_named
from symmplan.place.work import flops_beside
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

    from symmplan.capture import Captured
    from symmplan.place.attempt import Refusal
    from symmplan.place.clock import Act
    from symmplan.place.options import Options

__all__ = ["Chosen", "choose_ways"]

#: What passes once, at the begin and the end of what is timed, must not decide.
_ENOUGH = 512 << 20
_ALIGN = 256


@frozen
class _Case:
    """What is measured once: two collectives with the same case take about the same time."""

    op: str
    memory: str
    group: str
    dtype: str
    numels: tuple[int, ...]
    others: tuple[tuple[str, Any], ...]
    copied_in: bool
    copied_out: bool
    alone: bool
    beside: int = field(eq=False)

    @property
    def key(self) -> list[Any]:
        """What must be the same on all ranks; the names of groups may differ."""
        return [
            *(self.op, self.memory, self.dtype, list(self.numels)),
            *(self.copied_in, self.copied_out, self.alone),
        ]


@frozen(eq=False)
class Chosen:
    """How the collectives of a program run.

    Attributes:
        ordinary: ``{node: reason}`` of those that stay as they are.
        engines: ``{node: name of the communicator}`` of those that copy engines run.
        choices: What was measured, in the order of the program.
        of: ``{node: what was measured of it}``.
        refusal: Why nothing could be measured; None if it was, or did not have to be.
    """

    ordinary: Mapping[fx.Node, str] = field(factory=dict)
    engines: Mapping[fx.Node, str] = field(factory=dict)
    choices: Sequence[Choice] = ()
    of: Mapping[fx.Node, Choice] = field(factory=dict)
    refusal: Refusal | None = None


#: Arguments of all-to-alls. What has placements has equal parts.
_SPLITS = ("output_split_sizes", "input_split_sizes")

_wait = torch.ops._c10d_functional.wait_tensor


def choose_ways(
    captured: Captured,
    lowerings: Lowerings,
    device: torch.device,
    options: Options,
    gather: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Chosen:
    """Decide how the collectives of a program run.

    Args:
        captured: The program's decisions if everything is placed.
        lowerings: How each op is run on the memory backend.
        device: Where its tensors lie.
        options: How it was asked to choose, and how long ranks wait for each other.
        gather: Waits until all ranks of the groups it is given have come to measure.

    Raises:
        AgreementError: The ranks have other collectives; raised on all of them.
        BackendError: It was asked for copy engines, and there are none.

    Collective: yes, over the groups of the program, unless they are known, and all was measured
    before or nothing is to be.
    """
    choose = options.chosen(device)
    apart = _apart(captured, lowerings.memory, device, options.timeout)
    sites = (site for site in captured.sites if site.buffer is not None)
    nodes = [n for n in dict.fromkeys(site.node for site in sites) if n not in apart]
    rows = {n: row for n in nodes if (row := lowerings.row(captured.specs[n])) is not None}
    if choose in ("symmetric", "push") or not rows:
        return Chosen(apart)
    if choose == "ordinary":
        return Chosen({**apart, **dict.fromkeys(rows, "choose='ordinary'")})
    flops = flops_beside(nodes)
    cases = {n: _case(captured, n, row, lowerings.memory, flops[n]) for n, row in rows.items()}
    names = dict.fromkeys(c.group for c in cases.values())
    groups = {n: g.process_group for n, g in resolve_groups(names).items()}
    if any(group is None for group in groups.values()):
        return Chosen(apart)  # without torch.distributed there is no other way
    new: list[_Case] = []
    if choose in ("copy engine", "table"):
        ask = {n: g for n, g in groups.items() if not asked(g)} and groups
    else:
        most: dict[_Case, _Case] = {}
        for case in cases.values():
            have = most.setdefault(case, case)
            if case.beside > have.beside:
                most[case] = case
        new = [c for case, c in most.items() if case not in choices_of(groups[case.group])]
        gone = [c for c in most if _runs_on_engines(c, groups) and not asked(groups[c.group])]
        ask = {c.group: groups[c.group] for c in (*new, *gone)}
    # Where nothing is new nobody is waited for: ranks that compile other collectives than their
    # peers have something new, or another plan.
    if ask and current() is None:
        # In a thread of its own: this one is tracing, on fake tensors, and work that it starts may
        # need its interpreter lock to end.
        with futures.ThreadPoolExecutor(1) as thread:

            def measured() -> bool:
                thread.submit(_measure, new, ask, lowerings, device, options).result()
                return True

            thread.submit(gather, ask).result()
            _, refusal = attempt(measured, ask, options.timeout, undo=lambda _: None)
        if refusal is not None:
            return Chosen(dict.fromkeys(rows, refusal.reason), refusal=refusal)
    engines = known_of(groups)
    if choose == "copy engine":
        require(groups, engines, lowerings.memory)
        return Chosen(apart, engines=_over(cases, rows, engines))
    if choose == "table":
        return _by_table(apart, cases, rows, groups, engines, options)
    choices = {node: choices_of(groups[case.group])[case] for node, case in cases.items()}
    by_engines = {n: cases[n] for n, c in choices.items() if c.way == "copy engine"}
    return Chosen(
        {**apart, **{node: c.reason for node, c in choices.items() if not c.placed}},
        _over(by_engines, rows, engines),
        list(dict.fromkeys(choices.values())),
        choices,
    )


def _apart(
    captured: Captured, memory: str, device: torch.device, timeout: float
) -> dict[fx.Node, str]:
    """The calls over groups that the memory backend cannot serve, and why.

    Collective: yes, over the groups that were not asked before what they are.
    """
    calls = {s.node: captured.groups[s.node] for s in captured.sites if s.buffer is not None}
    groups = {n: g.process_group for n, g in resolve_groups(calls.values()).items()}
    why = unreached(groups, memory, device, timeout)
    return {node: why[group] for node, group in calls.items() if group in why}


def _by_table(
    apart: Mapping[fx.Node, str],
    cases: Mapping[fx.Node, _Case],
    rows: Mapping[fx.Node, Lowering],
    groups: Mapping[str, Any],
    engines: Mapping[str, Engines],
    options: Options,
) -> Chosen:
    """As it was measured elsewhere, else by rule. Collective: as `agree_on`."""
    agree_on(options.table, groups, options.timeout)
    found = {}
    for node, case in cases.items():
        ranks = groups[case.group].size()
        nbytes = sum(case.numels) * int(getattr(torch, case.dtype).itemsize)
        found[node] = ruled(options.table, case.op, ranks, nbytes, case.memory)
    by_engines = {n: cases[n] for n, (way, _) in found.items() if way == "copy engine"}
    return Chosen(
        {**apart, **{n: reason for n, (way, reason) in found.items() if way == "ordinary"}},
        _over(by_engines, rows, engines),
    )


def _over(
    cases: Mapping[fx.Node, _Case],
    rows: Mapping[fx.Node, Lowering],
    engines: Mapping[str, Engines],
) -> dict[fx.Node, str]:
    """The communicators on which copy engines run what they can."""
    return {
        node: engines[case.group].name(engine)
        for node, case in cases.items()
        if case.group in engines and (engine := rows[node].engine)
    }


def _runs_on_engines(case: _Case, groups: Mapping[str, Any]) -> bool:
    choice = choices_of(groups[case.group]).get(case)
    return choice is not None and choice.way == "copy engine"


def _case(captured: Captured, node: fx.Node, row: Lowering, memory: str, flops: float) -> _Case:
    sites = captured.at(node)
    spec = captured.specs[node]
    overload = overload_of(node.target)
    assert overload is not None
    bound = bind_arguments(overload, node.args, node.kwargs)
    name = "inputs" if row.each else "input"
    given = bound.pop(name)
    fakes = [n.meta["val"] for n in (given if row.each else [given])]
    group = captured.groups[node]
    assert spec.group is not None  # collectives name theirs
    for argument in (spec.group, "out", *_SPLITS):
        bound.pop(argument, None)
    return _Case(
        op=spec.op,
        memory=memory,
        group=group,
        dtype=str(fakes[0].dtype).removeprefix("torch."),
        numels=tuple(bound_of(f.numel()) or 0 for f in fakes),
        others=tuple(
            sorted((k, tuple(v) if isinstance(v, (list, tuple)) else v) for k, v in bound.items())
        ),
        copied_in=any(s.how == "stage" and s.kind == "argument" for s in sites),
        copied_out=any(s.leaves or (s.how == "stage" and s.writes) for s in sites),
        alone=not flops,
        beside=1 << max(0, math.ceil(math.log2(flops))) if flops else 0,
    )


@own_work
def _measure(
    cases: Sequence[_Case],
    groups: Mapping[str, Any],
    lowerings: Lowerings,
    device: torch.device,
    options: Options,
) -> None:
    """Time the cases in every way there is."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    used = list(dict.fromkeys(c.group for c in cases))
    # Inputs and results: ordinary ones, symmetric ones of each group, and a copy out.
    most_of_one = room_for(2 * (1 + len(used)) + 1, device)
    scaled = [_scaled(c, groups[c.group].size(), most_of_one) for c in cases]
    needed = [_scratch(c, groups[c.group].size(), n) for c, n in zip(cases, scaled, strict=True)]
    most = {w: max((n[i] for n in needed), default=0) for i, w in enumerate(("in", "out"))}
    buffers = [Buffer(f"{w} {i}", n, g) for i, g in enumerate(used) for w, n in most.items()]
    problem = Problem(
        buffers=tuple(buffers),
        operations=(Operation("all"),),
        accesses=tuple(Access("all", b.name, write=True) for b in buffers),
    )
    plain = [torch.ones(n, dtype=torch.uint8, device=device) for n in most.values()]
    trials = [
        _trial(case, numels, groups[case.group].size(), used.index(case.group), plain, lowerings)
        for case, numels in zip(cases, scaled, strict=True)
    ]
    measure(
        trials,
        problem,
        groups,
        memory=lowerings.memory,
        device=device,
        timeout=options.timeout,
        enough=_ENOUGH,
    )


def _trial(
    case: _Case,
    numels: Sequence[int],
    size: int,
    number: int,
    plain: Sequence[torch.Tensor],
    lowerings: Lowerings,
) -> Trial:
    def acts(there: Mapping[str, torch.Tensor], engines: Engines | None) -> dict[str, Act]:
        places = there[f"in {number}"], there[f"out {number}"]
        return _Acts(case, numels, size, plain, places).acts(lowerings, engines)

    choice = Choice(
        op=case.op,
        nbytes=sum(case.numels) * getattr(torch, case.dtype).itemsize,
        dtype=case.dtype,
        group=case.group,
        ranks=size,
        seconds={},
        way="ordinary",
        copied_in=case.copied_in,
        copied_out=case.copied_out,
        beside=case.beside,
    )
    scale = sum(case.numels) / max(sum(numels), 1)
    nbytes = max(_scratch(case, size, numels))
    return Trial(case, case.key, choice, nbytes, case.beside / max(scale, 1), max(scale, 1), acts)


def _scaled(case: _Case, size: int, largest: int) -> list[int]:
    """Elements of each input, made smaller where all together, or the results, are too large."""
    itemsize: int = getattr(torch, case.dtype).itemsize
    whole = sum(case.numels) * itemsize * (size if "all_gather" in case.op else 1)
    factor = largest / max(whole, 1)
    unit = size * _ALIGN
    if factor >= 1:
        return list(case.numels)
    return [min(n, max(unit, int(n * factor) // unit * unit)) for n in case.numels]


def _scratch(case: _Case, size: int, given: Sequence[int]) -> tuple[int, int]:
    """Bytes of its inputs and of its results, aligned; in place, both are as large."""
    itemsize = getattr(torch, case.dtype).itemsize
    made = [_made(case, n, size) for n in given]
    return _aligned(given, itemsize), _aligned(made, itemsize)


def _made(case: _Case, numel: int, size: int) -> int:
    """Elements of the result for an input."""
    if "all_gather" in case.op:
        return numel * size
    return numel // size if "reduce_scatter" in case.op else numel


def _aligned(numels: Sequence[int], itemsize: int) -> int:
    return sum(-(-n * itemsize // _ALIGN) * _ALIGN for n in numels)


class _Acts:
    """Runs one case in each way."""

    def __init__(
        self,
        case: _Case,
        numels: Sequence[int],
        size: int,
        plain: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
    ) -> None:
        self._case = case
        self._size = size
        dtype = getattr(torch, case.dtype)
        made = [_made(case, n, size) for n in numels]
        self._inputs, self._placed = (_cut(flat[0], numels, dtype) for flat in (plain, places))
        self._plain_outs, self._outs = (_cut(flat[1], made, dtype) for flat in (plain, places))
        for tensor in (*self._inputs, *self._placed):
            tensor.fill_(1)

    def acts(self, lowerings: Lowerings, engines: Engines | None) -> dict[str, Act]:
        """What runs it."""
        row, group = lowerings.table[self._case.op], self._case.group
        acts = {"ordinary": self._plain(row), "symmetric": self._in_placements(row, group)}
        if engines is not None and row.engine:
            acts["copy engine"] = self._in_placements(row, engines.name(row.engine))
        return acts

    def _plain(self, row: Lowering) -> Act:
        target = overload_named(self._case.op)
        values = self._values(self._case.group)
        values["inputs" if row.each else "input"] = self._inputs if row.each else self._inputs[0]
        args = [values[a.name] for a in target._schema.arguments if not a.kwarg_only]
        has_out = any(a.name == "out" for a in target._schema.arguments)
        kwargs = {"out": self._plain_outs[0]} if has_out else {}

        def act(beside: Callable[[], None]) -> None:
            results = target(*args, **kwargs)
            beside()
            for result in results if row.each else [results]:
                _wait(result)

        return act

    def _in_placements(self, row: Lowering, group: str) -> Act:
        target = overload_named(row.target)
        has_out = any(a.name == "out" for a in target._schema.arguments)
        values = self._values(group)
        copied_in = self._case.copied_in or row.inplace
        outs = self._placed if row.out == "input" else self._outs

        def act(beside: Callable[[], None]) -> None:
            for source, placed, out in zip(self._inputs, self._placed, outs, strict=True):
                given = out if row.inplace else placed
                if copied_in:
                    given.copy_(source)
                now = {**values, "input": given}
                args = [now[a.name] for a in target._schema.arguments if not a.kwarg_only]
                target(*args, **({"out": out} if has_out else {}))
            beside()
            for out in outs:
                _wait(out)
                if self._case.copied_out:
                    out.clone()

        return act

    def _values(self, group: str) -> dict[str, Any]:
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in self._case.others}
        parts = [self._inputs[0].numel() // self._size] * self._size
        return {**values, **dict.fromkeys(_SPLITS, parts), "group_name": group}


def _cut(flat: torch.Tensor, numels: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Aligned pieces of a placement, one behind the other."""
    pieces = []
    begin = 0
    for numel in numels:
        end = begin + numel * dtype.itemsize
        pieces.append(flat[begin:end].view(dtype))
        begin = -(-end // _ALIGN) * _ALIGN
    return pieces
