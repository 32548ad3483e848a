"""Process groups: their names, stores, backends, options and methods.

[Note: groups end before the interpreter]
    Functions of torch.distributed.nn.functional have ``group=group.WORLD``, which is the default
    group if there is one when they are imported. Dynamo and FSDP2 import them, and symmplan imports
    both, often after the program has made its group. The functions would then hold the
    group for ever: its threads would run while the interpreter ends, and one that frees a tensor
    aborts the process. None is the default group, too, and holds nothing.
"""

from __future__ import annotations

import datetime as dt
import functools
import importlib
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    return ranks_of(group_by_name(name))


def ranks_of(group: ProcessGroup) -> list[int]:
    """Its ranks in the default process group, in its order."""
    return [int(rank) for rank in dist.get_process_group_ranks(group)]


def is_registered(group: ProcessGroup) -> bool:
    """Whether torch still knows ``group``; not once it was destroyed, whatever has its name now."""
    known = getattr(c10d._world, "pg_map", None)
    if known is not None:
        return group in known
    try:
        return group_by_name(group_name(group)) is group
    except LookupError:
        return False


def new_group(
    name: str,
    ranks: Sequence[int],
    number: int,
    backend: str,
    timeout: dt.timedelta,
    what: str,
    options: Any = None,
) -> ProcessGroup:
    """A process group that has a name which others had before it. Collective, over ``ranks``.

    `torch.distributed.new_group` names groups by how many there are, which may differ from rank to
    rank; and what a former group of that name has told its ranks in the store stays there. So each
    has a place of its own in the store.

    Args:
        name: The name.
        ranks: Global ranks.
        number: The same on all of them, and larger than that of any former group of the name.
        backend: Name of torch's backend.
        timeout: Of its collectives.
        what: Its description.
        options: Of the backend.
    """
    ranks = sorted(ranks)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        c10d.PrefixStore(f"symmplan {number}", c10d._get_default_store()),
        name,
        backend_options=options,
        timeout=timeout,
        group_desc=what,
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    made: ProcessGroup = group
    return made


def group_store(group: ProcessGroup) -> Store:
    """The key-value store of ``group``, with the group's own prefix."""
    store: Store
    if hasattr(c10d, "_get_process_group_store"):
        store = c10d._get_process_group_store(group)
    else:
        store = c10d.PrefixStore(f"symmplan/{group_name(group)}", c10d._get_default_store())
    return store


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


@functools.cache
def _reduction_names() -> dict[int, str]:
    """The names of plain reductions, by what a box gives for them."""
    names = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")
    return {getattr(dist.ReduceOp.RedOpType, name).value: name.lower() for name in names}


def boxed_reduction(box: Any) -> str | None:
    """``"sum"``, ``"max"``, ... of the ``ReduceOp`` in a box; None for a scaled one."""
    return _reduction_names().get(box.op())


def boxed_group(box: Any) -> str:
    """The name of the process group in a box."""
    return str(dist.ProcessGroup.unbox(box).group_name)


def premul_factor(op: Any) -> float | None:
    """The factor of a sum that multiplies first (``PREMUL_SUM``); None if ``op`` is none."""
    if op != dist.ReduceOp.PREMUL_SUM:
        return None
    state = op.__getstate__()
    factor = state[1] if isinstance(state, tuple) and len(state) == 2 else None
    return factor if isinstance(factor, float) else None


#: The functional collective that writes a given tensor -> the method of a group that does that,
#: what newer torch calls it, and the class of its options.
_METHODS = {
    "all_reduce_": ("allreduce", "allreduce", "AllreduceOptions"),
    "broadcast_": ("broadcast", "broadcast", "BroadcastOptions"),
    "all_gather_into_tensor_out": ("_allgather_base", "all_gather_single", "AllgatherOptions"),
    "reduce_scatter_tensor_out": (
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "ReduceScatterOptions",
    ),
}


def starter_of(op: Any, given: Mapping[str, Any], *, asynchronous: bool) -> Callable[..., Any]:
    """A function that makes a functional collective and returns a work, as torch.distributed does.

    Args:
        op: The collective, of those that write a given tensor.
        given: Its arguments by name; its tensors do not count.
        asynchronous: Whether it may run on a stream of the group's.

    Returns:
        A function of ``input``, and of ``out`` if the op has that, which starts it. It returns the
        work, or None if what was started needs no wait. Collective: yes.
    """
    *methods, kind = _METHODS[op._schema.name.partition("::")[2]]
    options = getattr(c10d, kind)()
    options.asyncOp = asynchronous
    if "reduce_op" in given:
        options.reduceOp = getattr(dist.ReduceOp, given["reduce_op"].upper())
    if "src" in given:
        options.rootRank, options.rootTensor = given["src"], 0
    group = c10d._resolve_process_group(given["group_name"])
    start = getattr(group, next(name for name in methods if hasattr(group, name)))
    if "out" in given:
        return lambda source, out: start(out, source, options)
    return lambda source: start([source], options)


def gloo_group(store: Store, prefix: str, rank: int, size: int, timeout: float) -> Any:
    """A group outside torch's registry, used by its methods only. It ends with its object.

    Args:
        store: Of its ranks.
        prefix: Of its keys in there, of no other group's.
        rank: This process's rank in it.
        size: How many ranks it has.
        timeout: Seconds that a collective may take.

    Collective: yes, over those ranks.
    """
    limit = dt.timedelta(seconds=timeout)
    network: Any = dist  # whose stores have no types
    return network.ProcessGroupGloo(network.PrefixStore(prefix, store), rank, size, limit)


def start_all_gather(outputs: list[Any], source: Any, group: Any) -> Any:
    """Start to gather into each rank's output; returns the work. Collective."""
    return group.allgather([outputs], [source])


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


def start_all_to_all(
    output: Any,
    source: Any,
    group: Any,
    *,
    received: Sequence[int] = (),
    sent: Sequence[int] = (),
    asynchronous: bool = True,
) -> Any:
    """Start an all-to-all, also of parts of so many rows; returns its work. Collective."""
    options = dist.AllToAllOptions()
    options.asyncOp = asynchronous
    return group.alltoall_base(output, source, list(received), list(sent), options)
