"""The catalogue as data: ``torch.ops.symm_mem``.

[Note: handshake and release of kernels]
    Kernels that synchronize with all peers through the signal pad before their first and after
    their last access of symmetric bytes handshake and release. ``one_shot_all_reduce_copy`` fills
    its own buffer before the first synchronization, so it does not handshake; but peers read that
    buffer only behind it, so it enters. The ``_low_contention_*`` ops synchronize in the same way,
    on a stream of their own which the wait waits for.

    For NVSHMEM's collectives the OpenSHMEM contract is taken, not an implementation: the caller
    sees to it that destinations are ready on all ranks, and only the local part is done on return.
    Neither handshake nor release, then. Device-driven all-to-alls write peers' splits before their
    first barrier.

    Sources: torch's ``csrc/distributed/c10d/symm_mem`` (``CUDASymmetricMemoryOps.cu``,
    ``nvshmem_extension.cu``, ``rocshmem_extension.cu``, ``ops/*.cu``) and
    ``torch/distributed/_symmetric_memory/__init__.py``; the OpenSHMEM 1.5 specification.

[Note: own workspace]
    ``fused_*`` ops rendezvous a workspace of their own, one per group, which grows (a collective)
    when a call needs more. They take ordinary tensors and copy what peers read into the workspace,
    so they declare nothing; they are listed because people look for them here.
"""

from __future__ import annotations

from symmplan.registry.rows import Row

__all__ = ["SYMM_MEM"]


def _kernel(
    name: str,
    where: str,
    *,
    handshake: bool = True,
    asynchronous: bool = False,
    out: str | None = None,
    note: str = "",
) -> Row:
    """An op that synchronizes through the signal pad of all it declares.

    Without ``handshake`` it touches its own bytes before.
    """
    return Row(
        f"symm_mem::{name}",
        where,
        pads=where,
        handshake=handshake,
        release=True,
        meets=True,
        enters=True,
        releases=True,
        asynchronous=asynchronous,
        out=out,
        note=note,
    )


def _one_sided(name: str, where: str, *, pads: str = "", note: str = "") -> Row:
    return Row(f"symm_mem::{name}", where, pads=pads, note=note)


def _fused(name: str, note: str) -> Row:
    return Row(f"symm_mem::{name}", "", note=f"rendezvouses a workspace of its own; {note}")


_MULTICAST = "needs NVLink multicast"
_CONTRACT = "OpenSHMEM contract: callers synchronize"
_SPLITS = "writes peers' splits before its first barrier"
_FALLBACK = "an ordinary input goes through a workspace of its own; the result is ordinary memory"

SYMM_MEM: tuple[Row, ...] = (
    _kernel("one_shot_all_reduce", "input", out="one_shot_all_reduce_out"),
    _kernel("one_shot_all_reduce_out", "input", note="out may be ordinary memory"),
    _kernel(
        "one_shot_all_reduce_copy",
        "symm_buffer",
        handshake=False,
        out="one_shot_all_reduce_copy_out",
        note="fills symm_buffer before the ranks meet",
    ),
    _kernel(
        "one_shot_all_reduce_copy_out",
        "symm_buffer",
        handshake=False,
        note="fills symm_buffer before the ranks meet; out may be ordinary memory",
    ),
    _kernel("two_shot_all_reduce_", "input"),
    _kernel(
        "two_shot_all_reduce_out", "input", note="overwrites input; output may be ordinary memory"
    ),
    _kernel("reduce_scatter_out", "input", note="output may be ordinary memory"),
    _kernel("multimem_all_reduce_", "input", note=_MULTICAST),
    _kernel(
        "multimem_one_shot_all_reduce",
        "input",
        out="multimem_one_shot_all_reduce_out",
        note=f"{_MULTICAST}; sums in no fixed order",
    ),
    _kernel(
        "multimem_one_shot_all_reduce_out", "input", note=f"{_MULTICAST}; sums in no fixed order"
    ),
    _kernel("multimem_one_shot_reduce_out", "input", note=f"{_MULTICAST}; sums in no fixed order"),
    _kernel("multimem_all_gather_out", "out", note=f"{_MULTICAST}; input may be ordinary memory"),
    _kernel("_low_contention_all_gather", "tensor", asynchronous=True, note=_FALLBACK),
    _kernel("_low_contention_reduce_scatter", "tensor", asynchronous=True, note=_FALLBACK),
    _kernel(
        "_low_contention_all_gather_ce_multicast",
        "return",
        out="_low_contention_all_gather_ce_multicast_out",
        note=f"{_MULTICAST}; takes its result from torch's own symmetric pool",
    ),
    _kernel("_low_contention_all_gather_ce_multicast_out", "out", note=_MULTICAST),
    _fused("fused_all_gather_matmul", "reads A in place only with native async TP on"),
    _fused("fused_all_gather_scaled_matmul", "takes ordinary tensors"),
    _fused("fused_matmul_reduce_scatter", "takes ordinary tensors"),
    _fused("fused_scaled_matmul_reduce_scatter", "takes ordinary tensors"),
    Row(
        "symm_mem::nccl_reduce_scatter_offset",
        "input",
        handshake=True,
        release=True,
        meets=True,
        note="NCCL memory; synchronizes without the signal pad; out may be ordinary memory",
    ),
    Row(
        "symm_mem::nccl_all_to_all_nd",
        "input",
        handshake=True,
        release=True,
        meets=True,
        note="NCCL memory; synchronizes without the signal pad; out may be ordinary memory",
    ),
    _one_sided(
        "memcpy_to_multicast_",
        "symm_mem_out",
        note=f"{_MULTICAST}; writes all peers at once, synchronizes with none",
    ),
    _one_sided("nvshmem_broadcast", "input", note=_CONTRACT),
    _one_sided("nvshmem_all_to_all", "input out", note=_CONTRACT),
    _one_sided(
        "all_to_all_vdev",
        "input out in_splits out_splits_offsets",
        pads="out_splits_offsets",
        note=f"{_SPLITS}; only rocSHMEM uses the pad",
    ),
    _one_sided("all_to_all_vdev_2d", "input out in_splits out_splits_offsets", note=_SPLITS),
    _one_sided(
        "all_to_all_vdev_2d_offset", "input out in_splits_offsets out_splits_offsets", note=_SPLITS
    ),
    _one_sided("tile_reduce", "in_tile out_tile", note="NVSHMEM; its own syncs are not relied on"),
    _one_sided(
        "multi_root_tile_reduce",
        "in_tiles out_tile",
        note="NVSHMEM; its own syncs are not relied on",
    ),
)
