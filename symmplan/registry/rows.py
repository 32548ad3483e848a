"""The catalogue as data: torch's collectives, ``torch.ops.symm_mem``, and what it leaves out.

[Note: what the catalogue says]
    ``where`` names the tensors that some algorithm of the op can use if they are symmetric. It does
    not say that the op needs them to be: all collectives also run on ordinary memory. Which of
    these tensors a memory backend really uses is decided when the program is rewritten for that
    backend. So ``all_reduce`` declares its input, too, although torch's own implementation clones
    it and reduces the clone in
    place: a one-sided all-reduce reads the input where it lies.

[Note: facts of collectives]
    These are facts of the process group's own collectives, on any backend. symmplan's collectives
    in shared memory do more, see `symmplan.memory.ops.one_sided`. The words are those of
    [Note: peers count] in `symmplan.model`.

    *synchronizes*: a rank's result of an all-gather, a reduce-scatter or an all-reduce depends on
    the inputs of all ranks, so no rank is past the wait before all have started. In a broadcast the
    other ranks wait for the root only. In an all-to-all a rank waits for those ranks that send it
    something; with given splits there may be none. So neither of these two synchronizes.

    *enters*, *releases*: a rank's tensors belong to the collective from the rank's call until its
    work ends on that rank. Under this contract programs reuse them. Peers, and the code that moves
    the bytes, touch them at no other time. But a rank's own input is read immediately, whether or
    not peers have arrived. So no collective handshakes in symmplan's sense. None releases, either,
    since the others may still run theirs when this rank has finished.

    Sources: torch's ``csrc/distributed/c10d/Functional.cpp`` and ``ProcessGroup.hpp``; NCCL's user
    guide on symmetric windows and copy-engine collectives.

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

from typing import Any

from attrs import field, frozen


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@frozen
class CatalogueRow:
    """One op of the catalogue. See `symmplan.model.OpSpec` for the meaning of the facts.

    Attributes:
        op: Qualified name; the row is about its ``.default`` overload.
        collective: What it does, as people call it; one word for all ops that do it.
        where: Arguments and results that should be symmetric, given as words in one string.
        group: The argument that carries the group.
        pads: The words of ``where`` whose segment's signal pad the op uses.
        enters: As in `Requirement`, and so is ``releases``; for all of ``where``.
        out: Whether it has a variant that writes its results, ``<op>_out``.
        note: For people.
    """

    op: str
    collective: str
    where: tuple[str, ...] = field(converter=_words)
    group: str = "group_name"
    pads: tuple[str, ...] = field(default="", converter=_words)
    handshake: bool = False
    release: bool = False
    synchronizes: bool = False
    enters: bool = False
    releases: bool = False
    asynchronous: bool = False
    out: bool = False
    note: str = ""

    @property
    def namespace(self) -> str:
        """Where the op is defined."""
        return self.op.partition("::")[0]

    @property
    def name(self) -> str:
        """Its name there."""
        return self.op.partition("::")[2]

    @property
    def out_name(self) -> str | None:
        """The out-variant's qualified name."""
        return f"{self.op}_out" if self.out else None


def _collective(
    op: str, kind: str, where: str, *, synchronizes: bool = True, **more: Any
) -> CatalogueRow:
    """One of the process group's collectives. See [Note: facts of collectives]."""
    return CatalogueRow(
        op,
        kind,
        where,
        synchronizes=synchronizes,
        enters=True,
        releases=True,
        asynchronous=True,
        **more,
    )


def _functional(name: str, kind: str, where: str, **more: Any) -> CatalogueRow:
    return _collective(f"_c10d_functional::{name}", kind, where, **more)


def _autograd(name: str, kind: str, **more: Any) -> CatalogueRow:
    note = "differentiable form of the op of the same name in _c10d_functional"
    op = f"_c10d_functional_autograd::{name}"
    return _collective(op, kind, "input return", note=note, **more)


def _c10d(name: str, kind: str, where: str, *, note: str = "", **more: Any) -> CatalogueRow:
    note = note or "returns a Work; its wait ends the call"
    return _collective(f"c10d::{name}", kind, where, group="process_group", note=note, **more)


def _kernel(
    name: str, kind: str, where: str, *, handshake: bool = True, **more: Any
) -> CatalogueRow:
    """An op that synchronizes through the signal pad of all it declares.

    Without ``handshake`` it touches its own bytes before.
    """
    return CatalogueRow(
        f"symm_mem::{name}",
        kind,
        where,
        pads=where,
        handshake=handshake,
        release=True,
        synchronizes=True,
        enters=True,
        releases=True,
        **more,
    )


def _one_sided(name: str, kind: str, where: str, **more: Any) -> CatalogueRow:
    return CatalogueRow(f"symm_mem::{name}", kind, where, **more)


def _nccl(name: str, kind: str) -> CatalogueRow:
    note = "NCCL memory; synchronizes without the signal pad; out may be ordinary memory"
    return CatalogueRow(
        f"symm_mem::{name}",
        kind,
        "input",
        handshake=True,
        release=True,
        synchronizes=True,
        note=note,
    )


def _fused(name: str, kind: str, note: str) -> CatalogueRow:
    return CatalogueRow(f"symm_mem::{name}", kind, "", note=f"registers its own workspace; {note}")


_CLONES = "torch clones the input and works in place on the clone"
_NO_OUT = "no variant writes into given tensors: the result is staged"
_PAIRWISE = "each rank waits only for the ranks that send to it"
_PARTS = "parts of equal size can be written into given tensors"
_ROOT = "ranks wait for the root only; NCCL has no symmetric kernel for it"

_AG, _RS, _AR = "all-gather", "reduce-scatter", "all-reduce"
_A2A, _BC, _R = "all-to-all", "broadcast", "reduce"

#: Torch's own collectives.
COLLECTIVES: tuple[CatalogueRow, ...] = (
    _functional("all_gather_into_tensor", _AG, "input return", out=True),
    _functional("all_gather_into_tensor_out", _AG, "input out"),
    _functional("all_gather_into_tensor_coalesced", _AG, "inputs return", note=_NO_OUT),
    _functional("all_reduce", _AR, "input return", note=_CLONES),
    _functional("all_reduce_", _AR, "input"),
    _functional("all_reduce_coalesced", _AR, "inputs return", note=_CLONES),
    _functional("all_reduce_coalesced_", _AR, "inputs"),
    _functional("reduce_scatter_tensor", _RS, "input return", out=True),
    _functional("reduce_scatter_tensor_out", _RS, "input out"),
    _functional("reduce_scatter_tensor_coalesced", _RS, "inputs return", note=_NO_OUT),
    _functional(
        "all_to_all_single", _A2A, "input return", synchronizes=False, note=f"{_PAIRWISE}; {_PARTS}"
    ),
    _functional("broadcast", _BC, "input return", synchronizes=False, note=f"{_CLONES}; {_ROOT}"),
    _functional("broadcast_", _BC, "input", synchronizes=False, note=_ROOT),
    _autograd("all_gather_into_tensor", _AG),
    _autograd("reduce_scatter_tensor", _RS),
    _autograd("all_to_all_single", _A2A, synchronizes=False),
    _collective(
        "symmplan::all_to_all_single_into",
        _A2A,
        "input out",
        synchronizes=False,
        note=f"c10d::alltoall_base_; {_PAIRWISE}",
    ),
    CatalogueRow(
        "_dtensor::shard_dim_alltoall",
        _A2A,
        "",
        note="uses its own buffers: nothing to place",
    ),
    _c10d("_allgather_base_", _AG, "output_tensor input_tensor"),
    _c10d("_reduce_scatter_base_", _RS, "output_tensor input_tensor"),
    _c10d("allgather_into_tensor_coalesced_", _AG, "outputs inputs"),
    _c10d("reduce_scatter_tensor_coalesced_", _RS, "outputs inputs"),
    _c10d("allreduce_", _AR, "tensors"),
    _c10d("allreduce_coalesced_", _AR, "tensors"),
    _c10d("alltoall_base_", _A2A, "output input", synchronizes=False, note=_PAIRWISE),
    _c10d("broadcast_", _BC, "tensors", synchronizes=False, note=_ROOT),
)

_MULTICAST = "needs NVLink multicast"
_UNORDERED = f"{_MULTICAST}; sums in no fixed order"
_POOL = f"{_MULTICAST}; takes its result from torch's own symmetric pool"
_TO_ALL = f"{_MULTICAST}; writes all peers together, synchronizes with none"
_FILLS = "fills symm_buffer before the ranks meet"
_ANY_OUT, _ANY_OUTPUT = "out may be ordinary memory", "output may be ordinary memory"
_OWN_SYNCS = "NVSHMEM; its own syncs are not relied on"
_CONTRACT = "OpenSHMEM contract: callers synchronize"
_SPLITS = "writes peers' splits before its first barrier"
_FALLBACK = "an ordinary input is copied to its own workspace; the result is ordinary memory"

#: Ops of ``torch.ops.symm_mem``.
SYMM_MEM: tuple[CatalogueRow, ...] = (
    _kernel("one_shot_all_reduce", _AR, "input", out=True),
    _kernel("one_shot_all_reduce_out", _AR, "input", note=_ANY_OUT),
    _kernel("one_shot_all_reduce_copy", _AR, "symm_buffer", handshake=False, out=True, note=_FILLS),
    _kernel(
        "one_shot_all_reduce_copy_out",
        _AR,
        "symm_buffer",
        handshake=False,
        note=f"{_FILLS}; {_ANY_OUT}",
    ),
    _kernel("two_shot_all_reduce_", _AR, "input"),
    _kernel("two_shot_all_reduce_out", _AR, "input", note=f"overwrites input; {_ANY_OUTPUT}"),
    _kernel("reduce_scatter_out", _RS, "input", note=_ANY_OUTPUT),
    _kernel("multimem_all_reduce_", _AR, "input", note=_MULTICAST),
    _kernel("multimem_one_shot_all_reduce", _AR, "input", out=True, note=_UNORDERED),
    _kernel("multimem_one_shot_all_reduce_out", _AR, "input", note=_UNORDERED),
    _kernel("multimem_one_shot_reduce_out", _R, "input", note=_UNORDERED),
    _kernel(
        "multimem_all_gather_out", _AG, "out", note=f"{_MULTICAST}; input may be ordinary memory"
    ),
    _kernel("_low_contention_all_gather", _AG, "tensor", asynchronous=True, note=_FALLBACK),
    _kernel("_low_contention_reduce_scatter", _RS, "tensor", asynchronous=True, note=_FALLBACK),
    _kernel("_low_contention_all_gather_ce_multicast", _AG, "return", out=True, note=_POOL),
    _kernel("_low_contention_all_gather_ce_multicast_out", _AG, "out", note=_MULTICAST),
    _fused("fused_all_gather_matmul", _AG, "reads A in place only with native async TP on"),
    _fused("fused_all_gather_scaled_matmul", _AG, "takes ordinary tensors"),
    _fused("fused_matmul_reduce_scatter", _RS, "takes ordinary tensors"),
    _fused("fused_scaled_matmul_reduce_scatter", _RS, "takes ordinary tensors"),
    _nccl("nccl_reduce_scatter_offset", _RS),
    _nccl("nccl_all_to_all_nd", _A2A),
    _one_sided("memcpy_to_multicast_", _BC, "symm_mem_out", note=_TO_ALL),
    _one_sided("nvshmem_broadcast", _BC, "input", note=_CONTRACT),
    _one_sided("nvshmem_all_to_all", _A2A, "input out", note=_CONTRACT),
    _one_sided(
        "all_to_all_vdev",
        _A2A,
        "input out in_splits out_splits_offsets",
        pads="out_splits_offsets",
        note=f"{_SPLITS}; only rocSHMEM uses the pad",
    ),
    _one_sided("all_to_all_vdev_2d", _A2A, "input out in_splits out_splits_offsets", note=_SPLITS),
    _one_sided(
        "all_to_all_vdev_2d_offset",
        _A2A,
        "input out in_splits_offsets out_splits_offsets",
        note=_SPLITS,
    ),
    _one_sided("tile_reduce", _R, "in_tile out_tile", note=_OWN_SYNCS),
    _one_sided("multi_root_tile_reduce", _R, "in_tiles out_tile", note=_OWN_SYNCS),
)

#: Namespaces whose every op is either catalogued or listed here.
NAMESPACES = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "c10d",
    "c10d_functional",
    "symm_mem",
)

# Only torch's deprecated entry points call them, and no ``group=`` can point at tag and ranks.
_LEGACY = "names its group by tag and ranks; forwards to _c10d_functional"
_P2P = "point to point: no transport uses symmetric memory for it"
_ROOTED = "only the root's tensors have a size, so ranks would plan differently"
_LISTS = "goes through flat buffers of its own where a transport could use symmetric memory"
_NO_GROUP = "names no group: torch takes group '0'. Declare it yourself if you wrap it"
_HANDLE = "works on a handle: what it touches is not in the graph"
_NO_BYTES = "moves no tensor between ranks"
_PEERS = "its results view peers' memory and nothing says when their last use ends"
_WAITS = "ends asynchronous collectives; what they hold is theirs"

#: Why, in which namespace, and the names there.
_LEFT_OUT = (
    (_WAITS, "_c10d_functional", "wait_tensor wait_tensors"),
    (_P2P, "_c10d_functional", "batch_p2p_ops irecv isend"),
    (_P2P, "c10d", "alltoall_ recv_ recv_any_source_ send"),
    (_NO_BYTES, "_c10d_functional", "_wrap_tensor_autograd"),
    (_NO_BYTES, "_dtensor", "mesh_get_process_group"),
    (_NO_BYTES, "c10d", "barrier check_for_nan monitored_barrier_"),
    (_NO_BYTES, "symm_mem", "_barrier"),
    (_ROOTED, "c10d", "gather_ gather_into_tensor_ scatter_"),
    (_LISTS, "c10d", "allgather_ allgather_coalesced_ reduce_scatter_"),
    ("NCCL has no symmetric kernel for it", "c10d", "reduce_"),
    (_NO_GROUP, "symm_mem", "nccl_get nccl_put nccl_put_with_signal nccl_wait_for_signal"),
    (_NO_GROUP, "symm_mem", "nvshmem_get nvshmem_put nvshmem_put_with_signal"),
    (_NO_GROUP, "symm_mem", "nvshmem_wait_for_signal"),
    (_HANDLE, "symm_mem", "_rendezvous nccl_get_out nccl_put_signal nccl_wait_signal"),
    (_HANDLE, "symm_mem", "nvshmem_get_out"),
    ("local: writes flags of one rank", "symm_mem", "memset32_ stream_write_value32_"),
    ("local: waits for flags of one rank", "symm_mem", "_async_input_mm"),
    (_PEERS, "symm_mem", "get_remote_tensors"),
    (_LEGACY, "c10d_functional", "all_gather_into_tensor all_gather_into_tensor_coalesced"),
    (_LEGACY, "c10d_functional", "all_reduce all_reduce_coalesced all_to_all_single broadcast"),
    (_LEGACY, "c10d_functional", "reduce_scatter_tensor reduce_scatter_tensor_coalesced"),
    (_LEGACY, "c10d_functional", "batch_p2p_ops irecv isend wait_tensor"),
)

#: ``{qualified name without overload: why nothing of it is declared}``
NOT_SYMMETRIC: dict[str, str] = {
    f"{namespace}::{name}": why for why, namespace, names in _LEFT_OUT for name in names.split()
}

#: What NCCL runs as sends and receives.
SENT = frozenset(row.op for row in COLLECTIVES if row.collective == _A2A) | {
    name for name, why in NOT_SYMMETRIC.items() if why in (_P2P, _ROOTED)
}
