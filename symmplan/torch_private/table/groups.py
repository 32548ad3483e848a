"""Process groups, their works, and memory of devices.

See [Note: seams] in `symmplan.torch_private.seams`.
"""

from __future__ import annotations

from symmplan.torch_private.seams import RUNS, Seam, names

_C10D = "torch.distributed.distributed_c10d"

#: Builds of torch without process groups need none of it.
_BUILT = "torch._C:_c10d_init"

GROUPS = Seam(
    "process groups by name",
    "correctness",
    "over which ranks a collective runs",
    RUNS,
    names(_C10D, "_resolve_process_group _get_default_group")
    + names(f"{_C10D}:_world", "pg_map pg_names")
    + names(f"{_C10D}:ProcessGroup", "group_name _get_backend unbox"),
    only_with=_BUILT,
)

STORES = Seam(
    "stores of process groups",
    "correctness",
    "that ranks agree on a plan before its memory is registered",
    RUNS,
    names(_C10D, "_get_process_group_store|_get_default_store"),
    only_with=_BUILT,
)

FORKS = Seam(
    "tables of process groups",
    "reporting",
    "`symmplan.testing.check_declaration` in a process that has groups",
    ("capture",),
    names(_C10D, "_world.pg_group_ranks _update_default_pg"),
    undone="never: the process is a fork that ends with the check",
    only_with=_BUILT,
)

DEFAULT_GROUPS = Seam(
    "default groups of functional collectives",
    "reporting",
    "that process groups end before the interpreter",
    RUNS,
    names("torch.distributed.nn.functional", "all_reduce"),
    undone="never: None means the same group, and holds nothing",
    only_with=_BUILT,
)

WORKS = Seam(
    "works of collectives",
    "correctness",
    "that a session sees when its program waits for a collective",
    ("sessions",),
    names(_C10D, "Work.boxed"),
    only_with=_BUILT,
)

WAITS = Seam(
    "waits for tensors",
    "speed",
    "that symmplan's own transfers run while the program goes on",
    RUNS,
    names("torch._C._distributed_c10d", "_register_work"),
    only_with=_BUILT,
)

GROUP_METHODS = Seam(
    "methods of process groups",
    "correctness",
    "that what a session's program asks of torch.distributed runs in its placements",
    ("sessions",),
    names(
        f"{_C10D}:ProcessGroup",
        "allreduce broadcast _allgather_base|all_gather_single "
        "_reduce_scatter_base|reduce_scatter_single",
    ),
    only_with=_BUILT,
)

COALESCED = Seam(
    "one gather of several tensors",
    "correctness",
    "that parameters are gathered where they lie",
    ("fsdp",),
    names(_C10D, "AllgatherOptions")
    + names(
        f"{_C10D}:ProcessGroup",
        "allgather_into_tensor_coalesced alltoall_base",
    ),
    only_with=_BUILT,
)

BETWEEN_HOSTS = Seam(
    "a process group that torch does not know",
    "correctness",
    "that groups on several hosts are served",
    RUNS,
    names("torch.distributed", "PrefixStore") + names(f"{_C10D}:ProcessGroup", "allgather"),
    only_with=_BUILT,
)

SYMM_MEM = Seam(
    "torch's symmetric memory",
    "correctness",
    'segments of memory="nccl", "cuda" and "nvshmem"',
    RUNS,
    names(
        "torch.distributed._symmetric_memory",
        "get_backend set_backend rendezvous is_nvshmem_available",
    )
    + names("torch._C._distributed_c10d", "_SymmetricMemory.empty_strided_p2p"),
    only_with=_BUILT,
)

POOLS = Seam(
    "torch's pool of symmetric memory",
    "reporting",
    "the sides of benchmarks that symmplan is compared with",
    ("fsdp",),
    names("torch.distributed._symmetric_memory", "get_mem_pool"),
    only_with=_BUILT,
)

COPY_ENGINES = Seam(
    "copy engines of NCCL",
    "speed",
    'choose="copy engine"',
    RUNS,
    names(f"{_C10D}:ProcessGroupNCCL", "NCCL_CTA_POLICY_ZERO Options._timeout"),
    undone="the default group's device is bound again when the new group is there",
    only_with=f"{_C10D}:ProcessGroupNCCL",
)

STREAM_NUMBERS = Seam(
    "streams as numbers",
    "speed",
    "host time of each planned call on a device",
    ("sessions",),
    names("torch._C", "_cuda_getCurrentRawStream"),
    only_with="torch._C:_cuda_getDevice",
)

WORKSPACES = Seam(
    "workspaces of torch's pipelined products",
    "reporting",
    "what pipelined products are compared with by symmplan bench compile",
    ("graphs",),
    names("torch.distributed._symmetric_memory", "enable_symm_mem_for_group"),
    only_with=_BUILT,
)

ALL_TO_ALL = Seam(
    "a differentiable all-to-all",
    "reporting",
    "what experts are compared with by symmplan bench moe",
    ("experts",),
    names("torch.distributed._functional_collectives", "all_to_all_single_autograd"),
)
