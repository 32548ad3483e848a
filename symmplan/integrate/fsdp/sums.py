"""The local sum behind a reduction: one pass over what the ranks have sent.

Floats of 16 bits are accumulated in 32 and rounded once, to the type in which FSDP2 reduces;
without Triton (on the CPU), once more if the scale is not 1 over the number of ranks.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from symmplan.device import device_of, kind_of
from symmplan.memory.kernels import scratch_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OwnRow", "sum_parts", "sum_rows", "sums_parts", "warm_up"]

#: Elements that one program of a kernel sums.
_BLOCK = 1024
#: Vector loads want addresses that are multiples of as many elements.
_ALIGN = 8


@frozen(eq=False)
class OwnRow:
    """One rank's row of what is summed, left where it was made.

    Attributes:
        rank: Whose row.
        spans: For each tensor where the part begins and ends there, and where it begins in a row,
            in elements.
        device: Where the tensors lie.
    """

    rank: int
    spans: tuple[tuple[int, int, int], ...]
    device: torch.device
    _tables: list[Any] = field(factory=list, init=False)

    def tables(self, most: int) -> list[tuple[slice, torch.Tensor, int]]:
        """For each launch: which tensors, what `add_parts` reads of its blocks, and alignment."""
        if self._tables:
            return self._tables
        for first in range(0, len(self.spans), most):
            which = slice(first, first + most)
            blocks = [
                [i, at, row + at - begin, min(_BLOCK, end - at)]
                for i, (begin, end, row) in enumerate(self.spans[which])
                for at in range(begin, end, _BLOCK)
            ]
            align = 1 if any(n % _ALIGN for _, *rest in blocks for n in rest) else _ALIGN
            if blocks:
                table = torch.tensor(blocks, dtype=torch.int64).to(self.device)
                self._tables.append((which, table, align))
        return self._tables


def sums_parts(device: torch.device) -> bool:
    """Whether `sum_parts` can be used there."""
    return kind_of(device).has_kernels and _kernels() is not None


def sum_parts(
    rows: torch.Tensor,
    parts: OwnRow,
    tensors: Sequence[torch.Tensor],
    total: torch.Tensor,
    scale: float,
    rounded: torch.dtype,
    *,
    add: bool = False,
) -> None:
    """Sum rows of which one lies in parts elsewhere, in the order of the ranks, and scale the sum.

    Args:
        rows: ``(ranks, numel)``, contiguous; one of them is not looked at.
        parts: Where that is, in ``tensors``.
        tensors: Of the type of ``rows``, contiguous.
        total: ``(numel,)``; only where there are parts.
        scale: What the sum is multiplied with.
        rounded: The type to which the scaled sum is rounded before it is written.
        add: Whether it is added to what ``total`` has, once it has the type of that.
    """
    kernels = _kernels()
    ranks, numel = rows.shape
    for which, table, align in parts.tables(kernels.MOST_PARTS):
        some = tuple(tensors[which])
        some += some[:1] * (kernels.MOST_PARTS - len(some))
        with device_of(rows.device).current():
            kernels.add_parts[(len(table),)](
                some,
                table,
                rows,
                total,
                numel,
                parts.rank,
                ranks,
                scale,
                rounded=_OF_TRITON[rounded](),
                ADD=add,
                ALIGN=align,
                BLOCK=_BLOCK,
                enable_fp_fusion=False,  # the scaled sum is rounded before it is added
            )


def sum_rows(
    rows: torch.Tensor,
    total: torch.Tensor,
    scale: float,
    rounded: torch.dtype | None = None,
    *,
    add: bool = False,
) -> None:
    """Sum the rows of a tensor, in their order, and scale the sum.

    Args:
        rows: ``(ranks, numel)``, contiguous.
        total: ``(numel,)``; 16 or 32 bits, at least as wide as ``rows``.
        scale: What the sum is multiplied with.
        rounded: The type to which the scaled sum is rounded before it is written, if another.
        add: As for `sum_parts`.
    """
    if add or rounded not in (None, total.dtype):
        exact = scratch_of(total.numel(), rounded or total.dtype, total.device)
        for begin in range(0, total.numel(), exact.numel()):
            part = total[begin : begin + exact.numel()]
            summed = exact[: part.numel()]
            sum_rows(rows[:, begin : begin + part.numel()], summed, scale)
            if not add:
                part.copy_(summed)
            elif torch.promote_types(summed.dtype, total.dtype) == total.dtype:
                part.add_(summed)
            else:
                part.add_(summed.to(total.dtype))
        return
    compiles = kind_of(rows.device).has_kernels
    of_triton = compiles and rows.dtype in _OF_TRITON and rows.is_contiguous()
    kernels = _kernels() if of_triton else None
    if kernels is not None:
        ranks, numel = rows.shape
        with device_of(rows.device).current():
            grid = (-(-numel // _BLOCK),)
            kernels.add_rows[grid](rows, total, numel, scale, ranks, BLOCK=_BLOCK)
        return
    if scale == 1 / len(rows):
        torch.mean(rows, 0, dtype=total.dtype, out=total)
        return
    torch.sum(rows, 0, dtype=total.dtype, out=total)
    if scale != 1:
        total.mul_(scale)


def warm_up(device: torch.device) -> None:
    """Compile the kernels: not later, as a CUDA graph may be captured then."""
    if not kind_of(device).is_accelerator:
        return
    b16, f32 = torch.bfloat16, torch.float32
    types = ((b16, b16, b16), (b16, b16, f32), (b16, f32, f32), (f32, f32, f32))
    ends = (16, 15) if sums_parts(device) else ()
    for given, rounded, made in types:
        rows = torch.zeros(2, 16, dtype=given, device=device)
        total = torch.empty(16, dtype=made, device=device)
        if made == rounded:
            sum_rows(rows, total, 0.5)
        for end in ends:
            parts = OwnRow(1, ((0, end, 0),), device)
            for add in (False, True):
                sum_parts(rows, parts, [rows[1]], total, 0.5, rounded, add=add)


@functools.cache
def _kernels() -> Any:
    try:
        from symmplan.integrate.fsdp import sums_kernel
    except ImportError:
        return None
    return sums_kernel


def _triton(name: str) -> Any:
    import triton.language as tl

    return getattr(tl, name)


#: What the kernels accumulate without loss.
_OF_TRITON = {
    getattr(torch, name): functools.partial(_triton, name)
    for name in ("bfloat16", "float16", "float32")
}
