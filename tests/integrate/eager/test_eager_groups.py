"""Sessions beside groups that not all ranks are in, and all-to-alls of any sizes."""

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


# All-to-alls.


def _even(rank, turn):
    import torch.distributed as dist

    out = torch.empty(8)
    dist.all_to_all_single(out, torch.arange(8.0) + 10 * rank + turn)
    return out


def _even_later(rank, turn):
    import torch.distributed as dist

    out = torch.empty(4, 2)
    work = dist.all_to_all_single(out, torch.arange(8.0) + 10 * rank + turn, async_op=True)
    work.wait()
    return out


def _functional_all_to_all(rank, turn):
    ops = torch.ops._c10d_functional
    x = torch.arange(8.0).view(4, 2) + 10 * rank + turn
    return ops.wait_tensor(ops.all_to_all_single(x, [2, 2], [2, 2], "0"))


def _by_rank(rank, turn):
    """Rank 0 gets more rows in each iteration, rank 1 fewer."""
    import torch.distributed as dist

    counts = 3 + turn, 5 - turn
    out = torch.empty(2 * counts[rank])
    received = [counts[rank]] * 2
    dist.all_to_all_single(out, torch.arange(8.0) + 10 * rank + turn, received, [*counts])
    return out


def _functional_by_rank(rank, turn):
    ops = torch.ops._c10d_functional
    counts = 3 + turn, 5 - turn
    x = torch.arange(8.0) + 10 * rank + turn
    return ops.wait_tensor(ops.all_to_all_single(x, [counts[rank]] * 2, [*counts], "0"))


def _all_to_all(rank, world_size, program, options):
    import symmplan
    from symmplan.coordination.own import own_work

    with symmplan.eager(timeout=20.0, memory="shm", **options) as session:
        for turn in range(TURNS):
            got = program(rank, turn)
            with own_work:
                wanted = program(rank, turn)
            assert torch.equal(got, wanted), (turn, got, wanted)
            del got
            session.step()
        reasons = {unplanned.reason for unplanned in session.plan.unplanned}
        return session.stats.served, session.stats.recorded, reasons


ALL_TO_ALLS = [_even, _even_later, _functional_all_to_all, _by_rank, _functional_by_rank]
OPTIONS = {**MEMORY, "measured": {"choose": "measure"}}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", ALL_TO_ALLS)
def test_even_all_to_alls_are_served_and_others_are_ordinary_on_all_ranks(two, program, options):
    for served, recorded, reasons in two.run(_all_to_all, program, OPTIONS[options]):
        assert recorded == 1
        if "by_rank" in program.__name__:
            assert served == 0
            assert any("not all of one size on all ranks" in why for why in reasons), reasons
        elif options != "measured":
            assert served == TURNS - 1


# All-to-alls that were recorded with equal parts, and have others later.


def _sometimes(rank, turn):
    """In the third iteration rank 0 keeps more to itself, which the others do not see."""
    ops = torch.ops._c10d_functional
    mine = 3 if turn == 2 and rank == 0 else 2
    splits = [mine, 2] if rank == 0 else [2, 2]
    x = torch.arange(float(2 * sum(splits))).view(-1, 2) + 10 * rank + turn
    return ops.wait_tensor(ops.all_to_all_single(x, splits, splits, "0"))


def _turned(rank, turn):
    """Each rank has as many rows as ever, but those of each peer are others."""
    ops = torch.ops._c10d_functional
    splits = [3, 1] if turn == 2 else [2, 2]
    received = [splits[rank]] * 2
    x = torch.arange(8.0).view(4, 2) + 10 * rank + turn
    rows = ops.wait_tensor(ops.all_to_all_single(x, received, splits, "0"))
    return ops.wait_tensor(ops.all_gather_into_tensor(rows[:1] * 2, 2, "0"))


def _once(rank, turn):
    """The result of an all-to-all is an input of the next, and of a gather."""
    ops = torch.ops._c10d_functional
    a, b = (3, 1) if turn == 2 else (2, 2)
    mine, theirs = ([a, b], [a, b]) if rank == 0 else ([b, a], [b, a])
    x = torch.arange(8.0).view(4, 2) + 10 * rank + turn
    there = ops.wait_tensor(ops.all_to_all_single(x, theirs, mine, "0"))
    back = ops.wait_tensor(ops.all_to_all_single(there, mine, theirs, "0"))
    return back + ops.wait_tensor(ops.all_gather_into_tensor(there, 2, "0"))[2:6]


def _smaller(rank, turn):
    """All ranks have fewer rows in the third iteration."""
    import torch.distributed as dist

    out, x = torch.empty(8), torch.arange(8.0) + 10 * rank + turn
    if turn == 2:
        out, x = out[:4], x[:4]
    dist.all_to_all_single(out, x)
    return out


def _smaller_later(rank, turn):
    import torch.distributed as dist

    out, x = torch.empty(8), torch.arange(8.0) + 10 * rank + turn
    if turn == 2:
        out, x = out[:4], x[:4]
    dist.all_to_all_single(out, x, async_op=True).wait()
    return out


def _uneven_once(rank, turn):
    """Sizes are given in the third iteration only."""
    import torch.distributed as dist

    out, x = torch.empty(8), torch.arange(8.0) + 10 * rank + turn
    if turn == 2:
        k = 3 - 2 * rank
        out = torch.empty(2 * k)
        dist.all_to_all_single(out, x[:4], [k, k], [3, 1])
    else:
        dist.all_to_all_single(out, x)
    return out


LATER = [_sometimes, _turned, _once, _smaller, _smaller_later, _uneven_once]


def _other_sizes(rank, world_size, program, options):
    import symmplan
    from symmplan.coordination.own import own_work

    with symmplan.eager(timeout=20.0, memory="shm", **options) as session:
        for turn in range(TURNS + 1):
            got = program(rank, turn)
            with own_work:
                wanted = program(rank, turn)
            assert torch.equal(got, wanted), (turn, got, wanted)
            del got
            session.step()
        stats = session.stats
    return stats.recorded, stats.served, stats.plain, stats.reasons


@pytest.mark.parametrize("options", MEMORY)
@pytest.mark.parametrize("program", LATER)
def test_an_all_to_all_with_other_sizes_than_planned_is_ordinary_on_all_ranks(
    two, program, options
):
    for rank, found in enumerate(two.run(_other_sizes, program, MEMORY[options])):
        recorded, served, plain, reasons = found
        ordinary = 2 if program is _once else 1
        if options == "process group" and program is _sometimes and rank == 1:
            ordinary = 0  # its own part of the call is as planned
        assert served == TURNS * recorded - ordinary
        assert plain == ordinary
        assert sum(n for why, n in reasons if "other sizes than planned" in why) == ordinary


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
