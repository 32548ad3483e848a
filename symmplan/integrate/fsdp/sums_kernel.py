"""The kernel of `symmplan.integrate.fsdp.sums`; only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_rows"]


@triton.jit
def add_rows(rows, out, numel, scale, ranks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N803 (Triton reads annotations)
    """``out = (the sum of all rows) * scale``, accumulated in 32 bits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(ranks):
        total += tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
        rows += numel
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=inside)
