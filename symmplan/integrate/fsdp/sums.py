"""The local sum behind a reduction: one pass over what the ranks have sent."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["sum_rows", "warm_up"]

#: Elements that one program of the kernel sums.
_BLOCK = 4096


def sum_rows(rows: torch.Tensor, total: torch.Tensor, scale: float) -> None:
    """Sum the rows of a tensor, in their order, and scale the sum.

    Floats of 16 bits are accumulated in 32 and rounded once; without Triton (on the CPU), once
    more if the scale is not 1 over the number of rows.

    Args:
        rows: ``(ranks, numel)``, contiguous.
        total: ``(numel,)``; 16 or 32 bits, at least as wide as ``rows``.
        scale: What the sum is multiplied with.
    """
    kernel = _kernel() if rows.is_cuda and rows.dtype in _SUMMED_IN_32 else None
    if kernel is not None:
        ranks, numel = rows.shape
        with torch.cuda.device(rows.device):
            kernel[(-(-numel // _BLOCK),)](rows, total, numel, scale, ranks, BLOCK=_BLOCK)
        return
    if scale == 1 / len(rows):
        torch.mean(rows, 0, dtype=total.dtype, out=total)
        return
    torch.sum(rows, 0, dtype=total.dtype, out=total)
    if scale != 1:
        total.mul_(scale)


def warm_up(device: torch.device) -> None:
    """Compile the kernel: not later, as a CUDA graph may be captured then."""
    pairs = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32))
    for given, made in (*pairs, (torch.float32, torch.float32)) if device.type == "cuda" else ():
        rows = torch.zeros(2, 16, dtype=given, device=device)
        sum_rows(rows, torch.empty(16, dtype=made, device=device), 0.5)


#: What the kernel accumulates without loss.
_SUMMED_IN_32 = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def _kernel() -> Any:
    try:
        from symmplan.integrate.fsdp.sums_kernel import add_rows
    except ImportError:
        return None
    return add_rows
