"""Fake values of nodes after passes have changed a graph.

Capture follows aliases by the storages of fake tensors, so each node needs an up-to-date value.
Passes change few nodes, and running the whole graph again would double the time that symmplan takes
for it. So the nodes are noted before the passes. Afterwards only those nodes are run whose op,
arguments or input values have changed.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from symmplan.capture.graphs import tensor_leaves
from symmplan.torch_private.ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def note(gm: fx.GraphModule) -> dict[fx.Node, tuple[Any, ...]]:
    """Note every node of a graph whose values are up to date."""
    return {n: _state(n) for n in _calls(gm) if "val" in n.meta}


def _state(node: fx.Node) -> tuple[Any, ...]:
    # The arguments are replaced as a whole whenever one of them changes.
    return node.target, node.args, node.kwargs, node.meta.get("val")


def refresh_changed(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: Any,
    noted: Mapping[fx.Node, tuple[Any, ...]],
) -> None:
    """Give every node the fake value it has now; ``noted`` is what `note` said before changes."""
    changed: set[fx.Node] = set()
    for node in _calls(gm):
        before = noted.get(node, ())
        same = before and all(map(operator.is_, before, _state(node)))
        if same and changed.isdisjoint(node.all_input_nodes):
            continue
        if not _is_plain(node):
            refresh_values(gm, inputs, fake_mode)
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with torch.no_grad(), fake_mode:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        if before and before[0] is node.target and _interchangeable(node, value, before[-1]):
            node.meta["val"] = before[-1]
        else:
            node.meta["val"] = value
            changed.add(node)


def refresh_values(gm: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any) -> None:
    """Give all nodes the values they have now, whatever they were."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    calls = _calls(gm)
    for node in calls:
        node.meta.pop("val", None)
    with torch.no_grad():
        FakeTensorProp(gm, mode=fake_mode).propagate_dont_convert_inputs(*inputs)
    for node in calls:
        node.meta.setdefault("val", None)


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def _is_plain(node: fx.Node) -> bool:
    """Whether a node can be run by itself: no subgraphs, no sizes that depend on data."""
    plain = isinstance(node.target, OpOverload) or node.target is operator.getitem
    return (
        plain
        and "unbacked_bindings" not in node.meta
        and all(i.op != "get_attr" and "val" in i.meta for i in node.all_input_nodes)
    )


def _interchangeable(node: fx.Node, new: Any, old: Any) -> bool:
    """Whether the new value can stand for the old one: neither is an alias of anything."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or any(r.alias_info is not None for r in schema.returns):
        return False
    used = {
        tensor.untyped_storage()._cdata
        for source in node.all_input_nodes
        for _, tensor in tensor_leaves(source.meta["val"])
    }
    ours, theirs = list(tensor_leaves(new)), list(tensor_leaves(old))
    return (
        len(ours) == len(theirs) > 0
        and all(a == b and _alike(x, y) for (a, x), (b, y) in zip(ours, theirs, strict=True))
        and used.isdisjoint(t.untyped_storage()._cdata for _, t in (*ours, *theirs))
    )


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    sizes = (*a.shape, *a.stride(), *b.shape, *b.stride())
    return (
        type(a) is type(b)
        and a.layout is torch.strided is b.layout
        and not any(isinstance(size, torch.SymInt) for size in sizes)
        and (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        and a.storage_offset() == b.storage_offset() == 0
    )
