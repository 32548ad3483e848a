"""Symmetric memory or torch's own way, for each collective of a graph: measured, the same on all.

Symmetric memory is not always faster: without NVLink multicast a symmetric reduce-scatter is slower
than the ordinary one, small all-gathers gain nothing, and a copy into or out of a placement may
cost more than the collective saves. So before a graph is planned each of its collectives is timed
both ways at its size, with its copies, and beside as many matrix products as the graph has between
its start and its wait. What does not gain clearly stays out of the plan, with the two times as the
reason.

A case is measured once in a process. See [Note: what is timed] in `symmplan.place.clock`.

[Note: who measures]
    All ranks of a group must measure the same, or nobody. So what decides it, and under what the
    result is found again, is the same on all of them: the collective, its sizes, its process group
    and whether any products run beside it. How many do depends on the rest of the graph, and so on
    a batch that may be smaller on one rank: the first graph with a case decides for later ones, and
    of several such collectives in it that with most products.

    A process group is known by itself and not by its name: another one may have had that before,
    and other ranks.
"""

from __future__ import annotations

import math
from concurrent import futures
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from attrs import field, frozen

from symmplan.capture.bounds import bound as bound_of
from symmplan.capture.graphs import overload_of
from symmplan.errors import AgreementError
from symmplan.integrate.compile.work import flops_beside
from symmplan.memory.groups import resolve_groups
from symmplan.memory.own import own_work
from symmplan.memory.spares import borrowed
from symmplan.memory.tell import leaders, tell
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.place.clock import clock_of, seconds_of, slowest
from symmplan.place.ways import Lowering, Lowerings, overload_named
from symmplan.planner import plan as plan_problem
from symmplan.registry import bind_arguments, resolve_group_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

    from symmplan.capture import Captured
    from symmplan.place.clock import Act, Clock

__all__ = ["Choice", "forget", "refused"]

#: Symmetric memory is chosen where it takes at most this part of the time of torch's own way: it
#: ties the order of the program down, and what is planned for nothing costs its bytes.
_CLEARLY = 0.98
#: Larger collectives are measured at this size, in bytes: there the ratio no longer depends on it.
_LARGEST = 256 << 20
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


@frozen
class Choice:
    """What was measured of one kind and size of collective in a compiled graph.

    Attributes:
        op: The collective.
        group: Name of the process group.
        dtype: Element type.
        nbytes: Bytes of its inputs on one rank.
        copied_in: Whether its inputs must be copied into placements.
        copied_out: Whether its results must be copied out of them.
        beside: Floating-point operations of the matrix products that the graph runs beside it, the
            next power of two; 0 if it has none there.
        plain_seconds: Time of torch's own way, of the slowest rank.
        placed_seconds: Time in symmetric memory with those copies, of the slowest rank.
        placed: Whether symmetric memory was chosen.
    """

    op: str
    group: str
    dtype: str
    nbytes: int
    copied_in: bool
    copied_out: bool
    beside: int
    plain_seconds: float
    placed_seconds: float
    placed: bool

    @property
    def reason(self) -> str:
        """Why it stays out of the plan, if it does."""
        copies = [w for w, b in (("in", self.copied_in), ("out", self.copied_out)) if b]
        under = f", copied {' and '.join(copies)}" if copies else ""
        return (
            f"symmetric memory was not clearly faster: {self.placed_seconds * 1e6:.0f} us{under}, "
            f"against {self.plain_seconds * 1e6:.0f} us in torch's own way"
        )


#: By process group. See [Note: who measures].
_FOUND: WeakKeyDictionary[Any, dict[_Case, Choice]] = WeakKeyDictionary()


def forget() -> None:
    """Measure everything anew from now on. Must be called on all ranks, or on none."""
    _FOUND.clear()


def refused(
    captured: Captured,
    lowerings: Lowerings,
    device: torch.device,
    timeout: float,
    gather: Callable[[Mapping[str, Any]], None],
) -> tuple[dict[fx.Node, str], list[Choice]]:
    """Which collectives are to stay as they are, and what was measured.

    Args:
        captured: The graph's decisions if everything is placed.
        lowerings: How each op is run on the memory backend.
        device: Where its tensors lie.
        timeout: Seconds that ranks wait for each other.
        gather: Waits until all ranks of the groups it is given have come to measure.

    Returns:
        ``{node: reason}`` and every choice, in graph order.

    Raises:
        AgreementError: The ranks compile other collectives; raised on all of them.

    Collective: yes, over the groups of the graph, unless all was measured before.
    """
    cases: dict[fx.Node, _Case] = {}
    nodes = list(dict.fromkeys(site.node for site in captured.sites))
    flops = flops_beside(nodes)
    for node in nodes:
        row = lowerings.row(captured.specs[node])
        case = None if row is None else _case(captured, node, row, lowerings.memory, flops[node])
        if case is not None:
            cases[node] = case
    names = dict.fromkeys(c.group for c in cases.values())
    groups = {n: g.process_group for n, g in resolve_groups(names).items()}
    if any(group is None for group in groups.values()):
        return {}, []  # without torch.distributed there is no other way
    most: dict[_Case, _Case] = {}
    for case in cases.values():
        have = most.setdefault(case, case)
        if case.beside > have.beside:
            most[case] = case
    new = [c for case, c in most.items() if case not in _found(groups[case.group])]
    # Where nothing is new nobody is waited for: ranks that compile other collectives than their
    # peers have something new, or another plan.
    if new:
        # In a thread of its own: this one is tracing, on fake tensors, and work that it starts may
        # need its interpreter lock to end.
        with futures.ThreadPoolExecutor(1) as thread:
            thread.submit(_measure, new, groups, lowerings, device, timeout, gather).result()
    choices = {node: _found(groups[case.group])[case] for node, case in cases.items()}
    reasons = {node: c.reason for node, c in choices.items() if not c.placed}
    return reasons, list(dict.fromkeys(choices.values()))


def _found(group: Any) -> dict[_Case, Choice]:
    """What was measured over a process group."""
    return _FOUND.setdefault(group, {})


def _case(
    captured: Captured, node: fx.Node, row: Lowering, memory: str, flops: float
) -> _Case | None:
    sites = captured.at(node)
    if not any(s.buffer is not None for s in sites) or row.out == "out":
        return None
    spec = captured.specs[node]
    overload = overload_of(node.target)
    assert overload is not None
    bound = bind_arguments(overload, node.args, node.kwargs)
    name = "inputs" if row.each else "input"
    given = bound.pop(name)
    fakes = [n.meta["val"] for n in (given if row.each else [given])]
    group = resolve_group_name(spec, overload, node.args, node.kwargs)
    bound.pop(spec.group)
    return _Case(
        op=spec.op,
        memory=memory,
        group=group,
        dtype=str(fakes[0].dtype).removeprefix("torch."),
        numels=tuple(bound_of(f.numel()) or 0 for f in fakes),
        others=tuple(sorted((k, _plain(v)) for k, v in bound.items())),
        copied_in=any(s.how == "stage" and s.kind == "argument" for s in sites),
        copied_out=any(s.leaves or (s.how == "stage" and s.writes) for s in sites),
        alone=not flops,
        beside=1 << max(0, math.ceil(math.log2(flops))) if flops else 0,
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


@own_work
def _measure(
    cases: Sequence[_Case],
    groups: Mapping[str, Any],
    lowerings: Lowerings,
    device: torch.device,
    timeout: float,
    gather: Callable[[Mapping[str, Any]], None],
) -> None:
    """Time the cases, and let the slowest rank count."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    gather(groups)
    leader = leaders(groups)
    mine: dict[str, list[_Case]] = {name: [] for name in dict.fromkeys(leader.values())}
    for case in cases:
        mine[leader[case.group]].append(case)
    # Before anybody starts a collective that others do not join.
    keys = {name: [c.key for c in of] for name, of in mine.items()}
    for name, said in tell("cases", keys, groups, timeout).items():
        _same(keys[name], said, name, groups[name])
    times = _times(cases, groups, lowerings, device, timeout)
    for case, seconds in slowest(times, lambda case: case.group, groups, timeout).items():
        plain, placed = seconds["plain"], seconds["placed"]
        _found(groups[case.group])[case] = Choice(
            op=case.op,
            group=case.group,
            dtype=case.dtype,
            nbytes=sum(case.numels) * getattr(torch, case.dtype).itemsize,
            copied_in=case.copied_in,
            copied_out=case.copied_out,
            beside=case.beside,
            plain_seconds=plain,
            placed_seconds=placed,
            placed=placed <= plain * _CLEARLY,
        )


def _same(keys: list[Any], said: Sequence[Any], name: str, group: Any) -> None:
    for rank, theirs in enumerate(said):
        if theirs != keys:
            here, there = (
                next((k for k, o in zip(a, b, strict=False) if k != o), f"{len(a)} collectives")
                for a, b in ((keys, theirs or []), (theirs or [], keys))
            )
            raise AgreementError(
                f"ranks {group.rank()} and {rank} compile different collectives",
                expected=f"{here} (rank {group.rank()})",
                got=f"{there} (rank {rank})",
                fix="run the same program with the same shapes on every rank of the group",
                group=name,
                rank=group.rank(),
                ranks=(group.rank(), rank),
            )


def _times(
    cases: Sequence[_Case],
    groups: Mapping[str, Any],
    lowerings: Lowerings,
    device: torch.device,
    timeout: float,
) -> dict[_Case, dict[str, float]]:
    """Seconds of torch's own way and of symmetric memory, on this rank."""
    used = list(dict.fromkeys(c.group for c in cases))
    needed = [_scratch(c, groups[c.group].size()) for c in cases]
    most = {"in": max(given for given, _ in needed), "out": max(made for _, made in needed)}
    buffers = [Buffer(f"{s} {i}", n, g) for i, g in enumerate(used) for s, n in most.items()]
    problem = Problem(
        buffers=tuple(buffers),
        operations=(Operation("all"),),
        accesses=tuple(Access("all", b.name, write=True) for b in buffers),
    )
    plan = plan_problem(problem)
    memory = lowerings.memory
    clock = clock_of(device, timeout)
    found = {}
    with borrowed(plan, groups, memory=memory, device=device, timeout=timeout) as (_, there):
        for case in cases:
            i, group = used.index(case.group), groups[case.group]
            found[case] = _time(case, group, clock, there[f"in {i}"], there[f"out {i}"], lowerings)
    return found


def _time(
    case: _Case,
    group: Any,
    clock: Clock,
    given: torch.Tensor,
    made: torch.Tensor,
    lowerings: Lowerings,
) -> dict[str, float]:
    """The same of one case, in those bytes."""
    size = group.size()
    acts = _Acts(case, size, (given, made)).acts(lowerings)
    beside = case.beside * _factor(case, size)
    nbytes = max(_scratch(case, size))
    return seconds_of(clock, acts, group, nbytes, beside=beside, enough=_ENOUGH)


def _factor(case: _Case, size: int) -> float:
    """How much smaller it is measured."""
    itemsize: int = getattr(torch, case.dtype).itemsize
    whole = sum(case.numels) * itemsize * (size if "all_gather" in case.op else 1)
    return min(1.0, _LARGEST / max(whole, 1))


def _scaled(case: _Case, size: int) -> list[int]:
    """Elements of each input, made smaller where the whole is too large."""
    factor = _factor(case, size)
    unit = size * _ALIGN
    if factor == 1:
        return list(case.numels)
    return [max(unit, int(n * factor) // unit * unit) for n in case.numels]


def _scratch(case: _Case, size: int) -> tuple[int, int]:
    """Bytes of its inputs and of its results, aligned; in place, both are as large."""
    itemsize = getattr(torch, case.dtype).itemsize
    given = _scaled(case, size)
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
    """Runs one case both ways."""

    def __init__(
        self,
        case: _Case,
        size: int,
        places: Sequence[torch.Tensor],
    ) -> None:
        self._case = case
        device = places[0].device
        dtype = getattr(torch, case.dtype)
        numels = _scaled(case, size)
        self._inputs = [torch.ones(n, dtype=dtype, device=device) for n in numels]
        self._placed = _cut(places[0], numels, dtype)
        self._outs = _cut(places[1], [_made(case, n, size) for n in numels], dtype)
        for tensor in self._placed:
            tensor.fill_(1)

    def acts(self, lowerings: Lowerings) -> dict[str, Act]:
        """What runs it."""
        row = lowerings.table[self._case.op]
        return {"plain": self._plain(row), "placed": self._in_placements(row)}

    def _plain(self, row: Lowering) -> Act:
        target = overload_named(self._case.op)
        values = self._values()
        values["inputs" if row.each else "input"] = self._inputs if row.each else self._inputs[0]
        args = [values[a.name] for a in target._schema.arguments if not a.kwarg_only]

        def act(beside: Callable[[], None]) -> None:
            results = target(*args)
            beside()
            for result in results if row.each else [results]:
                _wait(result)

        return act

    def _in_placements(self, row: Lowering) -> Act:
        target = overload_named(row.target)
        has_out = any(a.name == "out" for a in target._schema.arguments)
        values = self._values()
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

    def _values(self) -> dict[str, Any]:
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in self._case.others}
        return {**values, "group_name": self._case.group}


def _cut(flat: torch.Tensor, numels: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Aligned pieces of a placement, one behind the other."""
    pieces = []
    begin = 0
    for numel in numels:
        end = begin + numel * dtype.itemsize
        pieces.append(flat[begin:end].view(dtype))
        begin = -(-end // _ALIGN) * _ALIGN
    return pieces


def _wait(tensor: torch.Tensor) -> None:
    torch.ops._c10d_functional.wait_tensor(tensor)
