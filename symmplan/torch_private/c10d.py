"""Process groups: their names, stores, backends, options and methods.

[Note: groups end before the interpreter]
    Functions of torch.distributed.nn.functional have ``group=group.WORLD``, which is the default
    group if there is one when they are imported. Dynamo and FSDP2 import them, and symmplan imports
    those, for programs whose group is there by then. The functions would hold it for ever: its
    threads would run while the interpreter ends, and one that frees a tensor then aborts the
    process. None is the default group, too, and holds nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

c10d: Any = dist.distributed_c10d


def _import_functions() -> None:
    """Import them, unless the program did. See [Note: groups end before the interpreter]."""
    name = "torch.distributed.nn.functional"
    if name in sys.modules or not dist.is_available():
        return
    for function in vars(importlib.import_module(name)).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            given = function.__defaults__
            kept = (None if isinstance(v, dist.ProcessGroup) else v for v in given)
            function.__defaults__ = tuple(kept)


_import_functions()


def has_process_groups() -> bool:
    """Whether torch.distributed exists and has a default process group."""
    return dist.is_available() and dist.is_initialized()


def world() -> tuple[int, int]:
    """This process's rank in the default process group, and how many ranks that has."""
    return dist.get_rank(), dist.get_world_size()


def world_name() -> str:
    """The name of the default process group."""
    group = dist.group.WORLD
    assert group is not None
    return group_name(group)


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


def group_name(group: ProcessGroup) -> str:
    """The name under which torch registered ``group``; equal on all its ranks."""
    return str(group.group_name)


def group_ranks(name: str) -> list[int]:
    """The ranks of a group in the default process group, in the group's order."""
    return [int(rank) for rank in dist.get_process_group_ranks(group_by_name(name))]


def is_registered(group: ProcessGroup) -> bool:
    """Whether torch still knows ``group``; not once it was destroyed, whatever has its name now."""
    known = getattr(c10d._world, "pg_map", None)
    if known is not None:
        return group in known
    try:
        return group_by_name(group_name(group)) is group
    except LookupError:
        return False


def known_groups() -> int:
    """How many process groups this rank has been in: torch names new ones by it."""
    return len(c10d._world.pg_names)


def group_store(group: ProcessGroup) -> Store:
    """The key-value store of ``group``, with the group's own prefix."""
    store: Store
    if hasattr(c10d, "_get_process_group_store"):
        store = c10d._get_process_group_store(group)
    else:
        store = c10d.PrefixStore(f"symmplan/{group_name(group)}", c10d._get_default_store())
    return store


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


def abort_group(group: Any) -> None:
    """End what waits in ``group``'s communicators; it cannot be used any more.

    Does nothing where the group cannot be aborted (gloo), or this torch has no way.
    """
    abort = getattr(group, "abort", None)
    if abort is not None:
        with contextlib.suppress(RuntimeError):
            abort()


def forget_groups() -> object:
    """Be as if there were no process groups, in a process that was forked from one with some.

    Returns:
        The groups. Their threads are not here, so nobody may destroy them: keep this.
    """
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks)
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    c10d._update_default_pg(None)
    return kept


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


def reduction_named(name: object) -> Any:
    """The reduction with a name such as ``"sum"``; None if it has none."""
    return getattr(dist.ReduceOp, name.upper(), None) if isinstance(name, str) else None


def premul_factor(op: Any) -> float | None:
    """The factor of a sum that multiplies first (``PREMUL_SUM``); None if ``op`` is none."""
    if op != dist.ReduceOp.PREMUL_SUM:
        return None
    state = op.__getstate__()
    factor = state[1] if isinstance(state, tuple) and len(state) == 2 else None
    return factor if isinstance(factor, float) else None


#: The method of a group -> the class of its last argument.
_GROUP_OPTIONS = {
    "allreduce": "AllreduceOptions",
    "broadcast": "BroadcastOptions",
    "_allgather_base": "AllgatherOptions",
    "_reduce_scatter_base": "ReduceScatterOptions",
}


#: The functional collective that writes a given tensor -> the method of a group that it calls.
GROUP_METHODS = {
    "all_reduce_": "allreduce",
    "broadcast_": "broadcast",
    "all_gather_into_tensor_out": "_allgather_base",
    "reduce_scatter_tensor_out": "_reduce_scatter_base",
}


def group_options(method: str) -> Any:
    """The class of the options of a process group's method."""
    return getattr(dist.distributed_c10d, _GROUP_OPTIONS[method])


def collective_options(name: str, *, reduction: object, root: object) -> tuple[str, Any] | None:
    """What a functional collective asks of its group.

    Args:
        name: The collective's.
        reduction: The reduction's name, where there is one.
        root: The root's rank in the group, where there is one.

    Returns:
        The method's name and its options; None if this is not known.
    """
    method = GROUP_METHODS.get(name)
    if method is None:
        return None
    options: Any = group_options(method)()
    options.asyncOp = True
    if method in ("allreduce", "_reduce_scatter_base"):
        options.reduceOp = reduction_named(reduction)
        if options.reduceOp is None:
            return None
    if method == "broadcast":
        options.rootRank, options.rootTensor = root, 0
    return method, options


#: What newer torch calls the same.
_ALSO = {"_allgather_base": "all_gather_single", "_reduce_scatter_base": "reduce_scatter_single"}


def group_method_names(method: str) -> list[str]:
    """The names by which Python calls a method of process groups, on this torch."""
    names = (method, _ALSO.get(method, method))
    return [name for name in dict.fromkeys(names) if name in vars(dist.ProcessGroup)]


def replace_group_method(
    name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Put ``make(original)`` in the place of a method of all process groups.

    Returns:
        What undoes it. If somebody else replaced the method since, it stays.
    """
    return _replace(dist.ProcessGroup, name, make(getattr(dist.ProcessGroup, name)))


def replace_op_call(
    op: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> list[Callable[[], None]]:
    """Put ``make(original)`` in the place of what Python calls when it calls an op.

    Args:
        op: An overload; also its packet, if it has no other.
        make: Of what is called so far.

    Returns:
        What undoes it, as above; nothing where this torch calls something else.
    """
    packet = op.overloadpacket
    owners = [op, packet] if packet.overloads() == [op._overloadname] else [op]
    return [_replace(o, "_op", make(o._op)) for o in owners if vars(o).get("_op") is not None]


def _replace(owner: Any, name: str, ours: Any) -> Callable[[], None]:
    original = vars(owner)[name]  # what binds; the attribute is what is bound
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner)[name] is ours:
            setattr(owner, name, original)

    return undo


def all_gather_coalesced(outputs: list[Any], inputs: list[Any], group: Any) -> None:
    """One all-gather of several tensors, in one launch; on the current stream. Collective."""
    options = c10d.AllgatherOptions()
    options.asyncOp = False
    work = group.allgather_into_tensor_coalesced(outputs, inputs, options)
    if work is not None:
        work.wait()


def all_to_all(output: Any, source: Any, group: Any) -> None:
    """Equal parts to and from every rank, on the current stream. Collective.

    As ``dist.all_to_all_single``, without its logging, which costs more than the launch.
    """
    work = start_all_to_all(output, source, group, asynchronous=False)
    if work is not None:
        work.wait()


def start_all_to_all(output: Any, source: Any, group: Any, *, asynchronous: bool = True) -> Any:
    """The same without the wait; returns the work. Collective."""
    options = dist.AllToAllOptions()
    options.asyncOp = asynchronous
    return group.alltoall_base(output, source, [], [], options)
