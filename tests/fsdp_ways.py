"""Programs about the ways in which collectives run: ``name(rank, world)`` runs on a rank.

`test_fsdp_ways.py` says what must come out.
"""

from __future__ import annotations

import contextlib

import fsdp_models
import fsdp_programs as programs
import fsdp_setter_programs
import torch
import torch.distributed as dist
from fsdp_models import Net, Trace, shard, train
from torch.distributed.fsdp import MixedPrecisionPolicy


@contextlib.contextmanager
def forced_way(way):
    before = fsdp_models.CHOOSE[0]
    fsdp_models.CHOOSE[0] = way
    try:
        yield
    finally:
        fsdp_models.CHOOSE[0] = before


def forced(rank, world, way, name, *args):
    """A program of `fsdp_programs` or `fsdp_setter_programs` with every collective in one way."""
    module = programs if hasattr(programs, name) else fsdp_setter_programs
    with forced_way(way):
        return getattr(module, name)(rank, world, *args)


def summed(rank, world, dtype, reduction):
    """An all-to-all and a local sum against the sum in 64 bits: the largest error, in roundings."""
    from symmplan.integrate.fsdp.ops import exchanges

    generator = torch.Generator().manual_seed(rank)
    source = torch.randn(world * 1000, generator=generator).to(dtype)
    received, output = torch.empty_like(source), source.new_empty(1000)
    op = getattr(dist.ReduceOp, reduction)
    act = exchanges(output, source, received, dist.group.WORLD, op)
    if act is None:
        return None
    act()
    parts = [torch.empty_like(source) for _ in range(world)]
    dist.all_gather(parts, source)
    mine = torch.stack([p.view(world, -1)[rank] for p in parts]).double()
    exact = mine.sum(0) / (world if reduction == "AVG" else 1)
    step = torch.finfo(dtype).eps * mine.abs().sum(0)
    return float(((output.double() - exact).abs() / step).max())


def failing_freeze(rank, world, where, build=lambda: shard(Net()), program=train):
    """One rank alone fails while the plan is made. How long this one waits, and its error."""
    import symmplan
    from symmplan.integrate.fsdp import choice as fsdp_choice
    from symmplan.integrate.fsdp import planning as fsdp_planning
    from symmplan.place import trials

    trials.forget()

    def fails(*args, **kwargs):
        raise ArithmeticError(f"no luck in {where}")

    target = {
        "planning": (fsdp_planning, "problem_of"),
        "measuring": (fsdp_choice, "gathers"),
    }[where]
    model = build()
    handle = symmplan.fsdp.apply(model, choose="measure", timeout=60.0)
    program(model, Trace(), rank, steps=1)
    original = getattr(*target)
    if rank == 1:
        setattr(*target, fails)
    try:
        handle.freeze()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(*target, original)
        handle.remove()
    return ""


def measured_again(rank, world):
    """A small block that the first step skipped is measured when it comes, while somebody holds
    two buffers of the first plan.
    """
    kept = []

    def look(handle):
        return [(c.op, c.nbytes) for c in handle.choices], [bool(torch.equal(*k)) for k in kept]

    def program(model, trace, rank):
        from symmplan.integrate.fsdp.comms import PlannedAllGather

        original = PlannedAllGather.__call__

        def keeping(self, **kwargs):
            result = original(self, **kwargs)
            if self._runtime.planning.plan is not None and len(kept) < 2:
                tensor = kwargs["output_tensor"]
                kept.append((tensor, tensor.clone()))
            return result

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, PlannedAllGather, "__call__", original)
            PlannedAllGather.__call__ = keeping
            for step, order in enumerate([(1, 2), (1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)]):
                model.order = list(order)
                fsdp_models.train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    with programs.flat():
        return fsdp_models.both(lambda: shard(Net()), program, rank, look=look, choose="measure")


def slots(rank, world, dtype):
    """What the plan has for reductions in one dtype that are pushes where they can be."""

    def look(handle):
        problem = handle.plan.problem
        reduced = [b for b in problem.buffers if "_reduce_scatter_" in b.op]
        return sorted((b.where, b.persistent) for b in reduced)

    policy = MixedPrecisionPolicy(dtype, dtype)
    with forced_way("push"):
        return fsdp_models.both(lambda: shard(Net(), mp_policy=policy), train, rank, look=look)


def late_sums(rank, world, blocks):
    """A rank sums what was pushed to it long after it met its peers, who go on to push."""
    import time

    from symmplan.integrate.fsdp import push

    original, count = push.sum_rows, [0]

    def late(*args):
        count[0] += 1
        if rank == count[0] // 2 % world:
            time.sleep(0.02)
        original(*args)

    push.sum_rows = late
    try:
        with forced_way("push"):
            return fsdp_models.both(lambda: shard(Net(blocks=blocks)), train, rank)
    finally:
        push.sum_rows = original
