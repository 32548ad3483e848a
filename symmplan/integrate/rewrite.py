"""A captured graph and its plan -> a graph whose declared tensors live in their placements.

[Note: segments are inputs]
    The rewritten graph takes each segment as one more input, one-dimensional, and a placement is
    ``as_strided`` of it. So the compiled code holds no address, Inductor sees that placements
    overlap and keeps the order of writes, its code cache keys on offsets alone, and the segments
    can be allocated when the program first runs.

[Note: fences]
    A segment that holds several dtypes is several inputs, one for each dtype, because Inductor has
    no free view that changes the element size. It cannot know that they overlap. So wherever bytes
    pass from one dtype to another, a fence, an op that mutates all of them and does nothing, keeps
    what was before it before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import fx

from symmplan.capture.graphs import is_wait, overload_of
from symmplan.capture.sites import Captured, Home, Site
from symmplan.capture.producers import OUT_VARIANTS, out_overload
from symmplan.capture.steps import copy_back_name, copy_in_name, copy_out_name
from symmplan.errors import CaptureError
from symmplan.integrate.lowering import Lowering, Lowerings, overload_named
from symmplan.model import Plan
from symmplan.registry import bind_arguments, resolve_group_name

__all__ = ["SegmentInput", "rewrite"]


_ABSOLUTE = frozenset({
    "aten::as_strided",
    "aten::as_strided_",
    "aten::as_strided_copy",
    "aten::as_strided_scatter",
})  # fmt: skip


@frozen
class SegmentInput:
    """One input that a rewritten graph takes after its own.

    Attributes:
        segment: Name of the segment.
        dtype: Element type that its bytes are seen as.
        numel: How many elements, from its first byte on.
    """

    segment: str
    dtype: torch.dtype
    numel: int


def rewrite(
    module: fx.GraphModule,
    captured: Captured,
    plan: Plan,
    barriers: Sequence[tuple[str, str]],
    lowerings: Lowerings,
    fake_mode: Any,
) -> tuple[SegmentInput, ...]:
    """Change ``module`` in place so that it follows ``plan``.

    Args:
        module: The graph that ``captured`` was captured from.
        captured: Its decisions.
        plan: A plan whose problem contains the captured one.
        barriers: ``(operation, group)`` of each barrier to be run right before an operation.
        lowerings: How each op is run on the memory backend.
        fake_mode: The mode of the graph's fake tensors.

    Returns:
        The inputs that the graph now takes after its own, in order.

    Collective: no.
    """
    return _Rewriter(module.graph, captured, plan, barriers, lowerings, fake_mode).run(module)


@define(eq=False)
class _Rewriter:
    graph: fx.Graph
    captured: Captured
    plan: Plan
    barriers: Sequence[tuple[str, str]]
    lowerings: Lowerings
    fake_mode: Any

    inputs: dict[SegmentInput, fx.Node] = field(init=False, factory=dict)
    first: dict[str, fx.Node] = field(init=False, factory=dict)
    device: torch.device = field(init=False)

    def run(self, module: fx.GraphModule) -> tuple[SegmentInput, ...]:
        site = next(s for s in self.captured.sites if s.buffer is not None)
        assert site.source is not None
        self.device = self._fake(site.source, site.path).device
        self._shift_absolute_views()
        for home in self.captured.homes:
            if home.write != "declared":
                self._make_home(home)
        by_node: dict[fx.Node, list[Site]] = {}
        for site in self.captured.sites:
            by_node.setdefault(site.node, []).append(site)
        makers = {h.node for h in self.captured.homes if h.write == "declared"}
        for node, sites in by_node.items():
            if node in makers or any(s.buffer is not None for s in sites):
                self._declared(node, sites)
        self._order()
        self.graph.lint()
        module.recompile()
        return tuple(self.inputs)

    # -- segments and views ------------------------------------------------------------------

    def _input(self, segment: str, dtype: torch.dtype) -> fx.Node:
        """The whole segment as elements of one dtype."""
        nbytes = next(s.nbytes for s in self.plan.segments if s.name == segment)
        key = SegmentInput(segment, dtype, nbytes // dtype.itemsize)
        node = self.inputs.get(key)
        if node is None:
            body = next(n for n in self.graph.nodes if n.op != "placeholder")
            with self.graph.inserting_before(body):
                name = str(dtype).removeprefix("torch.")
                node = self.graph.placeholder(f"symmplan_{segment}_{name}")
            with self.fake_mode:
                node.meta["val"] = torch.empty(key.numel, dtype=dtype, device=self.device)
            self.inputs[key] = node
        return node

    def _view(self, buffer: str, like: Any, *, contiguous: bool = False) -> fx.Node:
        """The placement as a tensor like ``like``, inserted at the current point."""
        place = self.plan.placements[buffer]
        stride = like.stride()
        if contiguous:
            stride = torch.empty(like.shape, device="meta").stride()
        base = self._input(place.segment, like.dtype)
        offset = place.offset // like.element_size()
        args = (base, list(like.shape), list(stride), offset)
        return self._call(torch.ops.aten.as_strided.default, args)

    def _call(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A call node with its fake value."""
        kwargs = kwargs or {}
        node = self.graph.call_function(op, args, kwargs)
        real = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            node.meta["val"] = op(*real[0], **real[1])  # type: ignore[index]
        return node

    def _fake(self, node: fx.Node, path: tuple[int, ...]) -> Any:
        return self.captured.values.tensors[(node, path)]

    def _shift_absolute_views(self) -> None:
        """``as_strided`` counts from the start of the storage, which is now the segment's."""
        values = self.captured.values
        roots = {values.find((h.node, h.path)): h for h in self.captured.homes}
        for node in self.graph.nodes:
            overload = overload_of(node.target) if node.op == "call_function" else None
            if overload is None or overload._schema.name not in _ABSOLUTE:
                continue
            source = node.args[0]
            home = roots.get(values.find((source, ()))) if (source, ()) in values.tensors else None
            bound = bind_arguments(overload, node.args, node.kwargs)
            if home is None or bound["storage_offset"] is None:
                continue
            itemsize = self._fake(source, ()).element_size()
            shift = self.plan.placements[home.buffer].offset // itemsize
            bound["storage_offset"] = bound["storage_offset"] + shift
            node.args = tuple(bound[a.name] for a in overload._schema.arguments)
            node.kwargs = {}

    # -- producers ---------------------------------------------------------------------------

    def _make_home(self, home: Home) -> None:
        """Let the producer of a storage write it in its placement."""
        node, like = home.node, self._fake(home.node, home.path)
        if home.write == "alloc":
            with self.graph.inserting_before(node):
                view = self._view(home.buffer, like)
            self._replace(node, view, first=view)
        elif home.write == "out":
            overload = overload_of(node.target)
            assert overload is not None
            variant = OUT_VARIANTS.get(overload._schema.name)
            if variant is not None:
                op: Any = overload_named(variant)
            else:
                op = out_overload(overload)
            with self.graph.inserting_before(node):
                view = self._view(home.buffer, like)
                call = self._call(op, node.args, {**node.kwargs, "out": view})
            self._replace(node, view, first=call)
        else:
            with self.graph.inserting_after(node):
                view = self._view(home.buffer, like)
            with self.graph.inserting_after(view):
                copy = self._call(torch.ops.aten.copy_.default, (view, node))
            node.replace_all_uses_with(view, delete_user_cb=lambda user: user is not copy)

    def _replace(self, node: fx.Node, by: fx.Node, *, first: fx.Node) -> None:
        self.first[self.captured.prefix + node.name] = first
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)

    # -- declared ops ------------------------------------------------------------------------

    def _declared(self, node: fx.Node, sites: list[Site]) -> None:
        spec = self.captured.specs[node]
        row = self.lowerings.row(spec)
        overload = overload_of(node.target)
        assert overload is not None
        with self.graph.inserting_before(node):
            bound = bind_arguments(overload, node.args, node.kwargs)
            staged = self._copy_in(bound, sites)
            results = {
                s.path: self._view(s.buffer, self._fake(node, s.path))
                for s in sites
                if s.kind == "result" and s.buffer is not None
            }
            for home in self.captured.homes:
                # Made here because a later op wants it, though this one need not have it.
                if home.node is node and home.path not in results:
                    results[home.path] = self._view(home.buffer, self._fake(node, home.path))
            before = node.prev
            if row is not None:
                results = self._lower(node, row, overload, bound, results)
            else:
                results = self._as_it_is(node, spec.out, overload, bound, results)
            self.first[self.captured.prefix + node.name] = before.next
        synchronous = not spec.asynchronous
        self._finish(node, sites, results, staged, synchronous=synchronous)

    def _copy_in(
        self, bound: dict[str, Any], sites: list[Site]
    ) -> dict[Site, tuple[fx.Node, fx.Node]]:
        """Copy staged arguments into their placements, and put those into ``bound``."""
        staged: dict[Site, tuple[fx.Node, fx.Node]] = {}
        for site in sites:
            if site.kind != "argument" or site.how != "stage":
                continue
            assert site.buffer is not None
            assert site.source is not None
            head, _, rest = site.where.partition(".")
            path = tuple(int(p) for p in rest.split(".")) if rest else ()
            source = _at(bound[head], path)
            view = self._view(site.buffer, source.meta["val"], contiguous=True)
            copy = self._call(torch.ops.aten.copy_.default, (view, source))
            self.first[copy_in_name(self.captured.prefix, site)] = copy
            bound[head] = _put(bound[head], path, view)
            staged[site] = (view, source)
        return staged

    def _lower(
        self,
        node: fx.Node,
        row: Lowering,
        overload: Any,
        bound: dict[str, Any],
        results: dict[tuple[int, ...], fx.Node],
    ) -> dict[tuple[int, ...], fx.Node]:
        """Call the form that writes into given memory, once or for each element of a list."""
        spec = self.captured.specs[node]
        group = resolve_group_name(spec, overload, node.args, node.kwargs)
        bound = {**bound, spec.group: group}
        target = overload_named(row.target)
        if not row.each:
            source = bound["input"]
            out = self._out(row, bound, results.get(()), node, ())
            self._run_row(row, target, bound, source, out)
            return {(): out}
        found = {}
        for i, source in enumerate(bound["inputs"]):
            element = {**bound, "input": source}
            out = self._out(row, element, results.get((i,)), node, (i,))
            self._run_row(row, target, element, source, out)
            found[(i,)] = out
        return found

    def _out(
        self,
        row: Lowering,
        bound: dict[str, Any],
        placed: fx.Node | None,
        node: fx.Node,
        path: tuple[int, ...],
    ) -> fx.Node:
        if row.out != "return":
            out: fx.Node = bound[row.out]
            return out
        if placed is not None:
            return placed
        like = self._fake(node, path)
        return self._call(
            torch.ops.aten.empty.memory_format,
            (list(like.shape),),
            {"dtype": like.dtype, "device": like.device},
        )

    def _run_row(
        self, row: Lowering, target: Any, bound: dict[str, Any], source: fx.Node, out: fx.Node
    ) -> None:
        values = {**bound, "input": source}
        if row.inplace:
            self._call(torch.ops.aten.copy_.default, (out, source))
            values["input"] = out
        args = [values[a.name] for a in target._schema.arguments if not a.kwarg_only]
        has_out = any(a.name == "out" for a in target._schema.arguments)
        self._call(target, tuple(args), {"out": out} if has_out else {})

    def _as_it_is(
        self,
        node: fx.Node,
        variant: str | None,
        overload: Any,
        bound: dict[str, Any],
        results: dict[tuple[int, ...], fx.Node],
    ) -> dict[tuple[int, ...], fx.Node]:
        """Call the op itself, or its out variant where all its results have placements."""
        paths = [path for _, path in self.captured.values.of_node(node)]
        if variant is not None and results and len(results) == len(paths):
            op = overload_named(variant)
            outs = iter(results[path] for path in paths)
            values = [
                bound[a.name] if a.name in bound else next(outs) for a in op._schema.arguments
            ]
            args = tuple(
                v for v, a in zip(values, op._schema.arguments, strict=True) if not a.kwarg_only
            )
            kwargs = {
                a.name: v for v, a in zip(values, op._schema.arguments, strict=True) if a.kwarg_only
            }
            self._call(op, args, kwargs)
            return results
        args = tuple(bound[a.name] for a in overload._schema.arguments if not a.kwarg_only)
        kwargs = {a.name: bound[a.name] for a in overload._schema.arguments if a.kwarg_only}
        call = self._call(overload, args, kwargs)
        made: dict[tuple[int, ...], fx.Node] = {}
        for path in paths:
            value = call
            for index in path:
                value = self._getitem(value, index)
            made[path] = value
            if path in results:
                self._call(torch.ops.aten.copy_.default, (results[path], value))
                made[path] = results[path]
        return made

    def _getitem(self, value: fx.Node, index: int) -> fx.Node:
        import operator

        node = self.graph.call_function(operator.getitem, (value, index))
        node.meta["val"] = value.meta["val"][index]
        return node

    def _finish(
        self,
        node: fx.Node,
        sites: list[Site],
        results: dict[tuple[int, ...], fx.Node],
        staged: dict[Site, tuple[fx.Node, fx.Node]],
        *,
        synchronous: bool,
    ) -> None:
        """Copy out what leaves, hand the results to their readers, drop the old node."""
        waits = {} if synchronous else self.captured.waits.get(node, {})
        with self.graph.inserting_before(node):
            anchor = self.graph.call_function(_anchor)  # where code after the op goes
        for site in sites:
            if site.how != "stage":
                continue
            if site.kind == "result":
                wait = waits.get(site.path)
                with self.graph.inserting_after(wait or anchor):
                    value = wait or results[site.path]
                    copied = self._call(torch.ops.aten.clone.default, (value,))
                self.first[copy_out_name(self.captured.prefix, site)] = copied
                if wait is None:
                    results[site.path] = copied
                else:
                    _redirect(wait, copied, but=copied)
            elif site.writes:
                self._copy_back(site, *staged[site], anchor, waits, results)
        self.graph.erase_node(anchor)
        self._hand_over(node, results)
        if synchronous:
            for value in {id(v): v for v in results.values()}.values():
                for user in list(value.users):
                    if is_wait(user):
                        user.replace_all_uses_with(value)
                        self.graph.erase_node(user)

    def _copy_back(
        self,
        site: Site,
        view: fx.Node,
        source: fx.Node,
        anchor: fx.Node,
        waits: dict[tuple[int, ...], fx.Node],
        results: dict[tuple[int, ...], fx.Node],
    ) -> None:
        """The op wrote a staged argument: bring the bytes to those who read it later.

        An input of the graph is written back. For a tensor that the graph made, its later readers
        take a copy instead; capture has made sure that they read it through no other view.
        """
        nodes = list(self.graph.nodes)
        last = max(waits.values(), key=nodes.index) if waits else None
        outside = source.op != "call_function"
        with self.graph.inserting_after(last or anchor):
            if outside:
                back = self._call(torch.ops.aten.copy_.default, (source, view))
            else:
                back = self._call(torch.ops.aten.clone.default, (view,))
        self.first[copy_back_name(self.captured.prefix, site)] = back
        written = source if outside else back
        if not outside:
            position = {n: i for i, n in enumerate(self.graph.nodes)}
            _redirect(source, back, but=back, after=position[back], position=position)
        for path, value in results.items():
            if value is not view:
                continue
            wait = waits.get(path)
            if wait is None:
                results[path] = written
            else:
                _redirect(wait, written, but=back)

    def _hand_over(self, node: fx.Node, results: dict[tuple[int, ...], fx.Node]) -> None:
        if () in results:
            node.replace_all_uses_with(results[()])
        for user in list(node.users):
            index = user.args[1] if len(user.args) > 1 else None
            if user.target is not _getitem_function() or (index,) not in results:
                raise CaptureError(
                    f"{user.name!r} uses all results of {node.name!r} at once",
                    expected="one getitem per result",
                    fix="unpack the results of the op before using them",
                    node=node.name,
                )
            user.replace_all_uses_with(results[(index,)])
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    # -- order -------------------------------------------------------------------------------

    def _order(self) -> None:
        """Insert the plan's barriers, and the fences between dtypes. See [Note: fences]."""
        by_name = {self.captured.prefix + n.name: n for n in self.graph.nodes}
        mine = {o.name for o in self.captured.problem.operations}
        for operation in sorted(self._passes_between_dtypes()):
            self._fence(self.first.get(operation) or by_name[operation])
        for before, group in self.barriers:
            if before not in mine:
                continue
            at = self.first.get(before) or by_name[before]
            named = {s.name for s in self.plan.segments if group in s.groups}
            node = next(n for key, n in self.inputs.items() if key.segment in named)
            self._fence(at)
            with self.graph.inserting_before(at):
                self._call(torch.ops.symmplan.barrier_.default, (node, group))
            self._fence(at)

    def _fence(self, at: fx.Node) -> None:
        if len(self.inputs) > 1:
            with self.graph.inserting_before(at):
                self._call(torch.ops.symmplan.fence_.default, (list(self.inputs.values()),))

    def _passes_between_dtypes(self) -> set[str]:
        """Operations that first touch a buffer whose bytes another dtype had."""
        problem = self.captured.problem
        first: dict[str, str] = {}
        rank = {o.name: i for i, o in enumerate(problem.operations)}
        for access in sorted(problem.accesses, key=lambda a: rank[a.operation]):
            first.setdefault(access.buffer, access.operation)
        places = [(b, self.plan.placements[b.name]) for b in problem.buffers]
        places.sort(key=lambda item: (item[1].segment, item[1].offset, item[0].name))
        found: set[str] = set()
        active: list[tuple[Any, Any]] = []
        for buffer, place in places:
            active = [
                (b, p) for b, p in active if p.segment == place.segment and p.end > place.offset
            ]
            for other, _ in active:
                if other.dtype != buffer.dtype:
                    found |= {first[other.name], first[buffer.name]}
            active.append((buffer, place))
        return found


def _redirect(
    node: fx.Node,
    to: fx.Node,
    *,
    but: fx.Node,
    after: int = -1,
    position: Mapping[fx.Node, int] | None = None,
) -> None:
    """Give the readers of ``node`` another node: all but one, or those behind a position."""
    place = position or {}
    node.replace_all_uses_with(
        to, delete_user_cb=lambda user: user is not but and place.get(user, 0) > after
    )


def _anchor() -> None:
    """Marks a point in the graph while it is rewritten."""


def _getitem_function() -> Any:
    import operator

    return operator.getitem


def _at(value: Any, path: tuple[int, ...]) -> fx.Node:
    for index in path:
        value = value[index]
    assert isinstance(value, fx.Node)
    return value


def _put(value: Any, path: tuple[int, ...], new: fx.Node) -> Any:
    if not path:
        return new
    items = list(value)
    items[path[0]] = _put(items[path[0]], path[1:], new)
    return items
