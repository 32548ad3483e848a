"""FSDP2 off the plan: other orders, steps that fail or are interrupted, buffers that are kept."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist
from fsdp_conditions import Hoard, holding, in_flat_buffers
from fsdp_models import (
    Block,
    Net,
    Stop,
    Trace,
    batch,
    both,
    changing,
    check,
    hooked,
    needs,
    same,
    sgd,
    shard,
    stop,
    train,
    train_step,
)
from ranks import RankPool, pool_of
from test_fsdp import plain
from torch import nn

import symmplan

pytestmark = pytest.mark.ranks

two = pool_of(2)


def uneven_use(rank, world, orders):
    """Blocks are used in another order, twice, or not at all; the same on all ranks."""

    def change(model, step, trace, rank):
        model.order = list(orders[step])

    return both(lambda: shard(Net()), changing(change, len(orders)), rank)


@pytest.mark.parametrize(
    "orders",
    [
        [(0, 1, 2), (2, 1, 0), (0, 1, 2), (1, 0, 2)],
        [(0, 1, 2), (0, 0, 1, 2), (0, 1, 1, 1, 2), (2, 2)],
        [(0, 1, 2), (0,), (), (1, 2), (0, 1, 2)],
    ],
)
def test_a_step_that_departs_from_the_plan_is_served_right(two, orders):
    stats = check(two.run(uneven_use, orders), copies=None, reordered=None)
    assert stats["reordered"] > 0


def test_a_module_that_the_first_step_skipped_is_plain_once_and_then_planned(two):
    orders = [(0, 2), (0, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)]
    stats = check(two.run(uneven_use, orders), plain=3, replans=1, rendezvous=None, reordered=None)
    assert stats["reasons"] == {"the plan does not know this collective": 3}


def failing_step(rank, world):
    """A forward pass fails on all ranks in the middle, and training goes on."""

    def change(model, step, trace, rank):
        if step == 2:
            model.order = [0, 7]  # there is no block 7
            with contextlib.suppress(IndexError):
                model(batch(step, rank))
            model.order = [0, 1, 2]

    return both(lambda: shard(Net()), changing(change), rank)


def test_a_step_that_fails_on_all_ranks_leaves_the_next_ones_right(two):
    check(two.run(failing_step), copies=None, reordered=None)


def interrupted(rank, world, where, index):
    """A step ends in the middle by an exception on all ranks, and is forgotten."""

    def change(model, step, trace, rank):
        if step in (3, 4):
            with hooked(model.blocks[index], where, stop), contextlib.suppress(Stop):
                model(batch(step, rank)).pow(2).mean().backward()
            model.reset_iter_state()
            model.zero_grad()

    return both(lambda: shard(Net(blocks=4)), changing(change, steps=6), rank)


@needs("reset_iter_state")
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("where", ["forward", "before backward", "backward"])
def test_a_step_that_is_interrupted_leaves_the_next_ones_right(two, where, index):
    same(two.run(interrupted, where, index))


class Stopping(Net):
    """A block's first half may raise, once it has run."""

    def __init__(self):
        super().__init__(blocks=4)
        self.at = None
        for i, block in enumerate(self.blocks):
            block.up.register_forward_hook(lambda *_, i=i: self.stop(i))

    def stop(self, index):
        if index == self.at:
            raise torch.OutOfMemoryError("no luck")


def out_of_memory(rank, world, kind, index):
    """Forward raises inside a block, on all ranks, and the next step goes on."""

    def change(model, step, trace, rank):
        if step not in (0, 3):
            return
        model.at = index
        context = torch.no_grad() if kind == "no_grad" else contextlib.nullcontext()
        with contextlib.suppress(torch.OutOfMemoryError), context:
            model(batch(step, rank))
        model.at = None
        if kind == "smaller":  # the user's way out: a smaller batch
            model(batch(step, rank)[:1]).pow(2).mean().backward()
            trace.grads(model, step)
        model.zero_grad()

    return both(lambda: shard(Stopping()), changing(change, steps=6), rank)


@pytest.mark.parametrize("kind", ["forward", "no_grad", "smaller"])
@pytest.mark.parametrize("index", [0, 2])
def test_a_forward_pass_that_ran_out_of_memory_leaves_the_next_ones_right(two, kind, index):
    same(two.run(out_of_memory, kind, index))


def differ(outcomes):
    """All ranks raised, and say why."""
    for outcome in outcomes:
        assert outcome.error is not None
        assert "make different calls" in outcome.error.text


def out_of_memory_alone(rank, world):
    """Rank 1 alone fails in forward, and goes on with its next step."""
    model = shard(Stopping())
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=5.0)
    optimizer = sgd(model)
    try:
        for step in range(6):
            model.at = 1 if (rank, step) == (1, 3) else None
            with contextlib.suppress(torch.OutOfMemoryError):
                train_step(model, optimizer, Trace(), step, rank)
    finally:
        handle.remove()


def test_a_rank_that_runs_out_of_memory_alone_ends_in_errors_on_all_ranks():
    with RankPool(2) as two:
        differ(two.outcomes(out_of_memory_alone))


def alone(rank, world, what):
    """Rank 1 alone leaves a block out, takes another order, or needs no gradients of a block.

    All blocks are alike, so that sizes and placements fit.
    """

    class Aside(Net):
        aside = False

        def forward(self, x):
            x = self.inlet(x)
            for i in self.order:
                y = self.blocks[i](x)
                x = x + y.detach() if self.aside and i == 1 else y
            return self.outlet(x)

    model = Aside()
    model.blocks = nn.ModuleList(Block() for _ in range(4))
    model.order = [0, 1, 2, 3]
    shard(model)
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=5.0)
    optimizer = sgd(model)
    try:
        for step in range(5):
            if rank == 1 and step == 3:
                model.order = {
                    "skip": [0, 2, 3],
                    "swap": [2, 1, 0, 3],
                    "twice": [0, 0, 1, 2, 3],
                }.get(what, model.order)
                model.aside = what == "no gradients"
            train_step(model, optimizer, Trace(), step, rank)
    finally:
        handle.remove()


@pytest.mark.parametrize("what", ["skip", "swap", "twice", "no gradients"])
def test_a_rank_that_departs_alone_ends_in_errors_on_all_ranks(what):
    with RankPool(2) as two:
        differ(two.outcomes(alone, what))


def disagreement(rank, world):
    """Ranks record programs that differ: on one of them a module has another name."""
    model = shard(Net(), root=False)
    if rank == 1:
        model.others = model.blocks
        del model.blocks
        object.__setattr__(model, "blocks", model.others)
    for parameter in [*model.inlet.parameters(), *model.outlet.parameters()]:
        parameter.requires_grad_(False)
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=20.0)
    try:
        train(model, Trace(), rank, steps=2)
    finally:
        handle.remove()


def test_ranks_that_record_different_programs_all_raise(two):
    outcomes = two.outcomes(disagreement)
    assert [o.error.kind for o in outcomes] == ["AgreementError"] * 2


@contextlib.contextmanager
def gathered():
    """Whether the input of each flat gather in the plan was a part of its output.

    NCCL looks at both to decide what it runs, which must be the same on all ranks.
    """
    from symmplan.integrate.fsdp import comms

    within = []
    gathers = comms.gathers

    def noting(memory, plain, output, source, *args, **kwargs):
        begin = source.data_ptr() - output.data_ptr()
        within.append(0 <= begin < output.numel() * output.element_size())
        return gathers(memory, plain, output, source, *args, **kwargs)

    comms.gathers = noting
    try:
        yield within
    finally:
        comms.gathers = gathers


def holder(rank, world, who, late, threads):
    """On some ranks somebody keeps the buffers of some collectives longer than FSDP2 does.

    Args:
        who: Those ranks.
        late: Only once the plan is frozen.
        threads: A thread drops them after a while; else the program does, five collectives later,
            and looks whether they are intact.
    """
    hoard = Hoard(5)
    running = []

    def keep(runtime, tensor):
        if rank not in who or (late and runtime.planning.plan is None):
            return
        if threads:
            running.append(threading.Thread(target=lambda t: time.sleep(0.01), args=(tensor,)))
            running[-1].start()
        else:
            hoard.keep(tensor)

    with holding(keep), gathered() as within:
        result = both(lambda: shard(Net()), train, rank)
        for thread in running:
            thread.join()
        hoard.end()
    result["intact"] = all(hoard.intact)
    result["gathered within"] = all(within)
    result["looked at"] = len(hoard.intact)
    dist.barrier()
    return result


@pytest.mark.parametrize("who", [(0,), (0, 1)])
@pytest.mark.parametrize("threads", [True, False])
def test_buffers_that_somebody_keeps_longer_stay_intact(two, who, threads):
    """Later users of their bytes are staged, on that rank alone."""
    results = two.run(in_flat_buffers, holder, who, True, threads)
    for rank, result in enumerate(results):
        assert result["gathered within"]
        assert result["differences"] == []
        assert result["intact"]
        assert result["stats"]["plain"] == 0
        assert (result["stats"]["copies"] > 0) == (rank in who)
        assert (result["looked at"] > 0) == (rank in who and not threads)


def test_a_rank_that_keeps_buffers_from_the_start_makes_all_ranks_plan_for_it(two):
    results = two.run(in_flat_buffers, holder, (1,), False, False)
    check(results)
    assert results[1]["intact"]


def lingering(rank, world):
    """The process group holds on to its tensors for a while after a collective, as gloo may."""
    running = []

    def linger(call):
        def lingering(self, **kwargs):
            result = call(self, **kwargs)
            tensors = [v for v in kwargs.values() if isinstance(v, torch.Tensor)]
            running.append(threading.Thread(target=lambda _: time.sleep(0.05), args=(tensors,)))
            running[-1].start()
            return result

        return lingering

    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as own

    with contextlib.ExitStack() as stack:
        for kind in (own.DefaultAllGather, own.DefaultReduceScatter):
            stack.callback(setattr, kind, "__call__", kind.__call__)
            kind.__call__ = linger(kind.__call__)
        result = both(lambda: shard(Net()), train, rank)
    for thread in running:
        thread.join()
    return result


@pytest.mark.long
def test_tensors_that_a_collective_holds_longer_do_not_count_as_held(two):
    (unhindered,) = {r["bytes"] for r in two.run(plain)}
    results = two.run(lingering)
    check(results)
    assert {r["bytes"] for r in results} == {unhindered}
