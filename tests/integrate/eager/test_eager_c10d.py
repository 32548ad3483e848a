"""Eager sessions where collectives stay the process group's own, as on devices.

On the CPU gloo runs on the placements of shared memory then: what is tested is how calls are
recorded and served, asynchronous ones above all.
"""

from __future__ import annotations

import pytest
import torch
from custom_ops import GROUPS, meet
from hypothesis import example, given, settings
from programs import Program, make_inputs, programs, run
from ranks import RankPool, pool_of

pytestmark = pytest.mark.ranks


OWN = "process group"


pool = pool_of(2, setup=meet, timeout=120.0)


def _held(rank, world_size, program):
    import symmplan

    inputs = make_inputs(program, rank)
    expected = run(program, GROUPS, *(x.clone() for x in inputs))
    with symmplan.eager(timeout=30.0, memory="shm", debug=True, collectives=OWN) as session:
        for _ in range(4):
            got = run(program, GROUPS, *(x.clone() for x in inputs))
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            del got
            session.step()
        return session.plan.fingerprint, str(session.stats)


#: A placement is overwritten at the end of the iteration, and a peer writes there in the next one.
_PUSHED = Program((2, 2), (("push", 0, 0), ("scale", 0, 0), ("sum", 0, 0)), (0,))


#: Likewise, and the barrier behind that is inside the last call, before its copy out.
_STEPS = (("relu", 0), ("push", 0, 0), ("relu", 0), ("relu", 0), ("relu", 0), ("scale", 3, 0))
_COPIED = Program((2, 2), (*_STEPS, ("relu", 0)), (0, 1, 7))


@example(_PUSHED)
@example(_COPIED)
@given(programs())
@settings(max_examples=8)
def test_random_programs(pool, program):
    first, second = pool.run(_held, program)
    assert first == second


def _asynchronous(rank, world_size, where):
    """One asynchronous collective; what lies between it and its wait must not share its bytes."""
    import torch.distributed as dist

    import symmplan

    outside = torch.full((64,), float(rank + 1))

    def step():
        if where == "placed":
            x = symmplan.placed.out(torch.mul, torch.full((64,), 1.0), float(rank + 1))
        elif where == "staged":  # its producer cannot write where it is told
            x = torch.full((64,), float(rank + 1)).sort().values
        else:
            x = outside.fill_(rank + 1)
        work = dist.all_reduce(x, async_op=True)
        y = symmplan.placed.out(torch.mul, torch.full((64,), 5.0), 1.0)
        dist.all_reduce(y)
        work.wait()
        assert work.is_completed()
        a, b = x + 0, y + 0
        if where != "outside":
            del x
        del y
        z = symmplan.placed.out(torch.mul, torch.full((64,), 7.0), 1.0)
        dist.all_reduce(z)
        return a, b, z + 0

    with symmplan.eager(timeout=20.0, memory="shm", debug=True, collectives=OWN) as session:
        for turn in range(4):
            a, b, c = step()
            assert bool((a == 3).all()), (turn, a)
            assert bool((b == 10).all()), (turn, b)
            assert bool((c == 14).all()), (turn, c)
            session.step()
        plan, stats = session.plan, session.stats
    plan.verify()
    live = {
        o.name: {a.buffer for a in plan.problem.accesses if a.operation == o.name}
        for o in plan.problem.operations
    }
    places = [plan.placements[b.name] for b in plan.problem.buffers]
    return len(live), [(p.offset, p.end) for p in places], stats.served, stats.copies, stats.staged


@pytest.mark.parametrize("where", ["placed", "staged", "outside"])
def test_an_asynchronous_collective_holds_its_bytes_until_its_wait(pool, where):
    first, second = pool.run(_asynchronous, where)
    assert first == second
    _, places, served, copies, staged = first
    assert served == 9  # three in each of three iterations
    assert len(places) == 3
    # The first and second are live at once; the third may have the bytes of either.
    assert len(set(places)) == 2
    assert staged == (where != "placed")
    assert copies == (0 if where == "placed" else 6)


def _never_waited(rank, world_size):
    import torch.distributed as dist

    import symmplan

    with symmplan.eager(timeout=20.0, memory="shm", collectives=OWN) as session:
        works = []
        for _ in range(3):
            x = symmplan.placed.out(torch.mul, torch.full((64,), 1.0), float(rank + 1))
            works.append(dist.all_reduce(x, async_op=True))
            session.step()
            works[-1].wait()
            assert bool((x == 3).all())
        return [u.reason for u in session.plan.unplanned], session.stats.placed


def test_work_that_outlives_the_iteration_is_left_out(pool):
    first, _ = pool.run(_never_waited)
    assert first[1] == 0
    assert len(first[0]) == 1


def _leaves(rank, world_size):
    """Results that outlive their iteration, waited for late and held by an asynchronous tensor."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    import symmplan

    name = dist.group.WORLD.group_name
    ops = torch.ops._c10d_functional
    kept = []
    with symmplan.eager(timeout=20.0, memory="shm", debug=True, collectives=OWN) as session:
        for turn in range(4):
            x = torch.full((8, 8), float(turn + rank))
            pending = ops.all_reduce(x, "sum", name)
            between = symmplan.placed.out(torch.mul, x, 2.0)
            dist.all_reduce(between)
            assert bool((between == 2 * (2 * turn + 1)).all())
            del between
            kept.append(ops.wait_tensor(pending))
            del pending
            wrapped = funcol.AsyncCollectiveTensor(ops.all_gather_into_tensor(x, 2, name))
            assert bool((wrapped + 0)[:8].eq(turn).all())  # waits
            kept.append(wrapped)
            del wrapped
            session.step()
        for turn in range(4):
            assert bool((kept[2 * turn] == 2 * turn + 1).all())
            assert bool((kept[2 * turn + 1][8:] == turn + 1).all())
        stats = session.stats
    return stats.copies, [(c.where, c.reason, c.fix, bool(c.line)) for c in stats.copied]


def test_results_that_leave_are_copied_at_their_wait(pool):
    first, second = pool.run(_leaves)
    assert first == second
    copies, named = first
    results = [n for n in named if n[0] == "return"]
    assert len(results) == 2
    for _, reason, fix, line in results:
        assert "leaves" in reason
        assert "session.step()" in fix
        assert line
    assert copies == 3 * len(named)


def _too_late(rank, world_size):
    """The wait that was recorded before other calls comes too late for the plan."""
    import torch.distributed as dist

    import symmplan

    name = dist.group.WORLD.group_name
    ops = torch.ops._c10d_functional
    x = torch.full((8, 8), 1.0)
    kept = []
    with symmplan.eager(timeout=20.0, memory="shm", collectives=OWN) as session:
        for turn in range(3):
            pending = ops.all_reduce(x, "sum", name)
            if turn < 2:
                kept.append(ops.wait_tensor(pending))
                del pending
            y = symmplan.placed.out(torch.mul, x, 2.0)
            dist.all_reduce(y)
            del y
            session.step()


def test_a_wait_that_is_missing_is_found_before_bytes_change(pool):
    with RankPool(2, timeout=60.0) as fresh:
        fresh.run(meet)
        for outcome in fresh.outcomes(_too_late):
            assert outcome.error is not None
            assert "still held" in outcome.error.text
            assert outcome.error.fields["buffer"]
