"""Which ops can write their result straight into memory that they are given.

Capture asks for the producer of each declared tensor. If the producer can write there, the tensor
is *bound*: it is made in its placement, without a copy. If not, the tensor is *staged*: it is
copied there.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import fx

from symmplan.torch_private.ops import OpOverload

#: ``"fuse"``: a copy that the compiler folds into the producer's own kernel.
#: ``"out"``: the op's variant with an ``out`` argument.
#: ``"alloc"``: the op writes nothing, it only makes memory.
#: ``"declared"``: the op is declared itself, and runs in a form that writes where it is told.
Write: TypeAlias = Literal["alloc", "declared", "fuse", "out"]

_ALLOCATIONS = frozenset(
    f"aten::{op}"
    for op in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)

# Ops that Inductor lowers to loops though they carry no pointwise tag: a copy of their result
# becomes their store.
_LOOPS = frozenset(
    f"aten::{op}"
    for op in (
        *("_to_copy", "amax", "amin", "arange", "clone", "constant_pad_nd", "embedding", "full"),
        *("full_like", "gather", "index_select", "mean", "slice_scatter", "sum", "where"),
    )
) | {"prims::convert_element_type"}

#: Ops whose kernels come from a library, with the symmplan op that passes ``out`` on to them.
OUT_VARIANTS = {
    "aten::mm": "symmplan::mm_out",
    "aten::bmm": "symmplan::bmm_out",
    "aten::addmm": "symmplan::addmm_out",
}


def writes_inductor(node: fx.Node) -> Write | None:
    """How the producer can write into given memory when Inductor compiles the graph."""
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    name = target._schema.name
    if is_allocation(target):
        return "alloc"
    if name in OUT_VARIANTS and target._overloadname == "default":
        return "out"
    if torch.Tag.pointwise in target.tags or name in _LOOPS:
        return None if target._schema.is_mutable else "fuse"
    return None


def is_allocation(target: object) -> bool:
    """Whether an op writes nothing, and only makes memory."""
    return isinstance(target, OpOverload) and target._schema.name in _ALLOCATIONS


def out_overload(target: OpOverload) -> OpOverload | None:
    """The overload that takes the same arguments and one ``out``, or None."""
    packet = target.overloadpacket
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = candidate._schema.arguments
        if not arguments or not arguments[-1].is_out:
            continue
        if [(a.name, str(a.type)) for a in arguments[:-1]] == wanted:
            return candidate  # type: ignore[no-any-return]
    return None


def writes_eager(node: fx.Node) -> Write | None:
    """How the producer can write into given memory when the graph runs op by op."""
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return None
    if is_allocation(target):
        return "alloc"
    if len(target._schema.returns) != 1 or target.is_view or target.namespace != "aten":
        return None
    return "out" if out_overload(target) is not None else None
