"""Sizes that are not known when a graph is compiled, but have an upper bound.

A dimension marked with ``torch._dynamo.mark_dynamic(x, dim, max=...)`` gives its symbol a range.
Tensors whose sizes are sums, products and quotients of such symbols are planned for their largest
size. If the program gives a symbol no bound, the next power of two is the bound, as a guard of the
compiled code. A larger size makes Dynamo compile and plan again, or refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan.capture.graphs import tensor_leaves
from symmplan.torch_private.compilers import is_floor_division

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import fx

#: No tensor has as many bytes: a bound above is none.
_NO_BOUND = 1 << 44


def bound(number: int | torch.SymInt) -> int | None:
    """The largest that a size can be, None if that is not known."""
    if isinstance(number, int):
        return number
    upper = number.node.shape_env.bound_sympy(number.node.expr).upper
    return int(upper) if upper.is_Integer and int(upper) < _NO_BOUND else None


def bounded(fake: torch.Tensor, given: Mapping[Any, Any]) -> bool:
    """Whether the tensor's sizes have bounds, and can be computed where the graph begins.

    ``given`` is what `sources` found.
    """
    numbers = [*fake.shape, *fake.stride(), fake.storage_offset()]
    return bound(fake.untyped_storage().nbytes()) is not None and all(
        isinstance(n, int) or (bound(n) is not None and _computable(n.node.expr, given))
        for n in numbers
    )


def _computable(expr: Any, given: Mapping[Any, Any]) -> bool:
    plain = expr in given or expr.is_Integer or expr.is_Add or expr.is_Mul
    plain = plain or is_floor_division(expr)
    return plain and all(_computable(part, given) for part in expr.args)


def sources(graph: fx.Graph) -> dict[Any, tuple[fx.Node, int | None]]:
    """Where the graph's inputs give its symbols: ``{symbol: (input, dimension or None)}``."""
    inputs = [(n, n.meta.get("val")) for n in graph.nodes if n.op == "placeholder"]
    numbers: list[tuple[Any, fx.Node, int | None]] = [(v, node, None) for node, v in inputs]
    for node, value in inputs:
        if isinstance(value, torch.Tensor):
            numbers += [(size, node, i) for i, size in enumerate(value.shape)]
    found: dict[Any, tuple[fx.Node, int | None]] = {}
    for number, node, dimension in numbers:
        if isinstance(number, torch.SymInt) and number.node.expr.is_Symbol:
            found.setdefault(number.node.expr, (node, dimension))
    return found


def limit(graph: fx.Graph, wanted: Iterable[fx.Node]) -> dict[str, tuple[int, int]]:
    """Give every size on which some tensors depend an upper bound, if it has none.

    The bound becomes a guard of the graph: a larger size will have it compiled again.

    Args:
        graph: A graph that is being compiled.
        wanted: Nodes with the tensors.

    Returns:
        ``{name: (size now, largest size)}`` of all sizes with a bound that the tensors depend on.
    """
    symbols: dict[Any, None] = {}
    for node in wanted:
        for _, fake in tensor_leaves(node.meta.get("val")):
            for number in fake.shape:
                if isinstance(number, torch.SymInt):
                    symbols.update(dict.fromkeys(number.node.expr.free_symbols))
    found = {}
    for symbol, (node, dimension) in sources(graph).items():
        if symbol not in symbols:
            continue
        size = node.meta["val"] if dimension is None else node.meta["val"].shape[dimension]
        now = size.node.hint
        if bound(size) is None and now is not None:
            bool(size <= 1 << max(now - 1, 1).bit_length())
        largest = bound(size)
        if largest is not None and now is not None:
            found[_name(size, symbol)] = (now, largest)
    return found


def _name(size: torch.SymInt, symbol: Any) -> str:
    """Where the program has a size, as Dynamo writes it."""
    given = getattr(size.node.shape_env, "var_to_sources", {}).get(symbol)
    if not given:
        return str(symbol)
    name = given[0].name
    return str(name() if callable(name) else name)


def known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition holds for all sizes; nothing is assumed of them."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def contiguous(fake: torch.Tensor) -> bool:
    """Whether a tensor is contiguous for all sizes."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(fake.shape), reversed(fake.stride()), strict=True):
        if known(size == 1):
            continue
        if not known(stride == expected):
            return known(fake.numel() == 0)
        expected = expected * size
    return True
