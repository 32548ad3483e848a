"""Ops that compiled graphs call, and forms of torch's own ops that can be traced.

Inductor does not accept an op that returns one of its arguments, and functionalization does not
accept an op that returns the tensor it wrote. So such ops get forms that return nothing: ATen's
``out`` overloads, through which a matrix product writes its placement without a copy, and ops of
``torch.ops.symm_mem``. When a program is traced, an op of ``symm_mem`` is replaced by its form and
the tensor that it wrote; the registry knows the form by the op's declaration. Eager programs run
the op itself.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from symmplan.memory.segment import in_segment
from symmplan.registry.declare import store
from symmplan.registry.rows import SYMM_MEM
from symmplan.torch_private.dispatch import dispatch_key
from symmplan.torch_private.table import require
from symmplan.torch_private.torch_registry import define_distributed_ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.torch_private.ops import OpOverload

_LIBRARY = torch.library.Library("symmplan", "FRAGMENT")
_SYMM_MEM_LIBRARY = torch.library.Library("symm_mem", "FRAGMENT")

#: Ops that make their result, without a fake kernel: the argument that it is like.
_LIKE = {"symm_mem::multimem_one_shot_all_reduce": "input"}


@functools.cache
def load() -> None:
    """Define the ops, and make those of this torch traceable, once per process.

    Raises:
        MissingSeamError: This torch lacks a name that compiled graphs need.
    """
    require("graphs")
    define_distributed_ops()
    for name in ("mm", "bmm", "addmm"):
        without_returns(getattr(torch.ops.aten, name).out, f"{name}_out")
    _define("poison_", "(Tensor(a!) freed)", _poison)
    _define("fence_", "(Tensor(a!)[] segments)", _nothing)
    for row in SYMM_MEM:
        packet = getattr(getattr(torch.ops, row.namespace), row.name, None)
        op = getattr(packet, "default", None)
        if op is not None:
            _make_traceable(op, _LIKE.get(row.op))


@functools.cache
def without_returns(op: OpOverload, name: str = "") -> OpOverload:
    """An op that does the same but returns nothing; defined when first asked for."""
    if not op._schema.returns:
        return op
    arguments = str(op._schema).partition("(")[2].rpartition(" -> ")[0]
    act = functools.partial(_by_segment, op) if op.namespace == "symm_mem" else op

    def run(*args: object, **kwargs: object) -> None:
        act(*args, **kwargs)

    scales = op is torch.ops.aten._scaled_mm.out
    return _define(name or _name_of(op), f"({arguments}", _scaled_mm if scales else run)


@functools.cache
def by_segment(op: OpOverload) -> OpOverload:
    """What calls an op of ``symm_mem`` on views of segments.

    Torch's kernels count from where an allocation begins, which they take for the begin of a
    tensor's storage. What a graph is given may have a storage of its own in a segment.
    """
    arguments, _, returns = str(op._schema).partition("(")[2].rpartition(" -> ")
    run = functools.partial(_by_segment, op)
    return _define(f"{_name_of(op)}_by_segment", f"({arguments}", run, returns, op)


def _name_of(op: OpOverload) -> str:
    """Of what stands for an op."""
    return f"{op.name()}_{op._overloadname}".replace("::", "_").replace(".", "_")


def _by_segment(op: OpOverload, *args: object, **kwargs: object) -> Any:
    return op(*map(_in_segment, args), **{name: _in_segment(x) for name, x in kwargs.items()})


def _in_segment(value: object) -> object:
    return in_segment(value) if isinstance(value, torch.Tensor) else value


def _scaled_mm(
    left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor, *others: object, **kwargs: object
) -> None:
    """A scaled product; Inductor gives a column of scales any stride where there is one of them."""
    if scale.dim() == 2 and scale.shape[1] == 1:
        scale = scale.reshape(-1).unsqueeze(1)
    torch.ops.aten._scaled_mm.out(left, right, scale, *others, **kwargs)


def _define(
    name: str,
    arguments: str,
    run: Callable[..., object],
    returns: str = "()",
    fake: Callable[..., object] | None = None,
) -> OpOverload:
    _LIBRARY.define(f"{name}{arguments} -> {returns}")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"symmplan::{name}", fake or _nothing, lib=_LIBRARY)
    return getattr(torch.ops.symmplan, name).default  # type: ignore[no-any-return]


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Nothing to compute: a fence, or the fake form of an op that returns nothing."""


def _poison(freed: torch.Tensor) -> None:
    """All bits set: not a number, or minus one."""
    freed.view(torch.uint8).fill_(255)


def _make_traceable(op: OpOverload, like: str | None) -> None:
    names = [a.name for a in op._schema.arguments]
    written = _returned(op)
    if written is not None:
        composite = dispatch_key("CompositeImplicitAutograd")
        if composite in op.py_kernels:
            return
        silent, target = without_returns(op), names[written]
        store.stand_in(silent, op)

        def run(*args: Any, **kwargs: Any) -> Any:
            silent(*args, **kwargs)
            return args[written] if written < len(args) else kwargs[target]

        op.py_impl(composite)(run)
    elif like is not None and not op.has_kernel_for_dispatch_key(dispatch_key("Meta")):
        at = names.index(like)

        def made(*args: Any) -> torch.Tensor:
            return torch.empty_like(args[at])

        name, library = op._schema.name, _SYMM_MEM_LIBRARY
        torch.library.register_fake(name, made, lib=library, allow_override=True)


def _returned(op: OpOverload) -> int | None:
    """Index of the argument that the op returns; None if it returns something else."""
    returns = op._schema.returns
    if len(returns) != 1 or returns[0].alias_info is None:
        return None
    names = returns[0].alias_info.before_set
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & names:
            return at
    return None
