"""Private torch names, in one place, found by looking for the feature and never by version.

Whoever needs another one adds it here: a function with a public-looking name, that says what it
returns where the feature is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor

from symmplan._compat_c10d import (  # noqa: F401 (one name for both, for who asks)
    GROUP_METHODS,
    all_to_all,
    collective_options,
    deregister_nccl_pool,
    finished,
    group_method_names,
    group_options,
    nccl_window_allocator,
    nobody_looks,
    reduction_named,
    register_nccl_pool,
    register_work,
    registers_windows,
    replace_group_method,
    replace_op_call,
    start_all_to_all,
    watched_handle,
    watched_work,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    from symmplan.errors import SymmplanError

c10d: Any = dist.distributed_c10d


def has_process_groups() -> bool:
    """Whether torch.distributed exists and has a default process group."""
    return dist.is_available() and dist.is_initialized()


def group_by_name(name: str) -> ProcessGroup:
    """The process group that torch registered under ``name``.

    Raises:
        LookupError: There is none.
    """
    try:
        group: ProcessGroup = c10d._resolve_process_group(name)
    except (LookupError, RuntimeError, ValueError) as error:
        raise LookupError(name) from error
    return group


def is_registered(group: ProcessGroup) -> bool:
    """Whether torch still knows ``group``; not once it was destroyed, whatever has its name now."""
    known = getattr(c10d._world, "pg_map", None)
    if known is not None:
        return group in known
    try:
        return group_by_name(group_name(group)) is group
    except LookupError:
        return False


def group_name(group: ProcessGroup) -> str:
    """The name under which torch registered ``group``; equal on all its ranks."""
    return str(group.group_name)


def outside_graphs(fn: Any) -> Any:
    """A function that compilers do not look into: a graph ends before it."""
    return torch._disable_dynamo(fn)  # type: ignore[attr-defined]


def dispatch_key(name: str) -> Any:
    """One of the dispatcher's keys."""
    return getattr(torch._C.DispatchKey, name)


def is_floor_division(expr: Any) -> bool:
    """Whether an expression of sizes is a quotient that is rounded down."""
    from torch.utils._sympy.functions import FloorDiv

    return isinstance(expr, FloorDiv)


def wraps_tensors(kind: Any) -> bool:
    """Whether tensors of this class are made of others, on which their ops run."""
    plain = torch.Tensor.__torch_dispatch__
    return kind.__torch_dispatch__ is not plain and not issubclass(kind, FakeTensor)


def world_name() -> str:
    """The name of the default process group."""
    group = dist.group.WORLD
    assert group is not None
    return group_name(group)


def group_ranks(name: str) -> list[int]:
    """The ranks of a group in the default process group, in the group's order."""
    return [int(rank) for rank in dist.get_process_group_ranks(group_by_name(name))]


def world() -> tuple[int, int]:
    """This process's rank in the default process group, and how many ranks that has."""
    return dist.get_rank(), dist.get_world_size()


def group_store(group: ProcessGroup) -> Store:
    """The key-value store of ``group``, with the group's own prefix."""
    store: Store
    if hasattr(c10d, "_get_process_group_store"):
        store = c10d._get_process_group_store(group)
    else:
        store = c10d.PrefixStore(f"symmplan/{group_name(group)}", c10d._get_default_store())
    return store


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


def symm_mem_pool(device: torch.device) -> Any:
    """Torch's caching pool of symmetric memory."""
    from torch.distributed import _symmetric_memory as symm_mem

    return symm_mem.get_mem_pool(device)


def symm_mem_rendezvous(tensor: torch.Tensor, group: str) -> Any:
    """Torch's handle for ``tensor`` in ``group``. Collective."""
    from torch.distributed import _symmetric_memory as symm_mem

    return symm_mem.rendezvous(tensor, group)  # type: ignore[arg-type]


def in_backward() -> bool:
    """Whether autograd runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def has_copy_engine_policy() -> bool:
    """Whether a communicator of NCCL can be asked to use copy engines."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    return (
        hasattr(nccl, "NCCL_CTA_POLICY_ZERO")
        and hasattr(getattr(nccl, "NCCLConfig", None), "cta_policy")
        # The library may be older than the one that torch was built with.
        and torch.cuda.nccl.version() >= (2, 28)
    )


def abort_group(group: Any) -> None:
    """End what waits in ``group``'s communicators; it cannot be used any more.

    Does nothing where the group cannot be aborted (gloo), or this torch has no way.
    """
    abort = getattr(group, "abort", None)
    if abort is not None:
        with contextlib.suppress(RuntimeError):
            abort()


def raise_in_thread(thread: int, error: SymmplanError | None) -> None:
    """Let a thread raise ``error`` when it next runs Python code; None takes that back.

    Args:
        thread: As `threading.get_ident` gives it.
        error: What to raise. It is made anew there, from its values.
    """
    kind: Any = None
    if error is not None:
        base = type(error)
        values = {"expected": error.expected, "got": error.got, "fix": error.fix, **error.fields}

        def build(self: Any) -> None:
            base.__init__(self, error.what, group=error.group, rank=error.rank, **values)

        kind = type(base.__name__, (base,), {"__init__": build, "__module__": base.__module__})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if kind is None else ctypes.py_object(kind)
    )


def current_stream_of(device: torch.device) -> Callable[[], int]:
    """A cheap way to ask for the current stream of a CUDA device, as a number."""
    index = torch.cuda.current_device() if device.index is None else device.index
    get = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if get is None:
        return lambda: int(torch.cuda.current_stream(index).cuda_stream)
    return functools.partial(get, index)


def copy_engine_options() -> Any:
    """Options of an NCCL communicator that uses copy engines; see `has_copy_engine_policy`."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    return options


def copy_engine_group(like: Any, what: str) -> Any:
    """An NCCL communicator of the same ranks that uses copy engines. Collective, over ``like``.

    Where `has_copy_engine_policy`. On all ranks `known_groups` must be the same.
    """
    options = copy_engine_options()
    options._timeout = like._get_backend(torch.device("cuda")).options._timeout
    # Where a device is bound, torch would split the world's communicator, for which it needs all
    # ranks of the world.
    world = c10d._get_default_group()
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        return dist.new_group(
            dist.get_process_group_ranks(like),
            timeout=options._timeout,
            backend="nccl",
            pg_options=options,
            use_local_synchronization=True,
            group_desc=what,
        )
    finally:
        world.bound_device_id = bound


def known_groups() -> int:
    """How many process groups this rank has been in: torch names new ones by it."""
    return len(c10d._world.pg_names)


def premul_factor(op: Any) -> float | None:
    """The factor of a sum that multiplies first (``PREMUL_SUM``); None if ``op`` is none."""
    if op != dist.ReduceOp.PREMUL_SUM:
        return None
    state = op.__getstate__()
    factor = state[1] if isinstance(state, tuple) and len(state) == 2 else None
    return factor if isinstance(factor, float) else None


def all_gather_coalesced(outputs: list[Any], inputs: list[Any], group: Any) -> None:
    """One all-gather of several tensors, in one launch; on the current stream. Collective."""
    options = c10d.AllgatherOptions()
    options.asyncOp = False
    work = group.allgather_into_tensor_coalesced(outputs, inputs, options)
    if work is not None:
        work.wait()


def unboxed_group(given: Any) -> Any:
    """The process group in what the dispatcher passes; None if a box holds something else."""
    if not isinstance(given, torch.ScriptObject):
        return given
    try:
        return dist.ProcessGroup.unbox(given)
    except (RuntimeError, TypeError):
        return None


def reduction_name(given: Any) -> str | None:
    """``"sum"``, ``"max"``, ... of a boxed or plain ``ReduceOp``; None for a scaled one."""
    boxed: Any = given
    op: Any = boxed.op() if isinstance(given, torch.ScriptObject) else given
    plain = dist.ReduceOp.RedOpType
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR"):
        if op in (getattr(plain, name), getattr(plain, name).value):
            return name.lower()
    return None


#: How many references there are to the storage whose ``_cdata`` is given. Called several times in
#: every declared call of an eager session, so nothing is around it.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count


#: Whether a profile is being made, of this thread; called in every one-sided collective.
is_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)


def shown(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context that has ``name`` in a profile, if one is being made."""
    return torch.profiler.record_function(name) if is_profiled() else contextlib.nullcontext()


def dispatch_modes() -> int:
    """How many dispatch modes are active in this thread."""
    return torch._C._len_torch_dispatch_stack()


def redispatch_of(op: Any) -> Callable[..., Any]:
    """``op.redispatch``, without the Python around it."""
    handle: Any = getattr(op, "_handle", None)
    if getattr(op, "_pyobj_dispatcher", None) is None and hasattr(handle, "redispatch_boxed"):
        return handle.redispatch_boxed  # type: ignore[no-any-return]
    return op.redispatch  # type: ignore[no-any-return]


def keyset_below_modes(op: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The dispatch keys of ``op``'s kernel for ``tensors``, behind all modes."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    if tensors:
        keys = functools.reduce(lambda a, b: a | b, map(torch._C._dispatch_keys, tensors))
    keys = keys & keyset_after_select()
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.BackendSelect):
        keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    return keys


def no_modes() -> Any:
    """A context in which no dispatch mode is active."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def compiled_frame() -> int | None:
    """A number of the code that Dynamo is compiling, the same whenever it is compiled again."""
    context = getattr(torch._guards, "CompileContext", None)
    compile_id = None if context is None else context.current_compile_id()
    return getattr(compile_id, "frame_id", None)


def has_connection(store: Any) -> bool:
    """Whether a store talks to its server over a connection, so that a clone has its own."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return type(store).__name__ == "TCPStore" and hasattr(store, "clone")


def group_backend(name: str, device: torch.device) -> Any:
    """What launches a group's collectives for ``device``; None if its methods are somebody else's.

    Args:
        name: The group's.
        device: Where the tensors lie.
    """
    try:
        group = group_by_name(name)
        if type(group) is not dist.ProcessGroup:
            return None
        return group._get_backend(device)
    except (LookupError, RuntimeError):
        return None


def keyset_after_select() -> Any:
    """The dispatch keys that come after BackendSelect: those of the kernels themselves."""
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def same_version(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Writes to ``tensor`` inside do not count as changes for autograd."""
    from torch.autograd import grad_mode

    if tensor.is_inference():  # it has no version
        return contextlib.nullcontext()
    preserve: Any = grad_mode._unsafe_preserve_version_counter
    guard: contextlib.AbstractContextManager[Any] = preserve(tensor)
    return guard
