"""Sessions beside groups that not all ranks are in."""

from __future__ import annotations

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks

TURNS = 4

three = pool_of(3, timeout=100.0)
two = pool_of(2, timeout=100.0)


def _summed(x, group):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", group.group_name))


def _gathered(x):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, 3, "0"))


def _functional(rank, x, pair):
    """The pair also sums what all have gathered, which the third rank does not do."""
    whole = _gathered(x)
    mine = _summed(whole, pair) if rank < 2 else whole * 2
    return _gathered(whole[:4] * 3), mine


def _in_place(rank, x, pair):
    import torch.distributed as dist

    first = x * 1
    work = dist.all_reduce(first, group=pair, async_op=True) if rank < 2 else None
    whole = x + 1
    dist.all_reduce(whole)
    if work is not None:
        work.wait()
    return whole, first


def _at_once(rank, x, pair):
    """The third rank comes to a call of the session only when the pair's is over."""
    import torch.distributed as dist

    if rank < 2:
        total = _summed(x, pair)
        if rank == 0:
            dist.send(total, 2)
    else:
        total = torch.empty_like(x)
        dist.recv(total, 0)
    return _gathered(total), total


def _beside(rank, world_size, program, memory):
    import torch.distributed as dist

    import symmplan

    pair = dist.new_group([0, 1])
    with symmplan.eager(timeout=20.0, **memory) as session:
        for turn in range(TURNS):
            x = torch.arange(8.0) + 100 * rank + 7 * turn
            with_session = program(rank, x, pair)
            with torch.inference_mode():
                wanted = _alone(rank, x, pair, program)
            for got, want in zip(with_session, wanted, strict=True):
                torch.testing.assert_close(got, want)
            del got, with_session
            session.step()
        return session.stats.recorded, session.stats.served


def _alone(rank, x, pair, program):
    """What a program gives without a session."""
    from symmplan.coordination.own import own_work

    with own_work:
        return program(rank, x, pair)


MEMORY = {"shm": {}, "process group": {"collectives": "process group"}, "debug": {"debug": True}}


@pytest.mark.parametrize("program", [_functional, _in_place, _at_once])
@pytest.mark.parametrize("memory", MEMORY)
def test_calls_over_other_groups_run_at_once_and_in_torchs_own_way(three, program, memory):
    counts = three.run(_beside, program, MEMORY[memory])
    recorded = 2 if program is _functional else 1
    assert counts == [(recorded, (TURNS - 1) * recorded)] * 3


# Debugging.


def _all_functional(rank, world_size):
    """Functional collectives of torch, which wrap their results."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    import symmplan

    mesh = dist.init_device_mesh("cpu", (2,))
    with symmplan.eager(timeout=20.0, debug=True) as session:
        for turn in range(TURNS):
            whole = torch.arange(64.0).view(8, 8) + turn
            sharded = distribute_tensor(whole, mesh, [Shard(0)])
            total = sharded.full_tensor() * 1
            assert torch.equal(total, whole)
            del sharded
            session.step()
        return session.stats.served


def test_a_debug_session_runs_functional_collectives(two):
    assert two.run(_all_functional) == [TURNS - 1] * 2


# Memory without room.


def _without_room(rank, world_size):
    import symmplan
    from symmplan.memory import room

    before, room.free_bytes = room.free_bytes, lambda *_: 2048 if rank else 1 << 30
    ops = torch.ops._c10d_functional
    try:
        with symmplan.eager(timeout=20.0, memory="shm") as session:
            for turn in range(TURNS):
                x = torch.arange(4096.0) + rank + turn
                whole = ops.wait_tensor(ops.all_gather_into_tensor(x, 2, "0"))
                assert torch.equal(whole[:4096], torch.arange(4096.0) + turn)
                del whole
                session.step()
            return session.stats.reasons, [u.reason for u in session.plan.unplanned]
    finally:
        room.free_bytes = before


def test_a_session_says_that_there_was_no_room(two):
    for reasons, unplanned in two.run(_without_room):
        ((why, count),) = reasons
        assert "there was no room for it" in why
        assert count == TURNS - 1
        assert why in unplanned
