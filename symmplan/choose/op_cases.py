"""The kinds of collectives of captured programs, and how their ops are run while they are timed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from symmplan.capture.bounds import bound as bound_of
from symmplan.capture.graphs import overload_of, unequal_parts
from symmplan.choose.cases import Case, aligned, cut
from symmplan.choose.work import flops_beside
from symmplan.place.algorithms import overload_named
from symmplan.registry import bind_arguments
from symmplan.registry.catalogue import collective_of
from symmplan.torch_private import c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import fx

    from symmplan.capture import Captured
    from symmplan.choose.clock import Act
    from symmplan.model import AlgorithmName
    from symmplan.place.algorithms import Lowering

#: Arguments of all-to-alls.
_SPLITS = ("output_split_sizes", "input_split_sizes")

_wait = torch.ops._c10d_functional.wait_tensor


@frozen(kw_only=True)
class OpCase(Case):
    """A call of an op.

    Attributes:
        others: Its arguments that are no tensors, sorted.
        row: How it is run in placements; None if it is not.
    """

    others: tuple[tuple[str, Any], ...]
    row: Lowering | None = field(default=None, eq=False)

    @property
    def signal_pad(self) -> bool:
        """Whether some algorithm of it uses the signal pad of its tensors."""
        return self.row is not None and self.row.kernel

    def sizes(self) -> tuple[int, int]:
        """Bytes of its inputs and of its results; in place, both are as large."""
        made = [self._made(n) for n in self.numels]
        return aligned(self.numels, self.itemsize), aligned(made, self.itemsize)

    def _made(self, numel: int) -> int:
        """Elements of the result for an input."""
        collective = collective_of(self.op)
        if collective == "all-gather":
            return numel * self.ranks
        if collective == "reduce-scatter":
            return numel // self.ranks
        return numel

    def acts(
        self,
        plain: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        engines: Any | None,
    ) -> dict[str, Act]:
        """Functions that run it, by algorithm."""
        given = self._cut(plain)
        acts = {"ordinary": self._in_its_own_algorithm(*given)}
        if self.row is not None:
            placed = self._cut(places)
            within = "two-level" if "two-level" in self.algorithms else "symmetric"
            acts[within] = self._in_placements(self.row, self.group, given, placed)
            if engines is not None and self.engine:
                over = c10d.group_name(engines)
                acts["copy engine"] = self._in_placements(self.row, over, given, placed)
        return acts

    def _cut(self, flat: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Its inputs, filled, and its results, in bytes for both."""
        dtype, made = getattr(torch, self.dtype), [self._made(n) for n in self.numels]
        inputs, results = cut(flat[0], self.numels, dtype), cut(flat[1], made, dtype)
        for tensor in inputs:
            tensor.fill_(1)
        return inputs, results

    def _in_its_own_algorithm(self, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> Act:
        target = overload_named(self.op)
        names = [a.name for a in target._schema.arguments]
        each = "inputs" in names
        values = self._values(self.group)
        values["inputs" if each else "input"] = inputs if each else inputs[0]
        args = [values[a.name] for a in target._schema.arguments if not a.kwarg_only]
        kwargs = {"out": results[0]} if "out" in names else {}

        def act(beside: Callable[[], None]) -> None:
            made = target(*args, **kwargs)
            results = made if each else [kwargs.get("out", made)]
            beside()
            for result in results:
                _wait(result)

        return act

    def _in_placements(
        self,
        row: Lowering,
        group: str,
        plain: Sequence[list[torch.Tensor]],
        placed: Sequence[list[torch.Tensor]],
    ) -> Act:
        target = overload_named(row.target)
        has_out = any(a.name == "out" for a in target._schema.arguments)
        values = self._values(group)
        copied_in = self.copied_in or row.inplace
        outs = placed[0] if row.out == "input" else placed[1]

        def act(beside: Callable[[], None]) -> None:
            for source, place, out in zip(plain[0], placed[0], outs, strict=True):
                given = out if row.inplace else place
                if copied_in:
                    given.copy_(source)
                now = {**values, "input": given}
                args = [now[a.name] for a in target._schema.arguments if not a.kwarg_only]
                target(*args, **({"out": out} if has_out else {}))
            beside()
            for out, copy in zip(outs, plain[1], strict=True):
                _wait(out)
                if self.copied_out:
                    copy.copy_(out)

        return act

    def _values(self, group: str) -> dict[str, Any]:
        """Its arguments by name, but for tensors."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in self.others}
        parts = [self.numels[0] // self.ranks] * self.ranks
        return {**values, **dict.fromkeys(_SPLITS, parts), "group_name": group}


def cases_of(
    captured: Captured,
    rows: Mapping[fx.Node, Lowering],
    memory: str,
    ranks: Mapping[str, int],
    levels: Collection[str] = (),
) -> dict[fx.Node, OpCase]:
    """The kind of each collective of a program.

    Args:
        captured: The program.
        rows: Its collectives, and how they are run.
        memory: Name of the memory backend.
        ranks: How many ranks each group has.
        levels: The groups that are served in two levels.
    """
    flops = flops_beside(list(rows))
    return {n: _case(captured, n, row, memory, ranks, levels, flops[n]) for n, row in rows.items()}


def _case(
    captured: Captured,
    node: fx.Node,
    row: Lowering,
    memory: str,
    ranks: Mapping[str, int],
    levels: Collection[str],
    flops: float,
) -> OpCase:
    sites = captured.at(node)
    spec = captured.specs[node]
    overload = overload_of(node.target)
    assert overload is not None
    bound = bind_arguments(overload, node.args, node.kwargs)
    name = "inputs" if row.each else "input"
    given = bound[name]
    inputs = given if row.each else [given]
    fakes = [n.meta["val"] for n in inputs]
    numels = tuple(bound_of(f.numel()) or 0 for f in fakes)
    group = captured.groups[node]
    parts = unequal_parts(node)
    if parts is not None:  # it is timed with equal ones, as large as any rank's
        numel = parts.received.nbytes // fakes[0].element_size()
        numels = (math.ceil(numel / ranks[group]) * ranks[group],)
    engine = row.engine and parts is None
    assert spec.group is not None  # collectives name theirs
    algorithms: tuple[AlgorithmName, ...] = ("symmetric",)
    if group in levels:
        algorithms = ("two-level",)
    elif engine:
        algorithms = ("symmetric", "copy engine")
    return OpCase(
        op=spec.op,
        memory=memory,
        group=group,
        ranks=ranks[group],
        dtype=str(fakes[0].dtype).removeprefix("torch."),
        numels=numels,
        algorithms=algorithms,
        others=_others(bound, name, spec.group),
        copied_in=any(s.how == "stage" and s.kind == "argument" for s in sites),
        copied_out=any(s.leaves or (s.how == "stage" and s.writes) for s in sites),
        alone=not flops,
        beside=1 << max(0, math.ceil(math.log2(flops))) if flops else 0,
        engine=engine,
        row=row,
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
