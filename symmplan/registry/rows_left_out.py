"""The catalogue as data: ops of the same namespaces that it leaves out, each with the reason."""

from __future__ import annotations

__all__ = ["LEGACY_NAMESPACE", "NAMESPACES", "NOT_SYMMETRIC"]

#: Namespaces whose every op is either catalogued or listed here.
NAMESPACES = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "c10d",
    "c10d_functional",
    "symm_mem",
)

#: Names its group by tag and list of ranks, which no ``group=`` can point at. Its ops forward to
#: ``_c10d_functional`` and only torch's deprecated entry points call them.
LEGACY_NAMESPACE = "c10d_functional"

_LEGACY = "names its group by tag and ranks; forwards to _c10d_functional"
_P2P = "point to point: no transport uses symmetric memory for it"
_ROOTED = "only the root's tensors have a size, so ranks would plan differently"
_LISTS = "goes through flat buffers of its own where a transport could use symmetric memory"
_NO_GROUP = "names no group: torch takes group '0'. Declare it yourself if you wrap it"
_HANDLE = "works on a handle: what it touches is not in the graph"
_NO_BYTES = "moves no tensor between ranks"
_WAITS = "ends asynchronous collectives; what they hold is theirs"

_BY_REASON = {
    _WAITS: ("_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors"),
    _P2P: (
        "_c10d_functional::batch_p2p_ops",
        "_c10d_functional::irecv",
        "_c10d_functional::isend",
        "c10d::alltoall_",
        "c10d::recv_",
        "c10d::recv_any_source_",
        "c10d::send",
    ),
    _NO_BYTES: (
        "_c10d_functional::_wrap_tensor_autograd",
        "_dtensor::mesh_get_process_group",
        "c10d::barrier",
        "c10d::check_for_nan",
        "c10d::monitored_barrier_",
        "symm_mem::_barrier",
    ),
    _ROOTED: ("c10d::gather_", "c10d::gather_into_tensor_", "c10d::scatter_"),
    _LISTS: (
        "c10d::allgather_",
        "c10d::allgather_coalesced_",
        "c10d::reduce_scatter_",
    ),
    "NCCL has no symmetric kernel for it": ("c10d::reduce_",),
    _NO_GROUP: (
        "symm_mem::nccl_get",
        "symm_mem::nccl_put",
        "symm_mem::nccl_put_with_signal",
        "symm_mem::nccl_wait_for_signal",
        "symm_mem::nvshmem_get",
        "symm_mem::nvshmem_put",
        "symm_mem::nvshmem_put_with_signal",
        "symm_mem::nvshmem_wait_for_signal",
    ),
    _HANDLE: (
        "symm_mem::_rendezvous",
        "symm_mem::nccl_get_out",
        "symm_mem::nccl_put_signal",
        "symm_mem::nccl_wait_signal",
        "symm_mem::nvshmem_get_out",
    ),
    "local: writes flags of one rank": (
        "symm_mem::memset32_",
        "symm_mem::stream_write_value32_",
    ),
    "local: waits for flags of one rank": ("symm_mem::_async_input_mm",),
    "its results view peers' memory and nothing says when their last use ends": (
        "symm_mem::get_remote_tensors",
    ),
    _LEGACY: tuple(
        f"{LEGACY_NAMESPACE}::{name}"
        for name in (
            "all_gather_into_tensor",
            "all_gather_into_tensor_coalesced",
            "all_reduce",
            "all_reduce_coalesced",
            "all_to_all_single",
            "batch_p2p_ops",
            "broadcast",
            "irecv",
            "isend",
            "reduce_scatter_tensor",
            "reduce_scatter_tensor_coalesced",
            "wait_tensor",
        )
    ),
}

#: ``{qualified name without overload: why nothing of it is declared}``
NOT_SYMMETRIC: dict[str, str] = {op: reason for reason, ops in _BY_REASON.items() for op in ops}
