"""The kernels of `symmplan.integrate.fsdp.sums`; only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["MOST_PARTS", "add_parts", "add_rows"]

#: Tensors of one launch of `add_parts`: kernels are compiled for that number.
MOST_PARTS = 16


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


@triton.jit
def add_parts(  # type: ignore[no-untyped-def]  # noqa: ANN201
    parts,  # noqa: ANN001
    table,  # noqa: ANN001
    rows,  # noqa: ANN001
    out,  # noqa: ANN001
    numel,  # noqa: ANN001
    rank,  # noqa: ANN001
    ranks,  # noqa: ANN001
    scale,  # noqa: ANN001
    rounded: tl.constexpr,
    ADD: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """``out = (the sum of all rows) * scale``, where the row of one rank lies in parts elsewhere.

    With ``rounded``, those parts are rounded to the type of the rows first. With ``ADD``, the
    result is added to what ``out`` has.

    Each program sums one block, of which the table has: the part it is of, where it begins there
    and in a row, and how many elements it has.
    """
    entry = table + tl.program_id(0) * 4
    mine = parts[0]
    for i in tl.static_range(1, len(parts)):
        mine = tl.where(tl.load(entry) == i, parts[i], mine)
    at = tl.arange(0, BLOCK)
    inside = at < tl.load(entry + 3)
    mine += tl.multiple_of(tl.load(entry + 1), ALIGN)
    begin = tl.multiple_of(tl.load(entry + 2), ALIGN)
    rows += begin
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in range(ranks):
        total += tl.load(tl.where(peer == rank, mine, rows) + at, mask=inside, other=0.0).to(
            tl.float32
        )
        rows += numel
    total = (total * scale).to(rounded).to(out.dtype.element_ty)
    out += begin
    if ADD:
        total += tl.load(out + at, mask=inside)
    tl.store(out + at, total, mask=inside)
