"""Gathers that overlap with the products of their results, and products that overlap with scatters.

[Note: pipelined collectives]
    A product of an all-gather's result is computed in parts, one for each rank. This rank's own
    part needs no gather, so it is computed first, from this rank's input, while the gather runs.
    The parts of the other ranks follow, and read the gathered rows in place. All parts are written
    into one result. Other readers of the gather's result are unchanged.

    A product that is reduced and scattered is computed in parts as well, those of the peers first.
    Each part is sent to its peer, which adds it to its own part (`symmplan.memory.ops.shift`),
    while the next part is computed. Sums are made in float32 at least, and rounded once.

    Both are captured, measured, placed and planned like other collectives of the graph. Each rank
    reads the parts in the order of the ring, beginning with its own. So the graphs of two ranks
    differ in offsets into ordinary tensors and views, but in no name, no size and no access of a
    placement.

The graph is changed before it is captured, and only if the algorithm is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import define
from torch import fx

from symmplan.choose.pipeline_cases import PipelineCase, numels_of
from symmplan.choose.trials import choices_of
from symmplan.choose.work import flops_beside
from symmplan.coordination.groups import resolve_groups
from symmplan.integrate.compile.ops import without_returns
from symmplan.integrate.compile.row_products import (
    PRODUCTS,
    RESHAPES,
    Gather,
    Scatter,
    gather_of,
    given_by,
    has_rows,
    is_row,
    lhs_of,
    raised,
    scatter_of,
    takes_rows,
)
from symmplan.memory.meeting.topology import served
from symmplan.memory.ops.shift import splits
from symmplan.runtime.measure import choose_algorithms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from symmplan.choose.choice import Choice
    from symmplan.coordination.groups import Group
    from symmplan.runtime.prepare import Preparation

_ATEN: Any = torch.ops.aten
#: A cast as Inductor has it where graphs are rewritten.
_CONVERT: Any = torch.ops.prims.convert_element_type.default
_C10D: Any = torch.ops._c10d_functional

#: What may be pipelined.
Pipelined: TypeAlias = "Gather | Scatter"

#: More parts than this are too small.
_MOST_PARTS = 64
#: What tells of where in the program a node is.
_ORIGIN = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack")


def find(graph: fx.Graph, groups: Collection[str]) -> list[Pipelined]:
    """What can be pipelined: gathers, then scatters, each in the order of the graph.

    Args:
        graph: A graph.
        groups: Names of the groups whose collectives are looked at.
    """
    gathers = graph.find_nodes(op="call_function", target=_C10D.all_gather_into_tensor.default)
    scatters = graph.find_nodes(op="call_function", target=_C10D.reduce_scatter_tensor.default)
    found = [*map(gather_of, gathers), *map(scatter_of, scatters)]
    order = {node: i for i, node in enumerate(graph.nodes)}
    beside = flops_beside(sorted([*gathers, *scatters], key=order.__getitem__))
    return [
        one
        for one in found
        if one is not None
        and one.group in groups
        and one.rows.outer * one.rows.ranks <= _MOST_PARTS
        and not beside[one.start]  # else it is hidden already
    ]


def cases_of(
    found: Iterable[Pipelined], memory: str, groups: Mapping[str, Group]
) -> dict[Pipelined, PipelineCase]:
    """What each is to the measurement."""
    cases = {}
    for one in found:
        rows, columns, widths = one.shape
        gathers = isinstance(one, Gather)
        cases[one] = PipelineCase(
            op="all-gather and products" if gathers else "products and reduce-scatter",
            memory=memory,
            group=one.group,
            ranks=groups[one.group].size,
            dtype=str(one.start.all_input_nodes[0].meta["val"].dtype).removeprefix("torch."),
            numels=numels_of(rows, columns, widths),
            algorithms=("pipelined",),
            rows=rows,
            columns=columns,
            widths=widths,
            gathers=gathers,
        )
    return cases


def pipeline(
    module: fx.GraphModule,
    names: Iterable[str],
    memory: str,
    device: torch.device,
    preparation: Preparation,
    fake_mode: Any,
    gather: Callable[[Mapping[str, Any]], object],
) -> tuple[Choice, ...]:
    """Pipeline those collectives of a graph for which that is chosen.

    Args:
        module: The graph, which is changed.
        names: The groups of its collectives.
        memory: Name of the memory backend.
        device: Where its tensors lie.
        preparation: What its ranks agree on.
        fake_mode: The mode of its fake tensors.
        gather: As for `choose_algorithms`.

    Returns:
        What was measured.

    Collective: yes, over those groups, the first time for them, and where algorithms are measured.
    """
    choose = preparation.options.chosen(device)
    if choose not in ("measure", "pipelined") or preparation.refusal is not None:
        return ()
    groups = _near(names, memory, device, preparation)
    found = find(module.graph, groups)
    if not found:
        return ()
    cases = {one: _known(case, groups) for one, case in cases_of(found, memory, groups).items()}
    chosen = choose_algorithms(cases, {}, device, preparation, memory=memory, gather=gather)
    for one in found:
        if chosen.algorithms[one].name == "pipelined":
            apply(module.graph, one, groups[one.group].rank, fake_mode)
    module.graph.lint()
    module.recompile()
    return chosen.choices


def _known(case: PipelineCase, groups: Mapping[str, Group]) -> PipelineCase:
    """The first case with the same collective that was measured; else this one.

    So a rank that compiles alone for a smaller batch measures nothing, and its collectives are
    those of its peers.
    """
    known = choices_of(groups[case.group].process_group)
    return next((c for c in known if isinstance(c, PipelineCase) and case.is_alike(c)), case)


def _near(
    names: Iterable[str], memory: str, device: torch.device, preparation: Preparation
) -> dict[str, Group]:
    """The groups whose ranks reach each other's memory. Collective: as `pipeline`."""
    groups = resolve_groups(names)
    several = {n: g.process_group for n, g in groups.items() if g.size > 1}
    levels, why = served(several, memory, device, preparation.options.timeout)
    return {n: groups[n] for n in several if n not in levels and n not in why}


def apply(graph: fx.Graph, one: Pipelined, rank: int, fake_mode: Any) -> None:
    """Pipeline a collective, unless another that was pipelined has its products.

    Args:
        graph: The graph.
        one: What was found there.
        rank: This rank's place in its group.
        fake_mode: The mode of the graph's fake tensors.
    """
    parts = _Parts(graph, fake_mode, one.start.meta, rank)
    if isinstance(one, Gather):
        gather = gather_of(one.start)
        if gather is not None:
            parts.gather(gather)
    else:
        scatter = scatter_of(one.start)
        if scatter is not None:
            parts.scatter(scatter)


def as_exchanges(module: fx.GraphModule) -> None:
    """Let torch run the shifts that have no placements: it knows what those read until the wait."""
    nodes = module.graph.find_nodes(op="call_function", target=torch.ops.symmplan.shift.default)
    for node in nodes:
        source, distance, size, group = node.args
        rows = source.meta["val"].shape[0]
        sent, received = splits(rows, distance, size, group)
        node.target = _C10D.all_to_all_single.default
        node.args = (source, received, sent, group)
    if nodes:
        module.recompile()


@define(eq=False)
class _Parts:
    """Adds parts to a graph, at its current insertion point."""

    graph: fx.Graph
    fake_mode: Any
    origin: Mapping[str, Any]
    rank: int

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node with its fake value."""
        node = self.graph.call_function(op, args, kwargs)
        given = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            node.meta["val"] = op(*given[0], **given[1])
        node.meta.update({key: self.origin[key] for key in _ORIGIN if key in self.origin})
        return node

    def rows(self, matrix: fx.Node, begin: int, count: int) -> fx.Node:
        """Some rows of a matrix."""
        if (begin, count) == (0, matrix.meta["val"].shape[0]):
            return matrix
        return self.call(_ATEN.slice.Tensor, matrix, 0, begin, begin + count)

    def reshape(self, value: fx.Node, *shape: int) -> fx.Node:
        """A value with other sizes."""
        if tuple(value.meta["val"].shape) == shape:
            return value
        return self.call(_ATEN.reshape.default, value, [*shape])

    # -- gathers ----------------------------------------------------------------------------------

    def gather(self, gather: Gather) -> None:
        """See [Note: pipelined collectives]."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        behind = {gather.wait, *gather.chain}
        before, ranks = gather.before, gather.rows.ranks
        shown = [node for node in gather.chain if order[node] < order[before]]
        with self.graph.inserting_before(before):
            for product in gather.products:
                for node in raised(product, behind, before, order) or ():
                    before.prepend(node)
            outs = {}
            for product in gather.products:
                outs[product] = self._empty(product.meta["val"], gather.rows.all)
            self._products(gather, self.rank, gather.shard, outs)
            for node in (gather.wait, *shown):
                before.prepend(node)
            size = gather.wait.meta["val"].shape[0] // ranks
            for place in range(1, ranks):
                part = (self.rank + place) % ranks
                given = self.rows(gather.wait, part * size, size)
                self._products(gather, part, given, outs)
        for product, out in outs.items():
            product.replace_all_uses_with(out)
            self.graph.erase_node(product)
        self._erase(reversed(gather.chain))

    def _products(
        self, gather: Gather, part: int, given: fx.Node, outs: Mapping[fx.Node, fx.Node]
    ) -> None:
        """All products of a rank's part."""
        rows, columns = gather.rows, gather.shape[1]
        lefts: dict[torch.dtype, fx.Node] = {}
        for product, out in outs.items():
            dtype = gather.products[product].meta["val"].dtype
            if dtype not in lefts:
                left = given
                if given.meta["val"].dtype != dtype:
                    left = self.call(_ATEN.view.dtype, given, dtype)
                lefts[dtype] = self.reshape(left, rows.part, columns)
            for block in range(rows.outer):
                left = self.rows(lefts[dtype], block * rows.inner, rows.inner)
                begin = (block * rows.ranks + part) * rows.inner
                self._product(product, left, begin, self.rows(out, begin, rows.inner))

    def _product(self, product: fx.Node, left: fx.Node, begin: int, out: fx.Node) -> None:
        """The rows of a product from ``begin`` on, written where they belong."""
        given, lhs = given_by(product), lhs_of(product)
        for name, value in given.items():
            if isinstance(value, fx.Node) and name != lhs and has_rows(product, name):
                given[name] = self.rows(value, begin, out.meta["val"].shape[0])
        self._write(product.target, {**given, lhs: left}, out)

    def _write(self, overload: Any, given: Mapping[str, Any], out: fx.Node) -> None:
        """A product that is written where it belongs."""
        op = without_returns(overload.overloadpacket.out, f"{overload._schema.name[6:]}_out")
        self.call(op, *_positional(overload, given), **_named(overload, given), out=out)

    def _empty(self, like: torch.Tensor, rows: int) -> fx.Node:
        """Memory for so many rows of a product."""
        how = {"dtype": like.dtype, "device": like.device}
        return self.call(_ATEN.empty.memory_format, [rows, like.shape[1]], **how)

    # -- scatters ---------------------------------------------------------------------------------

    def scatter(self, scatter: Scatter) -> None:
        """See [Note: pipelined collectives]."""
        ranks, start, wait = scatter.rows.ranks, scatter.start, scatter.wait
        made = wait.meta["val"]
        with self.graph.inserting_before(start):
            shift = torch.ops.symmplan.shift.default
            sent = [
                self.call(
                    shift, self._part(scatter, (self.rank + s) % ranks), s, ranks, scatter.group
                )
                for s in range(1, ranks)
            ]
            total = own = self._part(scatter, self.rank)
        with self.graph.inserting_before(wait):  # what the program does meanwhile, it still does
            narrow = made.dtype.itemsize < 4
            if narrow:
                total = self.call(_CONVERT, own, torch.float32)
            for shifted in sent:
                term = self.call(_C10D.wait_tensor.default, shifted)
                total = self.call(_ATEN.add.Tensor, total, term)
            if start.args[1] == "avg":
                total = self.call(_ATEN.div.Tensor, total, ranks)
            if narrow:
                total = self.call(_CONVERT, total, made.dtype)
            total = self.reshape(total, *made.shape)
        wait.replace_all_uses_with(total)
        inside = sorted(scatter.inside, reverse=True)
        self._erase((wait, start, *scatter.dead, *inside))

    def _part(self, scatter: Scatter, part: int) -> fx.Node:
        """A rank's part of what is scattered."""
        columns = scatter.source.meta["val"].shape[-1]
        return self._of_tree(scatter, scatter.source, part, columns)

    def _of_tree(self, scatter: Scatter, node: fx.Node, part: int, columns: int) -> fx.Node:
        """The rows of a value that are a rank's, computed if nothing else needs the value."""
        if node not in scatter.inside:
            return self._cut(scatter, node, part)
        overload: Any = node.target
        given = given_by(node)
        for name, value in given.items():
            if not isinstance(value, fx.Node):
                continue
            if node.target in PRODUCTS:
                if name == lhs_of(node) or (name == "scale_a" and has_rows(node, name)):
                    given[name] = self._cut(scatter, value, part)
                elif has_rows(node, name):
                    given[name] = self._of_tree(scatter, value, part, columns)
            elif takes_rows(value, scatter.rows, columns):
                given[name] = self._of_tree(scatter, value, part, columns)
            elif is_row(value) and value.meta["val"].ndim:
                given[name] = self.reshape(value, value.meta["val"].shape[-1])
        if node.target in RESHAPES:
            shown: fx.Node = given[overload._schema.arguments[0].name]
            return shown
        if node.target is _ATEN._scaled_mm.default:
            # Inductor's own form wants strides that it does not give a slice of scales.
            out = self._empty(node.meta["val"], scatter.rows.part)
            self._write(overload, given, out)
            return out
        return self.call(overload, *_positional(overload, given), **_named(overload, given))

    def _cut(self, scatter: Scatter, node: fx.Node, part: int) -> fx.Node:
        """The rows of a value that are a rank's, as a matrix."""
        rows, columns = scatter.rows, node.meta["val"].shape[-1]
        if rows.outer == 1:
            return self.rows(self.reshape(node, rows.all, columns), part * rows.inner, rows.inner)
        apart = self.reshape(node, rows.outer, rows.ranks, rows.inner, columns)
        mine = self.call(_ATEN.select.int, apart, 1, part)
        return self.reshape(mine, rows.part, columns)

    def _erase(self, nodes: Iterable[fx.Node]) -> None:
        """Drop nodes that no other node reads any more."""
        for node in nodes:
            if not node.users:
                self.graph.erase_node(node)


def _positional(overload: Any, given: Mapping[str, Any]) -> list[Any]:
    return [given[a.name] for a in overload._schema.arguments if not a.kwarg_only]


def _named(overload: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    return {a.name: given[a.name] for a in overload._schema.arguments if a.kwarg_only}
