"""Eager sessions in programs of several threads: other threads' calls run in torch's own way."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks


pool = pool_of(2, 3, timeout=100.0)
two = pool_of(2, timeout=100.0)

TURNS = 6


# Rank side.


def gather(x, group):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, group.size(), group.group_name))


def of_ranks(rank, world, members):
    """A group of its own: of all ranks, or of all but the first."""
    import torch.distributed as dist

    return dist.new_group(list(range(members == "some", world)))


def program(x, world, group):
    """What a session serves: a gather, a reduction of what was made for it, one that is copied."""
    import torch.distributed as dist

    import symmplan

    y = symmplan.placed.out(torch.mul, gather(x, group).sum(0), 0.5)
    dist.all_reduce(y)
    z = torch.sort(y).values
    work = dist.all_reduce(z, async_op=True)
    work.wait()
    return y + 1, z + 2


def expected(world, turn):
    """Of ``program(full(rank + turn))`` on ``world`` ranks."""
    total = sum(rank + turn for rank in range(world)) * 4 * 0.5 * world
    return total + 1, total * world + 2


class Thread(threading.Thread):
    """Raises in `result` what was raised in it."""

    def __init__(self, act, *args):
        super().__init__(daemon=True)
        self._given, self.error = (act, args), None
        self.start()

    def run(self):
        act, args = self._given
        del self._given  # nobody but this thread holds the tensors
        try:
            act(*args)
        except BaseException as error:  # noqa: BLE001 (raised in `result`)
            self.error = error

    def result(self):
        self.join(60.0)
        assert not self.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error


def metrics(rank, world, members, group, number, pause):
    """Collectives of all kinds in a group of its own, each with other numbers; in the session's
    words where those have any."""
    import torch.distributed as dist

    import symmplan

    if members == "some" and rank == 0:
        return
    ranks = range(members == "some", world)
    for turn in range(number):
        x = symmplan.placed.out(torch.mul, torch.full((8,), float(rank + turn)), 2.0)
        total = sum(2.0 * (r + turn) for r in ranks)
        if turn % 3 == 0:
            dist.all_reduce(x, group=group)
        elif turn % 3 == 1:
            dist.all_reduce(x, group=group, async_op=True).wait()
        else:
            y = symmplan.placed.empty(8 * len(ranks))
            dist.all_gather_into_tensor(y, x, group=group)
            x = y.view(len(ranks), 8).sum(0)
        assert bool((x == total).all()), (turn, x, total)
        assert bool((gather(x, group) == total).all()), (turn, x)
        time.sleep(pause())


def in_the_background(rank, world, members, when):
    """A thread makes collectives on a group of its own from iteration ``when`` on, at any time."""
    import torch.distributed as dist

    import symmplan

    group, thread = of_ranks(rank, world, members), None
    numbers = random.Random(10 * rank + when)
    with symmplan.eager(timeout=20.0, memory="shm") as session:
        for turn in range(TURNS):
            if turn == when:
                arguments = (rank, world, members, group, 40, lambda: numbers.uniform(0, 0.01))
                thread = Thread(metrics, *arguments)
            if rank == turn % world:
                time.sleep(0.05)
            got = program(torch.full((4, 8), float(rank + turn)), world, dist.group.WORLD)
            for tensor, want in zip(got, expected(world, turn), strict=True):
                assert bool((tensor == want).all()), (turn, tensor, want)
            session.step()
        thread.result()
        stats, plan = session.stats, session.plan
    return stats.recorded, stats.served, stats.plain, len(plan.problem.operations), plan.fingerprint


def in_each_iteration(rank, world, members, late):
    """A thread of the program makes calls in each iteration, on what the program hands to it."""
    import torch.distributed as dist

    import symmplan

    group = of_ranks(rank, world, members)
    sums = []

    def act(tensor, turn):
        time.sleep(0.02 * (turn + rank % 2) if late else 0.0)
        metrics(rank, world, members, group, 3, lambda: 0.0)
        sums.append(float(tensor.sum()))

    with symmplan.eager(timeout=20.0, memory="shm") as session:
        for turn in range(TURNS):
            x = torch.full((4, 8), float(rank + turn))
            handed = symmplan.placed.out(torch.mul, x, 1.0)
            dist.all_reduce(handed)
            thread = Thread(act, handed, turn)
            if late:
                del handed  # the thread is the last to hold it, and works in it for a while
            got = program(x, world, dist.group.WORLD)
            for tensor, want in zip(got, expected(world, turn), strict=True):
                assert bool((tensor == want).all()), (turn, tensor, want)
            thread.result()
            del thread
            if not late:
                del handed
            session.step()
        stats = session.stats
    assert sums == [32.0 * sum(r + turn for r in range(world)) for turn in range(TURNS)], sums
    return stats.recorded, stats.served, [(c.where, c.reason) for c in stats.copied]


class Deep(torch.autograd.Function):
    """Runs backward inside backward, so deep that autograd goes on in a thread of its own."""

    @staticmethod
    def forward(ctx, x, depth, leaf):
        ctx.depth, ctx.leaf = depth, leaf
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                y = Deep.apply(grad.detach().clone().requires_grad_(), ctx.depth - 1, ctx.leaf)
            y.backward(grad)
        else:
            ctx.leaf(grad)
        return grad, None, None


def in_a_thread_of_autograd(rank, world):
    import torch.distributed as dist

    import symmplan

    threads, results = set(), []

    def leaf(grad):
        threads.add(threading.get_ident())
        y = symmplan.placed.out(torch.mul, grad, 2.0)
        dist.all_reduce(y)
        results.append(float(y.sum()))

    with symmplan.eager(timeout=20.0, memory="shm") as session:
        for turn in range(3):
            x = torch.full((4,), 1.0, requires_grad=True)
            Deep.apply(x, 70, leaf).backward(torch.full((4,), float(turn + rank)))
            session.step()
        stats = session.stats
    assert threading.get_ident() not in threads
    assert results == [8.0 * sum(turn + r for r in range(world)) for turn in range(3)]
    return stats.recorded, stats.served


# Parent side.


@pytest.mark.parametrize("members", ["all", "some"])
@pytest.mark.parametrize("when", [0, 2])
def test_a_thread_in_the_background_is_left_alone(pool, members, when):
    first, *others = pool.run(in_the_background, members, when)
    assert all(other == first for other in others)
    recorded, served, plain, operations, _ = first
    assert (recorded, served, plain) == (3, 3 * (TURNS - 1), 0)
    assert operations < 12


@pytest.mark.parametrize("members", ["all", "some"])
def test_a_thread_that_makes_calls_in_each_iteration(pool, members):
    first, *others = pool.run(in_each_iteration, members, False)
    assert all(other == first for other in others)
    assert first[:2] == (4, 4 * (TURNS - 1))


def test_what_another_thread_drops_last_has_left_the_iteration(two):
    first, second = two.run(in_each_iteration, "all", True)
    assert first == second
    recorded, served, copied = first
    assert (recorded, served) == (4, 4 * (TURNS - 1))
    assert any("leaves" in reason for _, reason in copied), copied


def test_threads_of_autograd_are_the_programs(two):
    assert two.run(in_a_thread_of_autograd) == [(1, 2)] * 2
