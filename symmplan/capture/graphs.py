"""Small questions about FX nodes."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "argument_nodes",
    "called",
    "hidden_calls",
    "is_getitem",
    "is_wait",
    "overload_of",
    "target_name",
    "written_nodes",
]


def overload_of(target: Any) -> torch._ops.OpOverload | None:
    """The overload that a node calls; packets stand for their only or default overload."""
    if isinstance(target, torch._ops.OpOverload):
        return target
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()
        if "default" in names:
            return target.default
        if len(names) == 1:
            return getattr(target, names[0])  # type: ignore[no-any-return]
    inner = getattr(target, "_opoverload", None)  # a CustomOpDef called directly
    return inner if isinstance(inner, torch._ops.OpOverload) else None


def called(node: fx.Node) -> torch._ops.OpOverload | None:
    """The overload that a node calls itself, or None."""
    return overload_of(node.target) if node.op == "call_function" else None


def hidden_calls(
    graph: fx.Graph, module: torch.nn.Module | None
) -> Iterator[tuple[fx.Node, torch._ops.OpOverload, str]]:
    """Yield ``(node, overload, why)`` of every call that is not a node of the graph itself.

    Those are the calls that a node of a higher-order op makes: of the op that it functionalizes,
    and of the ops in its subgraphs (``torch.cond`` and the like).
    """
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            wrapped = overload_of(node.args[0]) if node.args else None
            if wrapped is not None:
                yield node, wrapped, f"its op is wrapped in {node.target.name()}"
        inner = getattr(module, node.target, None) if node.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            why = f"its op is inside {node.target}, a graph that another op runs"
            for call in inner.graph.nodes:
                overload = called(call)
                if overload is not None:
                    yield call, overload, why
            for call, overload, _ in hidden_calls(inner.graph, inner):
                yield call, overload, why


def is_getitem(node: fx.Node) -> bool:
    """Whether the node picks one of several results."""
    return node.target is operator.getitem


def is_wait(node: fx.Node) -> bool:
    """Whether the node ends asynchronous work."""
    overload = called(node)
    return overload is not None and overload._schema.name == "_c10d_functional::wait_tensor"


def target_name(node: fx.Node) -> str:
    """What the node calls, for people."""
    overload = overload_of(node.target)
    return overload.name() if overload is not None else str(node.target)


def written_nodes(overload: Any, node: fx.Node) -> set[fx.Node]:
    """The nodes whose tensors the op writes, by its schema."""
    if overload is None:
        return set()
    bound = bind_arguments(overload, node.args, node.kwargs)
    return {
        source
        for a in overload._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
        for _, source in argument_nodes(bound.get(a.name))
    }


def argument_nodes(
    argument: Any, path: tuple[int, ...] = ()
) -> Iterable[tuple[tuple[int, ...], fx.Node]]:
    """Yield ``(path, node)`` of every node in an argument, lists and tuples opened."""
    if isinstance(argument, fx.Node):
        yield path, argument
    elif isinstance(argument, (list, tuple)):
        for i, item in enumerate(argument):
            yield from argument_nodes(item, (*path, i))
