"""All-gathers whose results are multiplied row by row, and reduce-scatters of such products.

Looked for in a graph of ATen's ops, and nothing is changed. A collective may be along any dimension
but the last: torch gathers along dimension 0 and arranges the parts anew, with ``split`` and
``cat``, and so before it scatters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import fx

from symmplan.capture.graphs import called, is_getitem, is_wait
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ATEN: Any = torch.ops.aten
_C10D: Any = torch.ops._c10d_functional

#: Products of matrices, and the argument whose rows become those of the result.
PRODUCTS = {
    _ATEN.mm.default: "self",
    _ATEN.addmm.default: "mat1",
    _ATEN._scaled_mm.default: "self",
}
#: Parts of other pipelines, which write memory of their own.
_WRITE_NEW = frozenset(f"symmplan::{name}_out" for name in ("mm", "addmm", "_scaled_mm"))
_SPLITS = (_ATEN.split.Tensor, _ATEN.split_with_sizes.default)
#: Other sizes for the same elements.
RESHAPES = (_ATEN.reshape.default, _ATEN.view.default, _ATEN._unsafe_view.default)
#: The same, or the bytes as another type.
_SHOWS = (*RESHAPES, _ATEN.view.dtype, _ATEN.detach.default)


@frozen
class Rows:
    """How the rows of a matrix belong to ranks: it is ``(outer, ranks, inner)`` of them."""

    outer: int
    ranks: int
    inner: int

    @property
    def part(self) -> int:
        """How many belong to each rank."""
        return self.outer * self.inner

    @property
    def all(self) -> int:
        """How many there are."""
        return self.part * self.ranks

    @classmethod
    def of(cls, shape: Sequence[int], dim: int, ranks: int) -> Rows:
        """Of a tensor whose dimension ``dim`` is the ranks', as a matrix of its last dimension."""
        return cls(math.prod(shape[:dim]), ranks, math.prod(shape[dim:-1]) // ranks)


@frozen(eq=False)
class Gather:
    """An all-gather, and the products of which its result is the left side.

    Attributes:
        start: Its node.
        wait: Where it ends.
        rows: How the rows of its result, as a matrix, belong to ranks.
        chain: What only shows its result in other forms, the wait's own not among it.
        products: ``{product: its left side}``.
        before: The first node that needs the result.
    """

    start: fx.Node
    wait: fx.Node
    rows: Rows
    chain: tuple[fx.Node, ...]
    products: dict[fx.Node, fx.Node]
    before: fx.Node

    @property
    def shard(self) -> fx.Node:
        """What this rank gives."""
        node: fx.Node = _args(self.start)[0]
        return node

    @property
    def group(self) -> str:
        """Name of the process group."""
        return str(_args(self.start)[2])

    @property
    def shape(self) -> tuple[int, int, tuple[int, ...]]:
        """Rows of a part, columns, and columns of the products."""
        columns = next(iter(self.products.values())).meta["val"].shape[1]
        return self.rows.part, int(columns), _widths(self.products)


@frozen(eq=False)
class Scatter:
    """A reduce-scatter of what rows can be computed of by themselves.

    Attributes:
        start: Its node.
        wait: Where it ends.
        source: What is scattered, before its parts are arranged one behind the other.
        rows: How the source's rows, as a matrix, belong to ranks.
        products: What is multiplied for it and for nothing else.
        inside: What is computed for it and for nothing else, row by row; the products among it.
        dead: What arranges the parts.
    """

    start: fx.Node
    wait: fx.Node
    source: fx.Node
    rows: Rows
    products: tuple[fx.Node, ...]
    inside: frozenset[fx.Node]
    dead: tuple[fx.Node, ...]

    @property
    def group(self) -> str:
        """Name of the process group."""
        return str(_args(self.start)[3])

    @property
    def shape(self) -> tuple[int, int, tuple[int, ...]]:
        """Rows of a part, columns of the left sides, and columns of the products."""
        columns = [given_by(n)[lhs_of(n)].meta["val"].shape[1] for n in self.products]
        return self.rows.part, int(sum(columns) // len(columns)), _widths(self.products)


def gather_of(start: fx.Node) -> Gather | None:
    """An all-gather whose result is multiplied row by row, or None."""
    wait, ranks = _only_wait(start), int(_args(start)[1])
    shape = _sizes(_args(start)[0])
    if wait is None or not shape or ranks < 2 or not math.prod(shape):
        return None
    order = {node: i for i, node in enumerate(start.graph.nodes)}
    return _gather(start, wait, *_arranged(wait, ranks), order)


def scatter_of(start: fx.Node) -> Scatter | None:
    """A reduce-scatter of rows that products compute, or None."""
    wait, ranks = _only_wait(start), _args(start)[2]
    given: Any = _args(start)[0]
    shape = _sizes(given)
    if wait is None or len(shape) < 2 or ranks < 2 or not math.prod(shape):
        return None
    if _args(start)[1] not in ("sum", "avg") or not given.meta["val"].is_floating_point():
        return None
    source, dim, dead = _before_cat(given, ranks)
    users = [u for u in source.users if u not in dead and u is not start]
    shape = _sizes(source)
    if users or dim >= len(shape) - 1 or shape[dim] % ranks:
        return None
    rows = Rows.of(shape, dim, ranks)
    inside: list[fx.Node] = []
    _collect(source, rows, shape[-1], inside)
    products = tuple(n for n in inside if n.target in PRODUCTS)
    if not products or not _calm(min(inside), start):
        return None
    return Scatter(start, wait, source, rows, products, frozenset(inside), (*dead,))


def lhs_of(product: fx.Node) -> str:
    """The argument of a product whose rows become those of the result."""
    return PRODUCTS[product.target]


def has_rows(product: fx.Node, name: str) -> bool:
    """Whether an argument of a product, or of what is added, has a row for each of the result's."""
    if name == lhs_of(product):
        return True
    shape, rows = given_by(product)[name].meta["val"].shape, product.meta["val"].shape[0]
    return len(shape) == 2 and shape[0] == rows > 1 and name in ("self", "scale_a")


def _widths(products: Iterable[fx.Node]) -> tuple[int, ...]:
    """Columns of the results of products."""
    return tuple(int(product.meta["val"].shape[1]) for product in products)


def takes_rows(node: fx.Node, rows: Rows, columns: int) -> bool:
    """Whether a value has these rows, as a matrix of its last dimension."""
    shape = _sizes(node)
    return len(shape) > 1 and shape[-1] == columns and math.prod(shape) == rows.all * columns


def _collect(node: fx.Node, rows: Rows, columns: int, inside: list[fx.Node]) -> None:
    """What is computed for a value alone, row by row: the inner nodes of the tree that it ends."""
    if node.target in PRODUCTS:
        inside.append(node)
        addend = _args(node)[0]
        adds = node.target is _ATEN.addmm.default and _alone(addend)
        if adds and takes_rows(addend, rows, columns):
            _collect(addend, rows, columns, inside)
        return
    shapes = node.target in RESHAPES
    if not shapes and not _pointwise(node):
        return
    before = node.all_input_nodes
    if not all(takes_rows(n, rows, columns) or (not shapes and is_row(n)) for n in before):
        return
    inside.append(node)
    for n in before:
        if takes_rows(n, rows, columns) and _alone(n):
            _collect(n, rows, columns, inside)


def is_row(node: fx.Node) -> bool:
    """Whether a value is the same for all rows that it is combined with."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and math.prod(value.shape[:-1]) == 1


def _pointwise(node: fx.Node) -> bool:
    """Whether each element of the result is made of those of the arguments at its place."""
    overload = called(node)
    return (
        overload is not None
        and torch.Tag.pointwise in overload.tags
        and not overload._schema.is_mutable
        and len(overload._schema.returns) == 1
    )


def _args(node: fx.Node) -> Any:
    """A node's arguments, which FX gives no useful types."""
    return node.args


def given_by(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by name."""
    overload = called(node)
    assert overload is not None
    return dict(bind_arguments(overload, node.args, node.kwargs))


def _alone(node: Any) -> bool:
    """Whether a value has one reader."""
    return node.op == "call_function" and len(node.users) == 1


def _sizes(node: Any) -> tuple[int, ...]:
    """A value's sizes; empty if they are not known."""
    value = getattr(node, "meta", {}).get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return ()
    return tuple(value.shape)


def _only_wait(start: fx.Node) -> fx.Node | None:
    """The wait of a collective that nothing else looks at."""
    users = list(start.users)
    return users[0] if len(users) == 1 and is_wait(users[0]) else None


def _pieces(node: fx.Node, dim: int, ranks: int) -> tuple[dict[fx.Node, int], list[fx.Node]]:
    """``{piece: which rank's}`` of equal ones along a dimension, and what they are cut with."""
    sizes = _sizes(node)
    if dim >= len(sizes) or sizes[dim] % ranks:
        return {}, []
    size, found, cuts = sizes[dim] // ranks, {}, []
    for user in node.users:
        if user.target in _SPLITS:
            given = given_by(user)
            wanted = given.get("split_size", given.get("split_sizes"))
            if given["dim"] == dim and wanted in (size, [size] * ranks):
                cuts.append(user)
                found.update({p: _args(p)[1] for p in user.users if is_getitem(p)})
        elif user.target is _ATEN.slice.Tensor:
            given = given_by(user)
            begin = given["start"] or 0
            if given["dim"] == dim and _sizes(user)[dim] == size and begin % size == 0:
                found[user] = begin // size
    return found, cuts


def _joined(cat: fx.Node, pieces: dict[fx.Node, int], ranks: int) -> bool:
    """Whether a node joins all pieces in their order."""
    if cat.target is not _ATEN.cat.default:
        return False
    return [pieces.get(n) for n in _args(cat)[0]] == [*range(ranks)]


def _dim_of(cat: fx.Node) -> int:
    """Along which dimension tensors are joined."""
    dim, dims = int(given_by(cat)["dim"]), int(cat.meta["val"].ndim)
    return dim % dims


def _arranged(wait: fx.Node, ranks: int) -> tuple[fx.Node, int, list[fx.Node]]:
    """The result of an all-gather, arranged anew, the ranks' dimension, and what is between."""
    pieces, cuts = _pieces(wait, 0, ranks)
    users = dict.fromkeys(user for piece in pieces for user in piece.users)
    for cat in users:
        if _joined(cat, pieces, ranks):
            return cat, _dim_of(cat), [*cuts, *pieces]
    return wait, 0, []


def _before_cat(node: fx.Node, ranks: int) -> tuple[fx.Node, int, list[fx.Node]]:
    """What is scattered, along which dimension, and what arranges its parts for that."""
    if node.target is _ATEN.cat.default and _dim_of(node) == 0 and _alone(node):
        first: Any = _args(node)[0][0]
        source = _args(first)[0].args[0] if is_getitem(first) else _args(first)[0]
        for dim in range(1, len(_sizes(source)) - 1):
            pieces, cuts = _pieces(source, dim, ranks)
            if _joined(node, pieces, ranks) and all(map(_alone, pieces)):
                return source, dim, [node, *pieces, *cuts]
    return node, 0, []


def _gather(
    start: fx.Node,
    wait: fx.Node,
    source: fx.Node,
    dim: int,
    between: list[fx.Node],
    order: dict[fx.Node, int],
) -> Gather | None:
    shape, ranks = _sizes(source), int(_args(start)[1])
    if len(shape) < 2 or dim >= len(shape) - 1:
        return None
    rows, columns = Rows.of(shape, dim, ranks), shape[-1]
    views = [source]
    for node in views:  # which grows
        views += [u for u in node.users if u.target in _SHOWS and takes_rows(u, rows, columns)]
    matrices = [node for node in views if len(_sizes(node)) == 2]
    chain = [*between, *views]
    shown = {wait, *chain}
    readers = sorted({u for n in shown for u in n.users if u not in shown}, key=order.__getitem__)
    behind = _behind(wait)
    before = readers[0] if readers else None
    products = {
        user: matrix
        for matrix in matrices
        for user in sorted(matrix.users, key=order.__getitem__)
        if before is not None and _multiplies(user, matrix)
        if raised(user, behind, before, order) is not None
    }
    if not products or before is None or not _calm(wait, max(products, key=order.__getitem__)):
        return None
    chain = sorted({*chain} - {wait}, key=order.__getitem__)
    return Gather(start, wait, rows, tuple(chain), products, before)


def _calm(first: fx.Node, last: fx.Node) -> bool:
    """Whether nothing between two nodes writes what was there: then products may move there."""
    node = first.next
    while node is not last:
        overload = called(node)
        if overload is None:
            if node.op == "call_function" and not is_getitem(node):
                return False
        elif overload._schema.is_mutable and overload._schema.name not in _WRITE_NEW:
            return False
        node = node.next
    return True


def _multiplies(user: fx.Node, matrix: fx.Node) -> bool:
    if user.target not in PRODUCTS:
        return False
    return given_by(user)[lhs_of(user)] is matrix and user.all_input_nodes.count(matrix) == 1


def _behind(wait: fx.Node) -> set[fx.Node]:
    """All that is computed of what a wait gives."""
    found, more = {wait}, [wait]
    while more:
        for user in more.pop().users:
            if user not in found:
                found.add(user)
                more.append(user)
    return found


def raised(
    user: fx.Node, behind: set[fx.Node], before: fx.Node, order: dict[fx.Node, int]
) -> list[fx.Node] | None:
    """What a product needs that comes after ``before``, in order; None if it cannot be raised.

    Args:
        user: The product.
        behind: What it cannot need but as its left side.
        before: A node.
        order: ``{node: its position}``.
    """
    given = given_by(user)
    found: set[fx.Node] = set()
    more = [x for name, x in given.items() if isinstance(x, fx.Node) and name != lhs_of(user)]
    while more:
        node = more.pop()
        if node in behind:
            return None
        if node in found or order[node] < order[before]:
            continue
        overload = called(node)
        if overload is None or overload.namespace not in ("aten", "prims"):
            return None
        if overload._schema.is_mutable:
            return None
        found.add(node)
        more += node.all_input_nodes
    return sorted(found, key=order.__getitem__)
