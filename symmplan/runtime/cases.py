"""The kinds of collectives of captured programs, and how each is run while it is timed."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, field, frozen

from symmplan.capture.bounds import bound as bound_of
from symmplan.capture.graphs import overload_of
from symmplan.coordination.own import own_work
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.registry import bind_arguments
from symmplan.registry.catalogue import collective_of
from symmplan.runtime.algorithms import Lowering, Lowerings, overload_named
from symmplan.runtime.choice import Choice
from symmplan.runtime.concurrent import concurrent_with
from symmplan.runtime.trials import Concurrent, Trial, choices_of, measure, room_for
from symmplan.runtime.work import flops_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import fx

    from symmplan.capture import Captured
    from symmplan.runtime.clock import Act
    from symmplan.runtime.engines import Engines
    from symmplan.runtime.options import Options

__all__ = ["Case", "cases_of", "measure_cases", "often_of", "ordinary", "runs_ordinary"]

#: What passes once, at the begin and the end of what is timed, must not decide.
_ENOUGH = 512 << 20
_ALIGN = 256
#: Arguments of all-to-alls. What has placements has equal parts.
_SPLITS = ("output_split_sizes", "input_split_sizes")
#: No collective runs more often than this beside another.
_OFTEN = 16

_wait = torch.ops._c10d_functional.wait_tensor


@frozen
class Case:
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
    #: Another group's collective that runs meanwhile, and how often for each of this.
    concurrent: Case | None = None
    often: float = field(default=1.0, eq=False)

    @property
    def key(self) -> list[Any]:
        """What must be the same on all ranks; the names of groups may differ."""
        return [
            *(self.op, self.memory, self.dtype, list(self.numels)),
            *(self.copied_in, self.copied_out, self.alone),
            *([] if self.concurrent is None else [self.concurrent.key]),
        ]

    @property
    def by_itself(self) -> Case:
        """The same without concurrent collectives."""
        return evolve(self, concurrent=None)

    @property
    def nbytes(self) -> int:
        """Bytes of its inputs."""
        return sum(self.numels) * int(getattr(torch, self.dtype).itemsize)


def cases_of(
    captured: Captured, rows: Mapping[fx.Node, Lowering], memory: str
) -> dict[fx.Node, Case]:
    """The kind of each collective of a program, with what is concurrent with it there.

    Args:
        captured: The program.
        rows: Its collectives, and how they are run.
        memory: Name of the memory backend.
    """
    flops = flops_beside(list(rows))
    cases = {n: _case(captured, n, row, memory, flops[n]) for n, row in rows.items()}
    groups = {n: case.group for n, case in cases.items()}
    found = concurrent_with(captured, groups, {n: (c, c.nbytes) for n, c in cases.items()})
    return {
        n: evolve(case, concurrent=cases[found[n][0]], often=found[n][1]) if n in found else case
        for n, case in cases.items()
    }


def _case(captured: Captured, node: fx.Node, row: Lowering, memory: str, flops: float) -> Case:
    sites = captured.at(node)
    spec = captured.specs[node]
    overload = overload_of(node.target)
    assert overload is not None
    bound = bind_arguments(overload, node.args, node.kwargs)
    name = "inputs" if row.each else "input"
    given = bound[name]
    inputs = given if row.each else [given]
    fakes = [n.meta["val"] for n in inputs]
    group = captured.groups[node]
    assert spec.group is not None  # collectives name theirs
    return Case(
        op=spec.op,
        memory=memory,
        group=group,
        dtype=str(fakes[0].dtype).removeprefix("torch."),
        numels=tuple(bound_of(f.numel()) or 0 for f in fakes),
        others=_others(bound, name, spec.group),
        copied_in=any(s.how == "stage" and s.kind == "argument" for s in sites),
        copied_out=any(s.leaves or (s.how == "stage" and s.writes) for s in sites),
        alone=not flops,
        beside=1 << max(0, math.ceil(math.log2(flops))) if flops else 0,
    )


def _others(bound: Mapping[str, Any], *left_out: str) -> tuple[tuple[str, Any], ...]:
    """The arguments that are no tensors, sorted."""
    return tuple(
        sorted(
            (k, tuple(v) if isinstance(v, (list, tuple)) else v)
            for k, v in bound.items()
            if k not in (*left_out, "out", *_SPLITS)
        )
    )


def ordinary(op: Any, group: str, dtype: torch.dtype, numel: int, bound: Mapping[str, Any]) -> Case:
    """A functional collective that runs in torch's own way, with its arguments by name."""
    return Case(
        op=f"{op._schema.name}.{op._overloadname}",
        memory="",
        group=group,
        dtype=str(dtype).removeprefix("torch."),
        numels=(numel,),
        others=_others(bound, "input", "group_name"),
        copied_in=False,
        copied_out=False,
        alone=True,
        beside=0,
    )


def runs_ordinary(case: Case, size: int, most: int, device: torch.device) -> tuple[Act, float]:
    """What runs an `ordinary` collective while it is timed, and how many times larger it is.

    Args:
        case: The collective.
        size: How many ranks its group has.
        most: How large its input and its result may be there, in bytes.
        device: Where they lie.
    """
    part = _scaled(case, size, most)
    plain = [torch.ones(n, dtype=torch.uint8, device=device) for n in _scratch(case, size, part)]
    act = _Acts(case, part, size, plain, plain).plain(each=False)
    return act, max(1, sum(case.numels) / max(sum(part), 1))


def often_of(times: float) -> int:
    """How often concurrent collectives run beside each collective that is timed."""
    return min(_OFTEN, max(1, round(times)))


@own_work
def measure_cases(
    cases: Sequence[Case],
    program: Iterable[Case],
    groups: Mapping[str, Any],
    lowerings: Lowerings,
    device: torch.device,
    options: Options,
) -> None:
    """Time collectives by every algorithm there is.

    See [Note: concurrent collectives] in `symmplan.runtime.concurrent`.

    Args:
        cases: What is timed, what has concurrent collectives last.
        program: All kinds of collectives of the program.
        groups: ``{name: process group}`` of all that run.
        lowerings: How they run.
        device: Where their tensors lie.
        options: How long ranks wait for each other.

    Collective: yes, over those groups.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    neighbours = dict.fromkeys(c.concurrent for c in cases if c.concurrent is not None)
    kinds = list(dict.fromkeys((*(c.by_itself for c in cases), *neighbours)))
    used = list(dict.fromkeys(c.group for c in kinds))
    # Inputs and results: ordinary ones, for each group its own if several run at a time; symmetric
    # ones of each group; and what torch's own way makes.
    apart = len(used) if neighbours else 1
    ordinary, symmetric, made = 2 * apart, 2 * len(used), min(apart, 2)
    most_of_one = room_for(ordinary + symmetric + made, device)
    sizes = {c: groups[c.group].size() for c in kinds}
    parts = {c: _scaled(c, sizes[c], most_of_one) for c in kinds}
    needed = [_scratch(c, sizes[c], parts[c]) for c in kinds]
    most = {w: max((n[i] for n in needed), default=0) for i, w in enumerate(("in", "out"))}
    buffers = [Buffer(f"{w} {i}", n, g) for i, g in enumerate(used) for w, n in most.items()]
    problem = Problem(
        buffers=tuple(buffers),
        operations=(Operation("all"),),
        accesses=tuple(Access("all", b.name, write=True) for b in buffers),
    )
    plain = [
        [torch.ones(n, dtype=torch.uint8, device=device) for n in most.values()]
        for _ in range(apart)
    ]
    # A rank that has no room for what torch's own way makes must not find out among its peers.
    results = [torch.empty(most["out"], dtype=torch.uint8, device=device) for _ in plain[:2]]
    results.clear()
    scales = {c: max(1, sum(c.numels) / max(sum(parts[c]), 1)) for c in kinds}

    def acts_of(case: Case) -> Callable[..., Mapping[str, Act]]:
        at = used.index(case.group)
        mine = plain[at % apart]
        return functools.partial(_acts, case, parts[case], sizes[case], at, mine, lowerings)

    def concurrent_at(case: Case) -> Concurrent | None:
        other = case.concurrent
        if other is None:
            return None
        # As it runs in this program, if possible beside this.
        theirs = [c for c in program if c.concurrent is not None and c.by_itself == other]
        theirs.sort(key=lambda c: c.concurrent != case.by_itself)
        found = choices_of(groups[other.group])

        def now() -> Choice:
            return next((found[c] for c in theirs if c in found), None) or found[other]

        often = often_of(case.often * scales[other] / scales[case.by_itself])
        return Concurrent(other.group, now, often, acts_of(other))

    trials = [
        Trial(
            key=case,
            same=case.key,
            choice=_choice(case, sizes[case.by_itself]),
            nbytes=max(_scratch(case, sizes[case.by_itself], parts[case.by_itself])),
            beside=case.beside / scales[case.by_itself],
            scale=scales[case.by_itself],
            acts=acts_of(case.by_itself),
            concurrent=concurrent_at(case),
            alone=case.by_itself,
        )
        for case in cases
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


def _acts(
    case: Case,
    numels: Sequence[int],
    size: int,
    number: int,
    plain: Sequence[torch.Tensor],
    lowerings: Lowerings,
    there: Mapping[str, torch.Tensor],
    engines: Engines | None,
) -> dict[str, Act]:
    places = there[f"in {number}"], there[f"out {number}"]
    return _Acts(case, numels, size, plain, places).acts(lowerings, engines)


def _choice(case: Case, size: int) -> Choice:
    """What is known before it is measured."""
    return Choice(
        op=case.op,
        nbytes=case.nbytes,
        dtype=case.dtype,
        group=case.group,
        ranks=size,
        seconds={},
        algorithm="ordinary",
        copied_in=case.copied_in,
        copied_out=case.copied_out,
        beside=case.beside,
    )


def _scaled(case: Case, size: int, largest: int) -> list[int]:
    """Elements of each input, made smaller where all together, or the results, are too large."""
    itemsize: int = getattr(torch, case.dtype).itemsize
    # The larger of both sides: what a gather makes, or the input.
    whole = sum(max(n, _made(case, n, size)) for n in case.numels) * itemsize
    factor = largest / max(whole, 1)
    unit = size * _ALIGN
    if factor >= 1:
        return list(case.numels)
    return [min(n, max(unit, int(n * factor) // unit * unit)) for n in case.numels]


def _scratch(case: Case, size: int, given: Sequence[int]) -> tuple[int, int]:
    """Bytes of its inputs and of its results, aligned; in place, both are as large."""
    itemsize = getattr(torch, case.dtype).itemsize
    made = [_made(case, n, size) for n in given]
    return _aligned(given, itemsize), _aligned(made, itemsize)


def _made(case: Case, numel: int, size: int) -> int:
    """Elements of the result for an input."""
    collective = collective_of(case.op)
    if collective == "all-gather":
        return numel * size
    if collective == "reduce-scatter":
        return numel // size
    return numel


def _aligned(numels: Sequence[int], itemsize: int) -> int:
    return sum(-(-n * itemsize // _ALIGN) * _ALIGN for n in numels)


class _Acts:
    """Runs one case by each algorithm."""

    def __init__(
        self,
        case: Case,
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
        acts = {"ordinary": self.plain(each=row.each), "symmetric": self._in_placements(row, group)}
        if engines is not None and row.engine:
            acts["copy engine"] = self._in_placements(row, engines.name(row.engine))
        return acts

    def plain(self, *, each: bool) -> Act:
        """What runs it in torch's own way; ``each`` if it takes a list of tensors."""
        target = overload_named(self._case.op)
        values = self._values(self._case.group)
        values["inputs" if each else "input"] = self._inputs if each else self._inputs[0]
        args = [values[a.name] for a in target._schema.arguments if not a.kwarg_only]
        has_out = any(a.name == "out" for a in target._schema.arguments)
        kwargs = {"out": self._plain_outs[0]} if has_out else {}

        def act(beside: Callable[[], None]) -> None:
            made = target(*args, **kwargs)
            results = made if each else [made]
            beside()
            for result in results:
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
            for out, copy in zip(outs, self._plain_outs, strict=True):
                _wait(out)
                if self._case.copied_out:
                    copy.copy_(out)

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
