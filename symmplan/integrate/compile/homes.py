"""Let producers write storages in their placements."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from symmplan.capture.graphs import overload_of
from symmplan.capture.producers import OUT_VARIANTS, out_overload
from symmplan.place.ways import overload_named
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from symmplan.capture.sites import Captured, Home
    from symmplan.integrate.compile.emit import Emitter

__all__ = ["make_homes"]

_ABSOLUTE = frozenset({
    "aten::as_strided",
    "aten::as_strided_",
    "aten::as_strided_copy",
    "aten::as_strided_scatter",
})  # fmt: skip


def make_homes(emitter: Emitter, captured: Captured) -> None:
    """Move every storage that has a home, but those of declared ops, into its placement.

    Args:
        emitter: Its graph is changed.
        captured: The graph's decisions.
    """
    _shift_absolute_views(emitter, captured)
    for home in captured.homes:
        if home.write not in ("declared", "given"):
            _make_home(emitter, captured, home)


def _shift_absolute_views(emitter: Emitter, captured: Captured) -> None:
    """``as_strided`` counts from the start of the storage, which is now the segment's."""
    values = captured.values
    # What was given has a storage of its own, which begins where the buffer does.
    roots = {values.find((h.node, h.path)): h for h in captured.homes if h.write != "given"}
    for node in emitter.graph.nodes:
        overload = overload_of(node.target) if node.op == "call_function" else None
        if overload is None or overload._schema.name not in _ABSOLUTE:
            continue
        source = node.args[0]
        home = roots.get(values.find((source, ()))) if (source, ()) in values.tensors else None
        bound = bind_arguments(overload, node.args, node.kwargs)
        if home is None or bound["storage_offset"] is None:
            continue
        like = values.tensors[(source, ())]
        if overload._schema.name == "aten::as_strided_scatter" and _whole(like):
            # It writes a copy in any case, and torch's own checks take its offset for that one's.
            with emitter.graph.inserting_before(node):
                copy = emitter.call(torch.ops.aten.clone.default, (source,))
            node.replace_input_with(source, copy)
            continue
        shift = emitter.offset(home.buffer, like.dtype)
        if isinstance(bound["storage_offset"], fx.Node):
            with emitter.graph.inserting_before(node):
                bound["storage_offset"] = emitter.call(
                    operator.add, (bound["storage_offset"], shift)
                )
        else:
            bound["storage_offset"] += shift
        node.args = tuple(bound[a.name] for a in overload._schema.arguments)
        node.kwargs = {}


def _whole(tensor: torch.Tensor) -> bool:
    """Whether a copy of ``tensor`` has its elements where its storage has them."""
    return tensor.storage_offset() == 0 and tensor.is_contiguous()


def _make_home(emitter: Emitter, captured: Captured, home: Home) -> None:
    """Let the producer of a storage write it in its placement."""
    node, like = home.node, captured.values.tensors[(home.node, home.path)]
    if home.write == "alloc":
        with emitter.graph.inserting_before(node):
            view = emitter.view(home.buffer, like)
        _replace(emitter, captured, node, view, first=view)
    elif home.write == "out":
        overload = overload_of(node.target)
        assert overload is not None
        variant = OUT_VARIANTS.get(overload._schema.name)
        if variant is not None:
            op: Any = overload_named(variant)
        else:
            op = out_overload(overload)
        with emitter.graph.inserting_before(node):
            view = emitter.view(home.buffer, like)
            name = op._schema.arguments[-1].name  # "out", or "grad_input" and the like
            call = emitter.call(op, node.args, {**node.kwargs, name: view})
        _replace(emitter, captured, node, view, first=call)
    else:
        with emitter.graph.inserting_after(node):
            view = emitter.view(home.buffer, like)
        with emitter.graph.inserting_after(view):
            copy = emitter.call(torch.ops.aten.copy_.default, (view, node))
        node.replace_all_uses_with(view, delete_user_cb=lambda user: user is not copy)


def _replace(
    emitter: Emitter, captured: Captured, node: fx.Node, by: fx.Node, *, first: fx.Node
) -> None:
    emitter.first[captured.prefix + node.name] = first
    node.replace_all_uses_with(by)
    emitter.graph.erase_node(node)
