"""Ops that rewritten graphs call: fences, and matrix products with a given ``out``.

ATen's own ``out`` overloads return the tensor they were given, which Inductor does not take; these
mutate ``out`` and return nothing, so that a matrix product can write its placement without a copy.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["load", "without_returns"]


@functools.cache
def load() -> None:
    """Define the ops, once per process."""
    lib = torch.library.Library("symmplan", "FRAGMENT")
    _KEEP.append(lib)
    lib.define("mm_out(Tensor self, Tensor mat2, *, Tensor(a!) out) -> ()")
    lib.define("bmm_out(Tensor self, Tensor mat2, *, Tensor(a!) out) -> ()")
    lib.define(
        "addmm_out(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1, "
        "Tensor(a!) out) -> ()"
    )
    lib.define("poison_(Tensor(a!) freed) -> ()")
    lib.impl("poison_", _poison, "CompositeExplicitAutograd")
    lib.define("fence_(Tensor(a!)[] segments) -> ()")
    lib.impl("fence_", _nothing, "CompositeExplicitAutograd")
    lib.impl("mm_out", _mm_out, "CompositeExplicitAutograd")
    lib.impl("bmm_out", _bmm_out, "CompositeExplicitAutograd")
    lib.impl("addmm_out", _addmm_out, "CompositeExplicitAutograd")
    for name in ("mm_out", "bmm_out", "addmm_out", "fence_", "poison_"):
        torch.library.register_fake(f"symmplan::{name}", _nothing, lib=lib)


@functools.cache
def without_returns(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """An op that does the same as an out-variant but returns nothing; defined when first asked for.

    Inductor takes no op that returns a tensor it was given.
    """
    if not op._schema.returns:
        return op
    name = f"{op.name()}_{op._overloadname}".replace("::", "_").replace(".", "_")
    arguments = str(op._schema).partition("(")[2].rpartition(" -> ")[0]
    lib = torch.library.Library("symmplan", "FRAGMENT")
    _KEEP.append(lib)
    lib.define(f"{name}({arguments} -> ()")

    def run(*args: object, **kwargs: object) -> None:
        op(*args, **kwargs)

    lib.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"symmplan::{name}", _nothing, lib=lib)
    return getattr(torch.ops.symmplan, name).default  # type: ignore[no-any-return]


_KEEP: list[torch.library.Library] = []


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Nothing to compute: a fence, or the fake form of an op that only writes ``out``."""


def _poison(freed: torch.Tensor) -> None:
    """All bits set: not a number, or minus one."""
    freed.view(torch.uint8).fill_(255)


def _mm_out(self: torch.Tensor, mat2: torch.Tensor, *, out: torch.Tensor) -> None:
    torch.mm(self, mat2, out=out)


def _bmm_out(self: torch.Tensor, mat2: torch.Tensor, *, out: torch.Tensor) -> None:
    torch.bmm(self, mat2, out=out)


def _addmm_out(
    self: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: torch.Tensor,
) -> None:
    torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha, out=out)
