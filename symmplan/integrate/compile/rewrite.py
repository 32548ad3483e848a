"""A placed program -> a graph whose declared tensors live in their placements."""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from symmplan.capture.graphs import called, is_wait
from symmplan.capture.producers import OUT_VARIANTS, out_overload
from symmplan.errors import CaptureError
from symmplan.integrate.compile.emit import Emitter, SegmentInput
from symmplan.integrate.compile.order import keep_order, poison
from symmplan.place.algorithms import overload_named
from symmplan.place.lower import launch
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from symmplan.capture.graphs import Path
    from symmplan.capture.sites import PlacedStorage, Site
    from symmplan.place.lower import Staged
    from symmplan.place.program import PlacedCall, PlacedProgram

_ABSOLUTE = frozenset({
    "aten::as_strided",
    "aten::as_strided_",
    "aten::as_strided_copy",
    "aten::as_strided_scatter",
})  # fmt: skip


def rewrite(
    module: fx.GraphModule, program: PlacedProgram, fake_mode: Any
) -> tuple[SegmentInput, ...]:
    """Change ``module`` in place so that it follows a plan.

    Returns:
        The inputs that the graph now takes after its own, in order.
    """
    emitter = Emitter(module.graph, program, fake_mode)
    _shift_absolute_views(emitter)
    for placed in program.captured.placed_storages:
        if placed.write not in ("declared", "given"):
            _make_placed(emitter, placed)
    for call in program.calls.values():
        _rewrite_call(emitter, call)
    poison(emitter)
    keep_order(emitter)
    emitter.finish()
    module.graph.lint()
    module.recompile()  # Inductor keys its code cache on the code as it is now
    return tuple(emitter.inputs)


def _shift_absolute_views(emitter: Emitter) -> None:
    """``as_strided`` counts from the start of the storage, which is now the segment's."""
    values, placed_storages = emitter.captured.values, emitter.captured.placed_storages
    # What was given has a storage of its own, which begins where the buffer does.
    roots = {values.find((h.node, h.path)): h for h in placed_storages if h.write != "given"}
    for node in emitter.graph.nodes:
        overload = called(node)
        if overload is None or overload._schema.name not in _ABSOLUTE:
            continue
        source = node.args[0]
        placed = roots.get(values.find((source, ()))) if (source, ()) in values.tensors else None
        bound = bind_arguments(overload, node.args, node.kwargs)
        if placed is None or bound["storage_offset"] is None:
            continue
        like = values.tensors[(source, ())]
        scatters = overload._schema.name == "aten::as_strided_scatter"
        if scatters and like.storage_offset() == 0 and like.is_contiguous():
            # It writes a copy in any case, and torch's own checks take its offset for that one's.
            with emitter.graph.inserting_before(node):
                copy = emitter.add(torch.ops.aten.clone.default, (source,))
            node.replace_input_with(source, copy)
            continue
        shift = emitter.offset(placed.buffer, like.dtype)
        if isinstance(bound["storage_offset"], fx.Node):
            with emitter.graph.inserting_before(node):
                bound["storage_offset"] = emitter.add(
                    operator.add, (bound["storage_offset"], shift)
                )
        else:
            bound["storage_offset"] += shift
        node.args = tuple(bound[a.name] for a in overload._schema.arguments)
        node.kwargs = {}


def _make_placed(emitter: Emitter, placed: PlacedStorage) -> None:
    """Let the producer of a storage write it in its placement."""
    node, like = placed.node, (placed.node, placed.path)
    if placed.write in ("alloc", "out"):
        with emitter.graph.inserting_before(node):
            first = view = emitter.view(placed.buffer, like)
            if placed.write == "out":
                overload = called(node)
                assert overload is not None
                variant = OUT_VARIANTS.get(overload._schema.name)
                op: Any = out_overload(overload) if variant is None else overload_named(variant)
                name = op._schema.arguments[-1].name  # "out", or "grad_input" and the like
                first = emitter.add(op, node.args, {**node.kwargs, name: view})
        emitter.first[emitter.captured.prefix + node.name] = first
        node.replace_all_uses_with(view)
        emitter.graph.erase_node(node)
    else:
        with emitter.graph.inserting_after(node):
            view = emitter.view(placed.buffer, like)
        with emitter.graph.inserting_after(view):
            copy = emitter.add(torch.ops.aten.copy_.default, (view, node))
        node.replace_all_uses_with(view, delete_user_cb=lambda user: user is not copy)


def _rewrite_call(emitter: Emitter, call: PlacedCall) -> None:
    """Rewrite a declared op."""
    node = emitter.origin = call.node
    with emitter.graph.inserting_before(node):
        bound = bind_arguments(call.overload, node.args, node.kwargs)
        results, staged = launch(call, emitter, bound)
    _finish(emitter, call, results, staged)
    emitter.origin = None


def _finish(emitter: Emitter, call: PlacedCall, results: dict[Path, Any], staged: Staged) -> None:
    """Copy out what leaves, hand the results to their readers, drop the old node."""
    node, synchronous = call.node, not call.spec.asynchronous
    waits = {} if synchronous else emitter.captured.waits.get(node, {})
    with emitter.graph.inserting_before(node):
        anchor = emitter.graph.call_function(_anchor)  # where code after the op goes
    for site in call.sites:
        if site.leaves:
            wait = waits.get(site.path)
            with _behind(emitter, wait or anchor):
                emitter.doing(call.copy("copy out", site))
                value = wait or results[site.path]
                copied = emitter.add(torch.ops.aten.clone.default, (value,))
            if wait is None:
                results[site.path] = copied
            else:
                _redirect(wait, copied, but=copied)
        elif site.how == "stage" and site.kind == "argument" and site.writes:
            emitter.doing(call.copy("copy back", site))
            _copy_back(emitter, site, *staged[site], anchor, waits, results)
    emitter.graph.erase_node(anchor)
    _hand_over(node, results)
    if synchronous:
        for value in {id(v): v for v in results.values()}.values():
            for user in list(value.users):
                if is_wait(user):
                    user.replace_all_uses_with(value)
                    emitter.graph.erase_node(user)


@contextlib.contextmanager
def _behind(emitter: Emitter, node: fx.Node) -> Iterator[None]:
    """Insert behind a node and behind what was inserted there before, as `Steps` counts."""
    tail = emitter.tails.get(node, node)
    following = tail.next
    with emitter.graph.inserting_after(tail):
        yield
    emitter.tails[node] = following.prev


def _copy_back(
    emitter: Emitter,
    site: Site,
    view: fx.Node,
    source: fx.Node,
    anchor: fx.Node,
    waits: dict[tuple[int, ...], fx.Node],
    results: dict[tuple[int, ...], fx.Node],
) -> None:
    """The op wrote a staged argument: bring the bytes to those who read it later.

    An input of the graph is written back, and so is a tensor of which other views are read later.
    Later readers of another tensor that the graph made take a copy instead.
    """
    in_place = source.op != "call_function" or site.viewed
    with _behind(emitter, max(waits.values(), default=anchor)):
        if in_place:
            back = emitter.add(torch.ops.aten.copy_.default, (source, view))
        else:
            back = emitter.add(torch.ops.aten.clone.default, (view,))
    written = source if in_place else back
    if not in_place:
        _redirect(source, back, behind=back)
    for path, value in results.items():
        if value is not view:
            continue
        wait = waits.get(path)
        if wait is None:
            results[path] = written
        else:
            _redirect(wait, written, but=back)
            for result in _results(site.node, path):  # what was waited for, by its old name
                _redirect(result, written, behind=back)


def _hand_over(
    node: fx.Node,
    results: dict[tuple[int, ...], fx.Node],
    path: tuple[int, ...] = (),
) -> None:
    """Give the readers of a result, and of what is inside of it, the new one."""
    if path in results:
        node.replace_all_uses_with(results[path])
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise CaptureError(
                f"{user.name!r} uses all results of {node.name!r} at once",
                expected="one getitem per result",
                fix="unpack the results of the op before using them",
                node=node.name,
            )
        index: Any = user.args[1]
        _hand_over(user, results, (*path, index))
    node.graph.erase_node(node)


def _redirect(
    node: fx.Node, to: fx.Node, *, but: fx.Node | None = None, behind: fx.Node | None = None
) -> None:
    """Give the readers of a node another one: all but one of them, or those behind a node."""

    def moves(user: fx.Node) -> bool:
        return user is not but and (behind is None or user > behind)

    node.replace_all_uses_with(to, delete_user_cb=moves)


def _results(node: fx.Node, path: tuple[int, ...]) -> list[fx.Node]:
    """The nodes that stand for one result of a call."""
    if not path:
        return [node]
    return [u for u in node.users if u.target is operator.getitem and u.args[1:] == path]


def _anchor() -> None:
    """Marks a point in the graph while it is rewritten."""
