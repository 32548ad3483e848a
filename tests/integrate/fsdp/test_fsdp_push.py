"""Pushed gradients: in which type they travel, and where they arrive."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from unittest import mock

import pytest
import torch
from fsdp_conditions import forced_algorithm
from fsdp_models import Block, Net, batch, both, mesh, sgd, shard, train, update
from ranks import RankPool, pool_of
from torch.distributed.fsdp import MixedPrecisionPolicy

import symmplan
from symmplan.integrate.fsdp.comms import PlannedReduceScatter
from symmplan.integrate.fsdp.push import Pushes

pytestmark = pytest.mark.ranks

two = pool_of(2)


def narrow(rank, world, ranks_apart, wide_from):
    """Gradients in bfloat16 that are reduced in 32 bits; from a step on autograd's are, too.

    Args:
        ranks_apart: How many replicas HSDP has.
        wide_from: From that step on gradients are accumulated over two micro-batches, which FSDP2
            does in the type in which it reduces.
    """

    def build():
        shape = (world,) if ranks_apart == 1 else (ranks_apart, world // ranks_apart)
        names = None if ranks_apart == 1 else ("replicate", "shard")
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return shard(Net(), mesh=mesh(*shape, names=names), mp_policy=policy)

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(6):
            for last in (False, True) if step >= wide_from else (True,):
                model.set_requires_gradient_sync(last)
                loss = model(batch(10 * step + last, rank)).float().pow(2).mean()
                loss.backward()
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters(model)

    def look(handle):
        problem = handle.plan.problem
        return sorted(b.nbytes for b in problem.buffers if "push" in b.where)

    with forced_algorithm("push"):
        return both(build, program, rank, look)


@pytest.mark.parametrize("wide_from", [0, 2, 6])
def test_slots_are_as_large_as_the_gradients_that_are_pushed(two, wide_from):
    """What becomes wider runs in torch's own way until the next step is planned for it."""
    numel = sum(p.numel() for p in Net().blocks[-1].parameters())
    for result in two.run(narrow, 1, wide_from):
        assert result["differences"] == []
        assert max(result["looked"]) == numel * (2 if wide_from == 6 else 4)
        stats = result["stats"]
        wider = {"its gradients were wider than when it was recorded": 4}
        assert stats["reasons"] == (wider if wide_from == 2 else {})
        assert stats["replans"] == (wide_from == 2)


def uneven(rank, world, alone, algorithm):
    """One rank has fewer micro-batches than its peers, which accumulate theirs in 32 bits.

    Args:
        alone: From which step on; before that all accumulate.
        algorithm: How reductions run.
    """

    def build():
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return shard(Net(), mp_policy=policy, reshard_after_forward=False)

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(6):
            for last in (True,) if rank == 0 and step >= alone else (False, True):
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                loss = model(batch(10 * step + last, rank)).float().pow(2).mean()
                loss.backward()
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters(model)

    with forced_algorithm(algorithm):
        return both(build, program, rank)


def widening(rank, world, algorithm):
    """From a step on a rank accumulates, and its peers do not."""

    def build():
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return shard(Net(), mp_policy=policy, reshard_after_forward=False)

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(7):
            for last in (False, True) if rank == 1 and step in (2, 4, 5) else (True,):
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                time.sleep(0.01 * (rank == step % 2))
                loss = model(batch(10 * step + last, rank)).float().pow(2).mean()
                loss.backward()
            update(model, optimizer, trace, step)
        trace.parameters(model)

    with forced_algorithm(algorithm):
        return both(build, program, rank)


@pytest.mark.parametrize("algorithm", ["push", "shared push"])
def test_a_rank_that_alone_accumulates_is_heard_by_its_peers(two, algorithm):
    """All reduce in torch's own way once, and plan again."""
    for result in two.run(widening, algorithm):
        assert result["differences"] == []
        wider = {"its gradients were wider than when it was recorded": 4}
        assert result["stats"]["reasons"] == wider
        assert result["stats"]["replans"] == 1


def other_order(rank, world, algorithm):
    """In a step a rank reduces the gradients of two equal blocks in the other order."""

    class Beside(Net):
        first = 0

        def forward(self, x):
            x, later = self.inlet(x), 1 - self.first
            done = {i: self.blocks[i](x) for i in (self.first, later)}
            return self.outlet(done[0] + done[1])

    model = Beside(blocks=0)
    model.blocks = torch.nn.ModuleList(Block() for _ in range(2))
    shard(model, reshard_after_forward=False)
    handle = symmplan.fsdp.apply(model, choose=algorithm, timeout=20.0)
    try:
        for step in range(4):
            for block in model.blocks:  # in one order
                block.unshard()
            model.first = int(rank == 1 and step == 3)
            model(batch(step, rank)).pow(2).mean().backward()
    finally:
        handle.remove()


@pytest.mark.parametrize("algorithm", ["push", "shared push"])
def test_ranks_that_push_the_gradients_of_different_modules_all_raise(algorithm):
    with RankPool(2) as two:
        for outcome in two.outcomes(other_order, algorithm):
            assert outcome.error is not None
            assert "make different calls" in outcome.error.text


def failing_alone(rank, world, algorithm, moment):
    """In a step rank 1 alone fails between a push and its meeting, and goes on with the next."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    model = shard(Net(), reshard_after_forward=False)
    handle = symmplan.fsdp.apply(model, choose=algorithm, timeout=20.0)
    divide, count = collectives._div_if_needed, []

    def failing(*args):  # it comes twice in each reduction
        count.append(step)
        if rank == 1 and count.count(3) > moment:
            raise torch.OutOfMemoryError("no luck")
        return divide(*args)

    collectives._div_if_needed = failing
    try:
        for step in range(6):
            with contextlib.suppress(torch.OutOfMemoryError):
                model(batch(step, rank)).pow(2).mean().backward()
            if rank == 1 and step == 3 and hasattr(model, "reset_iter_state"):
                model.reset_iter_state()
            count.clear()
    finally:
        collectives._div_if_needed = divide
        handle.remove()


@pytest.mark.parametrize("moment", [0, 2])
@pytest.mark.parametrize("algorithm", ["push", "shared push"])
def test_a_rank_that_fails_alone_in_a_push_ends_in_errors_on_all_ranks(algorithm, moment):
    with RankPool(2) as two:
        for outcome in two.outcomes(failing_alone, algorithm, moment):
            assert outcome.error is not None
            assert "make different calls" in outcome.error.text


@pytest.mark.parametrize("algorithm", ["push", "shared push"])
@pytest.mark.parametrize("alone", [0, 3])
def test_a_rank_that_does_not_accumulate_pushes_in_the_type_of_its_peers(two, alone, algorithm):
    for result in two.run(uneven, alone, algorithm):
        assert result["differences"] == []
        assert result["stats"]["served"] > 0
        assert result["stats"]["reasons"] == {}


@pytest.mark.long
def test_the_sums_of_narrow_gradients_are_reduced_on_in_32_bits():
    with RankPool(4) as four:
        for result in four.run(narrow, 2, 6):
            assert result["differences"] == []
            assert result["stats"]["served"] > 0
            numel = sum(p.numel() for p in Net().blocks[-1].parameters())
            assert max(result["looked"]) == 2 * numel


def crowded(rank, world):
    """On the last rank somebody stays in the bytes of each shared slot."""
    from symmplan.integrate.fsdp.segments import Memory

    take = Memory.take
    if rank == world - 1:
        Memory.take = lambda *_: None
    try:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        with forced_algorithm("shared push"):
            return both(lambda: shard(Net(), mp_policy=policy), train, rank)
    finally:
        Memory.take = take


def test_a_rank_that_cannot_take_a_slot_pushes_when_it_can_sum(two):
    first, last = two.run(crowded)
    assert first["differences"] == last["differences"] == []
    assert first["stats"]["copies"] == 0
    assert last["stats"]["copies"] == 3 * 4  # in three steps with a plan four reductions
    assert last["stats"]["reasons"] == {"its bytes were still in use": 12}


def collecting(rank, world):
    """Which gradients are there when garbage is collected behind their reduction, and at last."""
    sent, there = [], []
    send, reduce = Pushes.send, PlannedReduceScatter.__call__

    def sending(pushes, *args, **kwargs):
        kept = send(pushes, *args, **kwargs)
        sent.append([weakref.ref(gradient.untyped_storage()) for gradient in kept])
        return kept

    def reducing(scatter, *args, **kwargs):
        work = reduce(scatter, *args, **kwargs)
        if sent:
            gc.collect()
            there.append(all(gradient() is not None for gradient in sent[-1]))
        return work

    with (
        mock.patch.object(Pushes, "send", sending),
        mock.patch.object(PlannedReduceScatter, "__call__", reducing),
    ):
        model = shard(Net(), mesh=mesh(world))
        handle = symmplan.fsdp.apply(model, choose="push", timeout=30.0)
        for step in range(3):
            model(batch(step, rank)).pow(2).mean().backward()
            model.zero_grad()
        handle.remove()
    return there, [gradient() is not None for of in sent for gradient in of]


@pytest.mark.further
def test_garbage_collection_leaves_gradients_that_are_pushed_alone(two):
    """Devices read them until the reduction has ended, for which FSDP2 waits later."""
    for there, left in two.run(collecting):
        assert len(there) >= 4
        assert all(there)
        assert not any(left)
