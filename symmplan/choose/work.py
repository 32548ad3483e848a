"""How much a graph computes while a collective runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from symmplan.capture.bounds import bound as bound_of
from symmplan.capture.graphs import is_getitem, is_wait, overload_of
from symmplan.torch_private.ops import tree_map_only

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


#: So many hide any collective.
_MOST = 1 << 50
#: Products that write where they are told, as a graph has them, and what they compute.
_WRITES = {
    f"symmplan::{name}_out": getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "_scaled_mm")
}


def flops_beside(nodes: Sequence[fx.Node]) -> dict[fx.Node, float]:
    """Floating-point operations of what is issued between each collective and its first wait.

    Products beside several collectives at a time are divided among these by their bytes.

    Args:
        nodes: Collectives of one graph, in its order. A collective without a wait has nothing
            beside it.
    """
    found = dict.fromkeys(nodes, 0.0)
    graph = list(nodes[0].graph.nodes) if nodes else []
    positions = {node: at for at, node in enumerate(graph)}
    ends = {n: min(_waits(n), key=positions.__getitem__, default=None) for n in nodes}
    running: list[fx.Node] = []
    for node in graph:
        running = [other for other in running if ends[other] is not node]
        if ends.get(node) is not None:
            running.append(node)
        elif running and (flops := _flops(node)):
            sizes = [_nbytes(other) for other in running]
            for other, nbytes in zip(running, sizes, strict=True):
                found[other] += flops * nbytes / max(sum(sizes), 1)
    return found


def _waits(node: fx.Node) -> list[fx.Node]:
    readers = [*node.users, *(r for n in node.users if is_getitem(n) for r in n.users)]
    return [reader for reader in readers if is_wait(reader)]


def _flops(node: fx.Node) -> float:
    """Of matrix products and the like; the largest possible where sizes are dynamic."""
    overload = overload_of(node.target) if node.op == "call_function" else None
    if overload is None:
        return 0.0
    args, kwargs = tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
    known = bound_of(_flops_of(overload, args, kwargs, node.meta["val"]))
    return float(_MOST if known is None else min(known, _MOST))


def _flops_of(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Floating-point operations of one call; 0 for what is no matrix product or the like."""
    packet = _WRITES.get(overload._schema.name, overload.overloadpacket)
    formula: Any = flop_registry.get(packet)
    if formula is None:
        return 0
    others = {name: value for name, value in kwargs.items() if name != "out"}
    try:
        return formula(*args, **others, out_val=kwargs.get("out", result))
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return 0  # shapes that torch's formula does not know: 2.11's, attention with fewer heads


def _nbytes(node: fx.Node) -> int:
    value = node.meta["val"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return sum((bound_of(v.numel()) or 0) * v.element_size() for v in values)
