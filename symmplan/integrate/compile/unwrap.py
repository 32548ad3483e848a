"""Declared ops that Inductor's overlap scheduling has wrapped, back as nodes of the graph.

Overlap scheduling (``aten_distributed_optimizations``) moves collectives and matrix products in the
graph, and then wraps each in a higher-order op that also takes what must come before it, so that
the order survives what follows. A collective inside such an op could be neither placed nor
waited for by itself. So they are all taken out again where they stand; their order is the graph's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["unwrap"]

_WRAPPER = "control_deps"


def unwrap(gm: fx.GraphModule) -> bool:
    """Replace every op that only keeps another one in order by that other one, in place.

    Args:
        gm: The graph after Inductor's passes.

    Returns:
        Whether there were any: then the graph is in an order that is to be kept.
    """
    found = list(_wrapped(gm))
    for node, call in found:
        inside = [n for n in call.graph.nodes if n.op == "placeholder"]
        outside = dict(zip(inside, node.args[2:], strict=True))
        with gm.graph.inserting_before(node):
            new = gm.graph.node_copy(call, outside.__getitem__)
        new.meta = {**call.meta, **node.meta}
        name, attribute = node.name, node.args[1]
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        new.name = name
        assert isinstance(attribute, fx.Node)
        if not attribute.users:
            gm.graph.erase_node(attribute)
    return bool(found)


def _wrapped(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each wrapper with the one call that it wraps."""
    for node in gm.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.HigherOrderOperator) or target.name() != _WRAPPER:
            continue
        attribute = node.args[1]
        assert isinstance(attribute, fx.Node)
        inner = getattr(gm, str(attribute.target)).graph
        calls = [n for n in inner.nodes if n.op == "call_function"]
        (output,) = (n for n in inner.nodes if n.op == "output")
        if len(calls) == 1 and output.args == (calls[0],):
            yield node, calls[0]
