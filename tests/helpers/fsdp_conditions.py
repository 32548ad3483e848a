"""Conditions under which the programs of `test_fsdp*.py` run, on a rank: each holds for a while."""

from __future__ import annotations

import contextlib
import functools
import os

import fsdp_models
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from symmplan.device import device_of
from symmplan.torch_private.c10d import premul_factor


@contextlib.contextmanager
def flat():
    """FSDP2 as a torch has it in which parameter groups have other methods."""
    from symmplan.torch_private import fsdp2_in_place

    known = fsdp2_in_place.can_be_replaced
    fsdp2_in_place.can_be_replaced = lambda _: False
    try:
        yield
    finally:
        fsdp2_in_place.can_be_replaced = known


def in_flat_buffers(rank, world, program, *args):
    """A program with gathers in flat buffers."""
    with flat():
        return program(rank, world, *args)


@contextlib.contextmanager
def forced_algorithm(algorithm):
    before = fsdp_models.CHOOSE[0]
    fsdp_models.CHOOSE[0] = algorithm
    try:
        yield
    finally:
        fsdp_models.CHOOSE[0] = before


def forced(rank, world, algorithm, program, *args):
    """A program with every collective by one algorithm."""
    with forced_algorithm(algorithm):
        return program(rank, world, *args)


@contextlib.contextmanager
def forced_kind(kind, rank):
    """A measurement in which torch's own way wins for one kind of collective, and no other."""
    from symmplan.choose import trials
    from symmplan.runtime import measure as measuring

    measure, seconds_of = measuring.measure, trials.seconds_of

    def forced(wanted, *args, **kwargs):
        ops = iter([case.op for case in wanted])

        def timed(*args, **kwargs):
            algorithms, chosen = seconds_of(*args, **kwargs), next(ops) == kind
            # Ranks measure different times, as they do; the slowest counts.
            fast, slow = 1e-4 * (rank + 1), 5e-4
            return {w: fast if (w == "ordinary") == chosen else slow for w in algorithms}

        trials.seconds_of = timed
        return measure(wanted, *args, **kwargs)

    trials.forget()
    measuring.measure = forced
    try:
        yield
    finally:
        measuring.measure, trials.seconds_of = measure, seconds_of
        trials.forget()


@contextlib.contextmanager
def holding(keep):
    """``keep`` is given every buffer that symmplan handed out, once its collective is done.

    Args:
        keep: Called with the runtime and the buffer.
    """
    from symmplan.integrate.fsdp.comms import PlannedAllGather, PlannedReduceScatter

    def kept(call, name):
        def keeping(self, **kwargs):
            result = call(self, **kwargs)
            if result is not None:
                result.wait()
            if kwargs[name].is_cuda:
                torch.cuda.synchronize()
            keep(self._runtime, kwargs[name])
            return result

        return keeping

    with contextlib.ExitStack() as stack:
        for kind, name in (
            (PlannedAllGather, "output_tensor"),
            (PlannedReduceScatter, "input_tensor"),
        ):
            stack.callback(setattr, kind, "__call__", kind.__call__)
            kind.__call__ = kept(kind.__call__, name)
        yield


class Hoard:
    """Keeps buffers until so many others came, and then looks whether they are intact."""

    def __init__(self, count):
        self.count = count
        self.intact = []
        self._kept = []

    def keep(self, tensor):
        self._kept.append((tensor, tensor.clone(), device_of(tensor.device).current_stream()))
        if len(self._kept) > self.count:
            self._look()

    def end(self):
        while self._kept:
            self._look()

    def _look(self):
        tensor, copy, stream = self._kept.pop(0)
        device = device_of(tensor.device)
        with device.on_stream(stream):
            self.intact.append(torch.allclose(tensor, copy, 0, 0, equal_nan=True))
        if stream is not None:  # as with any memory of other streams
            for other in (device.default_stream(), device.current_stream()):
                other.wait_stream(stream)


@functools.cache
def _hosts(group):
    """The host of each rank of a group."""
    hosts = [""] * group.size()
    dist.all_gather_object(hosts, os.environ.get("NCCL_HOSTID", ""), group=group)
    return tuple(hosts)


@contextlib.contextmanager
def in_order_of_ranks():
    """The process group sums in the order of its ranks, in which symmplan does.

    Which order torch's collectives take is open, and shows in the last bits of more than two
    summands. Types narrower than float32 are summed in it and rounded once. On several hosts those
    of each are summed first, and rounded for the network.
    """

    names = [n for n in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, n)]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def summed(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):  # noqa: A002
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        rows = input.new_empty(ranks * input.numel())
        gather(rows, input.contiguous().view(-1), group=group)
        mine = rows.view(ranks, ranks, -1)[:, rank].float()
        there, hosts = {}, _hosts(group or dist.group.WORLD)
        for row, host in zip(mine, hosts, strict=True):
            there[host] = there[host] + row if host in there else row
        of = ranks
        if len(there) > 1 and input.element_size() < 4:
            if op == dist.ReduceOp.AVG:
                there, of = {h: x / hosts.count(h) for h, x in there.items()}, len(there)
            rounded = {h: x.to(input.dtype).float() for h, x in there.items()}
            there = {**there, **rounded, hosts[rank]: there[hosts[rank]]}
        first, *others = there.values()
        for other in others:
            first = first + other
        factor = premul_factor(op)
        if op == dist.ReduceOp.AVG:
            first = first / of
        elif factor is not None:
            first = first * factor
        output.view(-1).copy_(first)

    before = {name: getattr(dist, name) for name in names}
    for name in names:
        setattr(dist, name, summed)
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(dist, name, own)


@contextlib.contextmanager
def groups_of_its_own():
    """On the CPU the process groups that are made inside end with it, on all ranks.

    Each has a loop of gloo's that looks at its sockets 100 times a second.
    """
    before = {*distributed_c10d._world.pg_map}
    yield
    if fsdp_models.DEVICE[0] != "cpu":
        return
    dist.barrier()
    for group in [g for g in distributed_c10d._world.pg_map if g not in before]:
        dist.destroy_process_group(group)
