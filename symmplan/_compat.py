"""Private torch names, in one place, found by looking for the feature and never by version.

Whoever needs another one adds it here: a function with a public-looking name, that says what it
returns where the feature is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

__all__ = [
    "finished_work",
    "fsdp_comm_bases",
    "fsdp_comms",
    "fsdp_param_groups",
    "group_by_name",
    "group_name",
    "group_store",
    "has_nccl_backend",
    "has_process_groups",
    "in_backward",
    "keyset_after_select",
    "reduction_name",
    "set_symm_mem_backend",
    "storage_use_count",
    "symm_mem_backend",
    "symm_mem_empty",
    "symm_mem_rendezvous",
    "unboxed_group",
    "world_name",
]


def has_process_groups() -> bool:
    """Whether torch.distributed exists and has a default process group."""
    return dist.is_available() and dist.is_initialized()


def group_by_name(name: str) -> ProcessGroup:
    """The process group that torch registered under ``name``.

    Raises:
        LookupError: There is none.
    """
    from torch.distributed import distributed_c10d as c10d

    try:
        resolve: Any = getattr(c10d, "_resolve_process_group")  # noqa: B009 (not exported)
        group: ProcessGroup = resolve(name)
    except (LookupError, RuntimeError, ValueError) as error:
        raise LookupError(name) from error
    return group


def group_name(group: ProcessGroup) -> str:
    """The name under which torch registered ``group``; equal on all its ranks."""
    return str(group.group_name)


def world_name() -> str:
    """The name of the default process group."""
    group = dist.group.WORLD
    assert group is not None
    return group_name(group)


def group_store(group: ProcessGroup) -> Store:
    """The key-value store of ``group``, with the group's own prefix."""
    from torch.distributed import distributed_c10d as c10d

    if hasattr(c10d, "_get_process_group_store"):
        return c10d._get_process_group_store(group)
    default: Any = c10d._get_default_store()
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(f"symmplan/{group_name(group)}", default)


def has_nccl_backend(group: ProcessGroup) -> bool:
    """Whether CUDA collectives of ``group`` go through NCCL."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # the group has no backend for CUDA
        return False
    return type(backend).__name__ == "ProcessGroupNCCL"


def symm_mem_backend(device: torch.device) -> str | None:
    """Which allocator torch's symmetric memory uses for ``device``; None if it has none."""
    from torch.distributed import _symmetric_memory as symm_mem

    return symm_mem.get_backend(device)


def set_symm_mem_backend(name: str) -> None:
    """Choose the allocator of torch's symmetric memory for the whole process.

    Raises:
        RuntimeError: This build has no such allocator, or another one is in use.
    """
    from torch.distributed import _symmetric_memory as symm_mem

    symm_mem.set_backend(name)  # type: ignore[arg-type]


def symm_mem_empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """An own allocation of ``nbytes`` bytes of symmetric memory.

    ``_symmetric_memory.empty`` would take it from a caching pool, from which ranks may be served
    different old blocks; this asks the allocator itself.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


def symm_mem_rendezvous(tensor: torch.Tensor, group: str) -> Any:
    """Torch's handle for ``tensor`` in ``group``. Collective."""
    from torch.distributed import _symmetric_memory as symm_mem

    return symm_mem.rendezvous(tensor, group)  # type: ignore[arg-type]


def in_backward() -> bool:
    """Whether autograd runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def fsdp_param_groups(module: Any) -> list[Any]:
    """The parameter groups that FSDP2 manages for ``module``, an ``FSDPModule``."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13 and later: may be several
    if groups is None:
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)


def fsdp_comms(group: Any) -> tuple[Any, Any]:
    """The all-gather and reduce-scatter objects of an FSDP2 parameter group.

    Torch's defaults where this torch does not say.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    gather = getattr(group, "_all_gather_comm", None) or collectives.DefaultAllGather()
    scatter = getattr(group, "_reduce_scatter_comm", None) or collectives.DefaultReduceScatter()
    return gather, scatter


def fsdp_comm_bases() -> tuple[type, type]:
    """FSDP2's interfaces ``(AllGather, ReduceScatter)`` for custom collectives.

    Plain classes where this torch has them elsewhere: FSDP2 only calls their methods.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    except ImportError:
        return object, object
    return AllGather, ReduceScatter


def unboxed_group(given: Any) -> Any:
    """The process group in what the dispatcher passes to kernels in Python."""
    if isinstance(given, torch.ScriptObject):
        return dist.ProcessGroup.unbox(given)
    return given


def reduction_name(given: Any) -> str | None:
    """``"sum"``, ``"max"``, ... of a boxed or plain ``ReduceOp``; None for a scaled one."""
    boxed: Any = given
    op: Any = boxed.op() if isinstance(given, torch.ScriptObject) else given
    plain = dist.ReduceOp.RedOpType
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR"):
        if op in (getattr(plain, name), getattr(plain, name).value):
            return name.lower()
    return None


def storage_use_count(storage: int) -> int:
    """How many references there are to the storage whose ``_cdata`` is ``storage``."""
    return int(torch._C._storage_Use_Count(storage))


def keyset_after_select() -> Any:
    """The dispatch keys that come after BackendSelect: those of the kernels themselves."""
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class _Finished(dist.Work):
    """The work of a collective that was over when it returned."""

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 (the interface's)
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """It was."""
        return True


#: One for all: a box does not keep its Python half, and it has no state.
_FINISHED: list[Any] = []


def finished_work() -> Any:
    """A work that is over, boxed as kernels in Python return it."""
    if not _FINISHED:
        work = _Finished()
        _FINISHED.extend((work, work.boxed()))
    return _FINISHED[1]
