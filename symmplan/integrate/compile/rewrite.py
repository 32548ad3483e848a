"""A captured graph and its plan -> a graph whose declared tensors live in their placements."""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import fx

from symmplan.capture.graphs import is_wait, overload_of
from symmplan.capture.steps import copy_name
from symmplan.errors import CaptureError
from symmplan.integrate.compile.emit import Emitter, SegmentInput
from symmplan.integrate.compile.homes import make_homes
from symmplan.integrate.compile.ops import without_returns
from symmplan.integrate.compile.order import keep_order
from symmplan.integrate.compile.poison import poison
from symmplan.place.ways import Lowering, Lowerings, overload_named
from symmplan.registry import bind_arguments, resolve_group_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from symmplan.capture.sites import Captured, Site
    from symmplan.model import Plan

__all__ = ["rewrite"]


def rewrite(
    module: fx.GraphModule,
    captured: Captured,
    plan: Plan,
    barriers: Sequence[tuple[str, str]],
    lowerings: Lowerings,
    fake_mode: Any,
    engines: Mapping[fx.Node, str],
) -> tuple[SegmentInput, ...]:
    """Change ``module`` in place so that it follows ``plan``.

    Args:
        module: The graph that ``captured`` was captured from.
        captured: Its decisions.
        plan: A plan whose problem contains the captured one.
        barriers: ``(operation, group)`` of each barrier to be run right before an operation.
        lowerings: How each op is run on the memory backend.
        fake_mode: The mode of the graph's fake tensors.
        engines: Names of the communicators over which collectives run, of those that do not run
            over the program's own.

    Returns:
        The inputs that the graph now takes after its own, in order.

    Collective: no.
    """
    site = next(s for s in captured.sites if s.buffer is not None)
    assert site.source is not None
    device = captured.values.tensors[(site.source, site.path)].device
    given: dict[str, list[fx.Node]] = {}
    for node, buffer in captured.given.items():
        given.setdefault(buffer, []).append(node)
    emitter = Emitter(module.graph, plan, device, fake_mode, _written_later(captured), given)
    make_homes(emitter, captured)
    _Declared(emitter, captured, lowerings, engines).run()
    poison(emitter, captured)
    keep_order(emitter, captured, barriers)
    emitter.finish()
    module.graph.lint()
    module.recompile()  # Inductor keys its code cache on the code as it is now
    return tuple(emitter.inputs)


def _written_later(captured: Captured) -> frozenset[str]:
    """The buffers that asynchronous ops write. See [Note: lanes]."""
    waits = captured.waits
    homes = {h.buffer for h in captured.homes if waits.get(h.node)}
    sites = {
        s.buffer
        for s in captured.sites
        if s.buffer is not None and waits.get(s.node) and (s.kind == "result" or s.writes)
    }
    return frozenset(homes | sites)


@define(eq=False)
class _Declared:
    """Rewrites the declared ops, one after the other."""

    emitter: Emitter
    captured: Captured
    lowerings: Lowerings
    engines: Mapping[fx.Node, str]
    tails: dict[fx.Node, fx.Node] = field(init=False, factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.emitter.graph

    def run(self) -> None:
        by_node: dict[fx.Node, list[Site]] = {}
        for site in self.captured.sites:
            by_node.setdefault(site.node, []).append(site)
        makers = {h.node for h in self.captured.homes if h.write == "declared"}
        for node, sites in by_node.items():
            if node in makers or any(s.buffer is not None for s in sites):
                self.emitter.origin = node
                self._declared(node, sites)
        self.emitter.origin = None

    def _fake(self, node: fx.Node, path: tuple[int, ...]) -> Any:
        return self.captured.values.tensors[(node, path)]

    def _declared(self, node: fx.Node, sites: list[Site]) -> None:
        spec = self.captured.specs[node]
        row = self.lowerings.row(spec)
        overload = overload_of(node.target)
        assert overload is not None
        with self.graph.inserting_before(node):
            bound = bind_arguments(overload, node.args, node.kwargs)
            staged = self._copy_in(bound, sites)
            results = {
                s.path: self.emitter.view(s.buffer, self._fake(node, s.path))
                for s in sites
                if s.kind == "result" and s.buffer is not None
            }
            for home in self.captured.homes:
                # Made here because a later op wants it, though this one need not have it.
                if home.node is node and home.path not in results:
                    results[home.path] = self.emitter.view(home.buffer, self._fake(node, home.path))
            if row is not None:
                results = self._lower(node, row, overload, bound, results)
            else:
                before = node.prev
                results = self._as_it_is(node, spec.out, overload, bound, results)
                self.emitter.first[self.captured.prefix + node.name] = before.next
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
            source = _at(bound[site.head], site.index)
            view = self.emitter.view(site.buffer, source.meta["val"], contiguous=True)
            copy = self.emitter.call(torch.ops.aten.copy_.default, (view, source))
            self.emitter.first[copy_name("copy in", self.captured.prefix, site)] = copy
            bound[site.head] = _put(bound[site.head], site.index, view)
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
        bound = {**bound, spec.group: self.engines.get(node, group)}
        target = overload_named(row.target)
        elements: dict[tuple[int, ...], dict[str, Any]] = {(): bound}
        if row.each:
            elements = {(i,): {**bound, "input": x} for i, x in enumerate(bound["inputs"])}
        outs = {
            path: self._out(row, element, results.get(path), node, path)
            for path, element in elements.items()
        }
        before = node.prev
        for path in outs if row.inplace else ():
            copy = self.emitter.call(
                torch.ops.aten.copy_.default, (outs[path], elements[path]["input"])
            )
            elements[path] = {**elements[path], "input": outs[path]}
            for site in self.captured.at(node):
                if site.kind == "result" and site.path == path and site.buffer is not None:
                    self.emitter.first[copy_name("copy in", self.captured.prefix, site)] = copy
                    before = node.prev
        for path, element in elements.items():
            self._run_row(target, element, outs[path])
        self.emitter.first[self.captured.prefix + node.name] = before.next
        return outs

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
        return self.emitter.call(
            torch.ops.aten.empty.memory_format,
            (self.emitter.numbers(like.shape),),
            {"dtype": like.dtype, "device": like.device},
        )

    def _run_row(self, target: Any, values: dict[str, Any], out: fx.Node) -> None:
        args = [values[a.name] for a in target._schema.arguments if not a.kwarg_only]
        has_out = any(a.name == "out" for a in target._schema.arguments)
        self.emitter.call(target, tuple(args), {"out": out} if has_out else {})

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
            self.emitter.call(without_returns(op), args, kwargs)
            return results
        args = tuple(bound[a.name] for a in overload._schema.arguments if not a.kwarg_only)
        kwargs = {a.name: bound[a.name] for a in overload._schema.arguments if a.kwarg_only}
        call = self.emitter.call(overload, args, kwargs)
        made: dict[tuple[int, ...], fx.Node] = {}
        for path in paths:
            value = call
            for index in path:
                value = self.emitter.getitem(value, index)
            made[path] = value
            if path in results:
                copy = self.emitter.call(torch.ops.aten.copy_.default, (results[path], value))
                made[path] = results[path]
                for site in self.captured.at(node):
                    if site.kind == "result" and site.path == path and site.buffer is not None:
                        self.emitter.first[copy_name("copy in", self.captured.prefix, site)] = copy
        return made

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
            if site.leaves:
                wait = waits.get(site.path)
                with self._behind(wait or anchor):
                    value = wait or results[site.path]
                    copied = self.emitter.call(torch.ops.aten.clone.default, (value,))
                self.emitter.first[copy_name("copy out", self.captured.prefix, site)] = copied
                if wait is None:
                    results[site.path] = copied
                else:
                    _redirect(wait, copied, but=copied)
            elif site.how == "stage" and site.kind == "argument" and site.writes:
                self._copy_back(site, *staged[site], anchor, waits, results)
        self.graph.erase_node(anchor)
        self._hand_over(node, results)
        if synchronous:
            for value in {id(v): v for v in results.values()}.values():
                for user in list(value.users):
                    if is_wait(user):
                        user.replace_all_uses_with(value)
                        self.graph.erase_node(user)

    @contextlib.contextmanager
    def _behind(self, node: fx.Node) -> Iterator[None]:
        """Insert behind a node and behind what was inserted there before, as `Steps` counts."""
        tail = self.tails.get(node, node)
        following = tail.next
        with self.graph.inserting_after(tail):
            yield
        self.tails[node] = following.prev

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
        with self._behind(last or anchor):
            if outside:
                back = self.emitter.call(torch.ops.aten.copy_.default, (source, view))
            else:
                back = self.emitter.call(torch.ops.aten.clone.default, (view,))
        self.emitter.first[copy_name("copy back", self.captured.prefix, site)] = back
        written = source if outside else back
        position = {n: i for i, n in enumerate(self.graph.nodes)}
        if not outside:
            _redirect(source, back, but=back, after=position[back], position=position)
        for path, value in results.items():
            if value is not view:
                continue
            wait = waits.get(path)
            if wait is None:
                results[path] = written
            else:
                _redirect(wait, written, but=back)
                for result in _results(site.node, path):  # what was waited for, by its old name
                    _redirect(result, written, but=back, after=position[back], position=position)

    def _hand_over(self, node: fx.Node, results: dict[tuple[int, ...], fx.Node]) -> None:
        if () in results:
            node.replace_all_uses_with(results[()])
        for user in list(node.users):
            index: Any = user.args[1] if len(user.args) > 1 else None
            if user.target is not operator.getitem or (index,) not in results:
                raise CaptureError(
                    f"{user.name!r} uses all results of {node.name!r} at once",
                    expected="one getitem per result",
                    fix="unpack the results of the op before using them",
                    node=node.name,
                )
            user.replace_all_uses_with(results[(index,)])
            self.graph.erase_node(user)
        self.graph.erase_node(node)


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


def _results(node: fx.Node, path: tuple[int, ...]) -> list[fx.Node]:
    """The nodes that stand for one result of a call."""
    if not path:
        return [node]
    return [u for u in node.users if u.target is operator.getitem and u.args[1:] == path]


def _anchor() -> None:
    """Marks a point in the graph while it is rewritten."""


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
