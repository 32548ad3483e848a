"""Ops of torch's symmetric memory, in a form that can be traced.

Torch has many of ``torch.ops.symm_mem`` for devices only: Dynamo stops at an op without a fake
kernel, and functionalization at one that returns the tensor it wrote. So wherever a program is
traced such an op becomes one that returns nothing, which stands for it in the registry, and the
tensor that it wrote. Eager programs run the op itself.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._symmetric_memory  # defines some of the ops
from torch._C import DispatchKey

from symmplan.integrate.compile.ops import without_returns
from symmplan.registry.declare import store
from symmplan.registry.rows import SYMM_MEM

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

__all__ = ["load"]

#: Ops that make their result, without a fake kernel: the argument that it is like.
_LIKE = {"symm_mem::multimem_one_shot_all_reduce": "input"}


@functools.cache
def load() -> None:
    """Make the ops that this torch has traceable, once per process."""
    for row in SYMM_MEM:
        op = _overload(row.op)
        if op is None or _fake_known(op):
            continue
        written = _returned(op)
        if written is not None:
            _trace_as(op, without_returns(op), written)
        elif row.op in _LIKE:
            at = [a.name for a in op._schema.arguments].index(_LIKE[row.op])
            torch.library.register_fake(row.op, _like(at), lib=_LIB, allow_override=True)


_LIB = torch.library.Library("symm_mem", "FRAGMENT")


def _overload(name: str) -> OpOverload | None:
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    return getattr(packet, "default", None)


def _fake_known(op: OpOverload) -> bool:
    """Whether it can be traced as it is, because it returns nothing that it was given."""
    return _returned(op) is None and (
        op.has_kernel_for_dispatch_key(DispatchKey.Meta) or not op._schema.returns
    )


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


def _trace_as(op: OpOverload, silent: OpOverload, written: int) -> None:
    if DispatchKey.CompositeImplicitAutograd in op.py_kernels:
        return
    store.stand_in(silent, op)
    name = op._schema.arguments[written].name

    def run(*args: Any, **kwargs: Any) -> Any:
        silent(*args, **kwargs)
        return args[written] if written < len(args) else kwargs[name]

    op.py_impl(DispatchKey.CompositeImplicitAutograd)(run)


def _like(at: int) -> Callable[..., torch.Tensor]:
    return lambda *args: torch.empty_like(args[at])
