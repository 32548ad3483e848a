"""Process groups, their works, and memory of devices.

See [Note: seams] in `symmplan.torch_private.seams`.
"""

from __future__ import annotations

import functools

from symmplan.torch_private.seams import RUNS, Seam, names

_C10D = "torch.distributed.distributed_c10d"

#: Builds of torch without process groups need none of it.
_built = functools.partial(Seam, only_with="torch._C:_c10d_init")
#: What all that runs needs of them.
_runs = functools.partial(_built, serves=RUNS)

GROUPS = _runs(
    "process groups by name",
    "correctness",
    "symmplan knows the ranks of each collective",
    targets=names(_C10D, "_resolve_process_group _get_default_group")
    + names(f"{_C10D}:_world", "pg_map pg_names")
    + names(f"{_C10D}:ProcessGroup", "group_name _get_backend unbox"),
)

STORES = _runs(
    "stores of process groups",
    "correctness",
    "ranks agree on a plan before its memory is registered",
    targets=names(_C10D, "_get_process_group_store|_get_default_store"),
)

FORKS = _built(
    "tables of process groups",
    "reporting",
    "`symmplan.testing.check_declaration` works in a process that has groups",
    ("capture",),
    names(_C10D, "_world.pg_group_ranks _update_default_pg"),
    undone="never: the process is a fork that ends with the check",
)

DEFAULT_GROUPS = _runs(
    "default groups of functional collectives",
    "reporting",
    "process groups end before the interpreter",
    targets=names("torch.distributed.nn.functional", "all_reduce"),
    undone="never: None means the same group, and holds nothing",
)

WORKS = _built(
    "works of collectives",
    "correctness",
    "a session sees when its program waits for a collective",
    ("sessions",),
    names(_C10D, "Work.boxed"),
)

WAITS = _runs(
    "waits for tensors",
    "speed",
    "symmplan's own transfers overlap with the program",
    targets=names("torch._C._distributed_c10d", "_register_work"),
)

GROUP_METHODS = _built(
    "methods of process groups",
    "correctness",
    "calls of torch.distributed in a session run in placements",
    ("sessions",),
    names(
        f"{_C10D}:ProcessGroup",
        "allreduce broadcast _allgather_base|all_gather_single "
        "_reduce_scatter_base|reduce_scatter_single",
    ),
)

COALESCED = _built(
    "one gather of several tensors",
    "correctness",
    "parameters are gathered in place",
    ("fsdp",),
    names(_C10D, "AllgatherOptions")
    + names(f"{_C10D}:ProcessGroup", "allgather_into_tensor_coalesced alltoall_base"),
)

BETWEEN_HOSTS = _runs(
    "process groups outside torch's registry",
    "correctness",
    "groups on several hosts run in two levels",
    targets=names("torch.distributed", "PrefixStore") + names(f"{_C10D}:ProcessGroup", "allgather"),
)

SYMM_MEM = _runs(
    "torch's symmetric memory",
    "correctness",
    'memory="nccl", "cuda" and "nvshmem" have segments',
    targets=names(
        "torch.distributed._symmetric_memory",
        "get_backend set_backend rendezvous is_nvshmem_available",
    )
    + names("torch._C._distributed_c10d", "_SymmetricMemory.empty_strided_p2p"),
)

WINDOWS = Seam(
    "NCCL's communicators",
    "reporting",
    'memory="nccl" leaves torch\'s symmetric memory to the program',
    RUNS,
    names(f"{_C10D}:ProcessGroupNCCL", "_comm_ptr")
    + names("torch._C", "_construct_storage_from_data_pointer"),
    only_with=f"{_C10D}:ProcessGroupNCCL",
)

POOLS = _built(
    "torch's pool of symmetric memory",
    "reporting",
    "benchmarks compare symmplan with it",
    ("fsdp",),
    names("torch.distributed._symmetric_memory", "get_mem_pool"),
)

COPY_ENGINES = Seam(
    "copy engines of NCCL",
    "speed",
    'choose="copy engine" works',
    RUNS,
    names(f"{_C10D}:ProcessGroupNCCL", "NCCL_CTA_POLICY_ZERO Options._timeout")
    + names(_C10D, "_new_process_group_helper _get_default_store PrefixStore")
    + names(f"{_C10D}:_world", "pg_group_ranks"),
    undone="the default group's device is bound again when the new group is there",
    only_with=f"{_C10D}:ProcessGroupNCCL",
)

STREAM_NUMBERS = Seam(
    "streams as numbers",
    "speed",
    "planned calls on a device take less host time",
    ("sessions",),
    names("torch._C", "_cuda_getCurrentRawStream"),
    only_with="torch._C:_cuda_getDevice",
)

WORKSPACES = _built(
    "workspaces of torch's pipelined products",
    "reporting",
    "benchmarks/compile.py compares pipelined products with them",
    ("graphs",),
    names("torch.distributed._symmetric_memory", "enable_symm_mem_for_group"),
)

ALL_TO_ALL = Seam(
    "a differentiable all-to-all",
    "reporting",
    "symmplan bench moe compares experts with it",
    ("experts",),
    names("torch.distributed._functional_collectives", "all_to_all_single_autograd wait_tensor"),
)
