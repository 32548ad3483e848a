"""The works and methods of process groups; a part of `symmplan._compat`.

[Note: groups end before the interpreter]
    Functions of torch.distributed.nn.functional have ``group=group.WORLD``, which is the default
    group if there is one when they are imported. Dynamo and FSDP2 import them, and symmplan imports
    those, for programs whose group is there by then. The functions would hold it for ever: its
    threads would run while the interpreter ends, and one that frees a tensor then aborts the
    process. None is the default group, too, and holds nothing.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


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


def register_work() -> Callable[[torch.Tensor, Any], None] | None:
    """Makes ``wait_tensor`` of a tensor wait for a work; None if this torch does not say how."""
    from torch._C import _distributed_c10d as c10d

    return getattr(c10d, "_register_work", None)


def reduction_named(name: object) -> Any:
    """The reduction with a name such as ``"sum"``; None if it has none."""
    return getattr(dist.ReduceOp, name.upper(), None) if isinstance(name, str) else None


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


def nobody_looks() -> Callable[[torch.Tensor], bool]:
    """Tells of a tensor whether an op on it may go past the dispatcher.

    Not if it is wrapped, if autograd follows it, or if a mode or a transform is active.
    """
    kinds, modes = (torch.Tensor, torch.nn.Parameter), torch._C._len_torch_dispatch_stack
    functions, graded = torch._C._len_torch_function_stack, torch.is_grad_enabled
    transforms = torch._C._functorch.peek_interpreter_stack

    def alone(tensor: torch.Tensor) -> bool:
        return (
            tensor.__class__ in kinds
            and not modes()
            and not functions()
            and transforms() is None
            and not (tensor.requires_grad and graded())
        )

    return alone


def registers_windows(group: dist.ProcessGroup) -> bool:
    """Whether NCCL can register a pool's memory as windows of ``group``."""
    register = getattr(group._get_backend(torch.device("cuda")), "register_mem_pool", None)
    return "symm" in (getattr(register, "__doc__", None) or "")


def nccl_window_allocator(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What allocates memory that a pool may register as windows of NCCL; see `registers_windows`.

    Torch asks whether the group's device can do that. Of a group that has run nothing yet it
    guesses which that is, with a warning, unless it is told.
    """
    backend: Any = group._get_backend(torch.device("cuda"))
    bound = getattr(backend, "bound_device_id", device)
    if bound is None:
        backend.bound_device_id = device
    try:
        return backend.mem_allocator
    finally:
        if bound is None:
            backend.bound_device_id = None


def register_nccl_pool(pool: Any, group: dist.ProcessGroup) -> None:
    """Register what lies in a ``torch.cuda.MemPool`` as windows. Collective."""
    backend: Any = group._get_backend(torch.device("cuda"))
    backend.register_mem_pool(pool, symm=True)


def deregister_nccl_pool(pool: Any, group: dist.ProcessGroup) -> None:
    """Take its windows back."""
    backend: Any = group._get_backend(torch.device("cuda"))
    backend.deregister_mem_pool(pool)


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


class _Finished(dist.Work):
    """The work of a collective that was over when it returned."""

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 (the interface's)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class _Watched(dist.Work):
    """The work of a collective of which somebody wants to know when it is waited for."""

    def __init__(self, work: Any, waited: Callable[[], None], written: torch.Tensor) -> None:
        super().__init__()
        self._work = work
        self._waited: Callable[[], None] | None = waited
        self._written: torch.Tensor | None = written
        self._over: torch.cuda.Event | None = None

    def wait(self, timeout: Any = None) -> bool:
        done, work = True, self._work
        if work is not None:
            done = work.wait() if timeout is None else work.wait(timeout)
            self._work = None  # it may hold its tensors for as long as it lives
            if self._written is not None and self._written.is_cuda:
                self._over = torch.cuda.Event()
                self._over.record()
        self._end()
        return done

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Its end is still to be waited for."""
        if self._over is not None:
            return bool(self._over.query())
        return self._work is None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return self._work is None or bool(self._work.is_success())

    def get_future(self) -> Any:
        """A future. Who waits for it cannot be seen."""
        work = self._work
        if work is not None:
            self.wait()
            return work.get_future()
        future: Any = torch.futures.Future()
        future.set_result([self._written])
        self._waited = None
        return future

    def _end(self) -> None:
        waited, self._waited, self._written = self._waited, None, None
        if waited is not None:
            waited()


def watched_work(work: Any, waited: Callable[[], None], written: torch.Tensor) -> tuple[Any, Any]:
    """A work whose first wait is told.

    Args:
        work: The real one; None if it is over.
        waited: Called after the first wait for it.
        written: The tensor that the collective writes.

    Returns:
        It, to be kept as long as the program may get hold of it, and its box.
    """
    handle = watched_handle(work, waited, written)
    return handle, handle.boxed()


def watched_handle(work: Any, waited: Callable[[], None], written: torch.Tensor) -> Any:
    """The same, for who does not need the box."""
    return _Watched(work, waited, written)


@functools.cache
def finished() -> Any:
    """A work that is over. One for all, as a box does not keep its Python half."""
    return _Finished()


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
