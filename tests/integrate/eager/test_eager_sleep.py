"""`Session.sleep` and `Session.wake`: nothing is held meanwhile, and the same plan is followed."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from doubles import on_devices, state
from held import segments_of_plans
from ranks import pool_of

import symmplan
from symmplan.errors import BackendError, RunError
from symmplan.memory.backends import shm
from symmplan.process import PROCESS

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=100.0)

F = torch.ops._c10d_functional


def gather(x):
    world = torch.distributed.group.WORLD
    return F.wait_tensor(F.all_gather_into_tensor(x, world.size(), world.group_name))


def program(x):
    """Two gathers, of which one reads what is placed, and a number."""
    made = symmplan.placed.out(torch.mul, x, 2.0)
    return (gather(gather(x).sum() + made) * 3).sum().item()


def _turns(rank, world, wakes, choose="placed", **options):
    expected = [program(torch.full((4, 8), float(turn + rank))) for turn in range(8)]
    found, prints = [], set()
    with symmplan.eager(choose=choose, timeout=30.0, **options) as session:
        session.sleep()  # nothing is planned yet
        session.wake()
        for turn in range(8):
            found.append(program(torch.full((4, 8), float(turn + rank))))
            session.step()
            prints.add(session.plan.fingerprint)
            if turn % 2:
                had = session.stats.segment_bytes
                session.sleep()
                session.sleep()
                gc.collect()
                assert session.asleep
                assert session.stats.segment_bytes == 0 < had
                assert not segments_of_plans()
                assert not PROCESS.engines_made
                if wakes:
                    session.wake()
                    session.wake()
                    assert session.stats.segment_bytes == had
        stats = session.stats
    return found == expected, len(prints), stats


@pytest.mark.further
@pytest.mark.parametrize("wakes", [False, True])
def test_a_session_follows_the_same_plan_in_new_memory(two, wakes):
    for right, plans, stats in two.run(_turns, wakes):
        assert right
        assert plans == 1
        assert stats.sleeps == 4
        # One segment: once, and each time that it woke.
        assert stats.rendezvous == 1 + 3 + wakes
        assert (stats.recorded, stats.iterations) == (2, 8)


def _on_devices(rank, world, memory, choose):
    def run(rank, world):
        torch.distributed.all_reduce(torch.ones(1))  # the program's communicator is there before
        had = state().device.taken["communicators"]
        found = _turns(rank, world, False, choose, memory=memory)
        gc.collect()
        copies = sum("PtoP" in name for name in state().kernels)
        more = state().device.taken["communicators"] - had
        return *found, state().device.segments, more, copies

    return on_devices(rank, world, run)


@pytest.mark.parametrize(
    ("memory", "choose"), [("nccl", "placed"), ("nccl", "copy engine"), ("cuda", "placed")]
)
def test_a_session_on_devices_gives_segments_and_communicators_back(two, memory, choose):
    for right, plans, stats, *nbytes, copies in two.run(_on_devices, memory, choose):
        assert right
        assert (plans, stats.sleeps) == (1, 4)
        assert nbytes == [0, 0]  # the last turn left it asleep
        assert copies == (2 * 7 if choose == "copy engine" else 0)  # also after it slept


def _refused(rank, world):
    """In the midst of an iteration, and while one rank holds a result that lies in a placement."""
    said, x, kept = [], torch.ones(4, 8), []
    with symmplan.eager(choose="placed", timeout=30.0) as session:
        for turn in range(3):
            kept.append(gather(x * turn))
            if turn and rank == 0:
                with pytest.raises(RunError, match="in the midst") as caught:
                    session.sleep()
                said.append(str(caught.value))
            elif turn:
                with pytest.raises(RunError, match="in the midst"):
                    session.sleep()
            if rank or turn < 2:
                kept.clear()
            session.step()
        with pytest.raises(RunError, match="holds a tensor") as caught:
            session.sleep()
        said.append(str(caught.value))
        kept.clear()
        session.sleep()
        right = torch.equal(gather(x), torch.ones(4 * world, 8))
        session.step()
    return said, right, session.stats.sleeps


def test_nobody_sleeps_while_a_rank_uses_the_memory(two):
    for said, right, sleeps in two.run(_refused):
        assert right
        assert sleeps == 1
        assert "fix: drop the tensor" in said[-1]


def _captured(rank, world, choose):
    """One rank captures an iteration in a CUDA graph: how often the session then sleeps."""

    def run(*_):
        from symmplan.device import device_of

        x = torch.ones(4, 8)
        with symmplan.eager(choose=choose, timeout=30.0) as session:
            for turn in range(3):
                captures = mock.patch.object(
                    type(device_of(x.device)), "is_capturing", return_value=turn == 2 and rank == 1
                )
                with captures:
                    gather(x)
                session.step()
                if turn == 1:
                    session.sleep()
            refused = pytest.raises(RunError, match="a captured CUDA graph has addresses")
            with refused if choose == "placed" else nullcontext():
                session.sleep()
            return session.stats.sleeps, session.asleep

    return on_devices(rank, world, run)


@pytest.mark.parametrize(("choose", "sleeps"), [("placed", 1), ("ordinary", 2)])
def test_a_session_that_a_cuda_graph_has_addresses_of_does_not_sleep(two, choose, sleeps):
    assert two.run(_captured, choose) == [(sleeps, sleeps == 2)] * 2


def _no_room(rank, world):
    allocate = shm.ShmBackend.allocate

    def full(*args, **kwargs):
        raise BackendError("no memory is left", fix="wait")

    expected = [program(torch.full((4, 8), float(turn + rank))) for turn in range(5)]
    found = []
    try:
        with symmplan.eager(choose="placed", timeout=30.0) as session:
            for turn in range(5):
                found.append(program(torch.full((4, 8), float(turn + rank))))
                session.step()
                if turn == 1:
                    session.sleep()
                    if rank:
                        shm.ShmBackend.allocate = full
            stats = session.stats
    finally:
        shm.ShmBackend.allocate = allocate
    return found == expected, stats


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_where_a_rank_cannot_have_memory_again_calls_run_in_torchs_way(two):
    for right, stats in two.run(_no_room):
        assert right
        assert stats.segment_bytes == 0
        assert any("no memory is left" in why for why, _ in stats.reasons)
