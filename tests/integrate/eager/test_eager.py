"""Eager sessions on two real ranks: results, plans as FX makes them, faults, release."""

from __future__ import annotations

import pytest
import torch
from custom_ops import GROUPS, meet
from hypothesis import example, given, settings
from programs import Program, make_inputs, programs, run
from ranks import pool_of

pytestmark = pytest.mark.ranks


pool = pool_of(2, setup=meet, timeout=120.0)


def _thin(rank, world_size):
    import torch.distributed as dist

    import symmplan

    name = dist.group.WORLD.group_name
    ops = torch.ops._c10d_functional

    def step(x):
        y = ops.wait_tensor(ops.all_gather_into_tensor(x, 2, name))
        z = ops.wait_tensor(ops.reduce_scatter_tensor(y, "sum", 2, name))
        del y
        w = z * 2
        dist.all_reduce(w)
        buffer = symmplan.placed.empty(8, 8)
        dist.all_gather_into_tensor(buffer, w)
        m = symmplan.placed.out(torch.mm, buffer, buffer)
        r = ops.wait_tensor(ops.all_reduce(m, "sum", name))
        return torch.ops.symmplan_test.peer_mean(r, name) + 1

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    expected = step(x)
    with symmplan.eager(timeout=20.0) as session:
        for _ in range(4):
            got = step(x.clone())
            torch.testing.assert_close(got, expected)
            session.step()
        stats = session.stats
        text = [str(c) for c in session.copies]
        session.plan.verify()
    again = step(x)
    torch.testing.assert_close(again, expected)
    return str(stats), text, session.plan.fingerprint


def test_thin(pool):
    first, second = pool.run(_thin)
    assert first == second
    print(first)


def _graph(program: Program, rank: int):
    """The program as a straight line: an FX graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = make_inputs(program, rank)
    return make_fx(lambda *tensors: run(program, GROUPS, *tensors))(*inputs), inputs


class _StraightLine(torch.fx.Interpreter):
    """Drops every value after its last use, and at once what nobody uses."""

    def run_node(self, n):
        value = super().run_node(n)
        return value if n.users or n.op == "output" else None


def _same_program(rank, world_size, program: Program, repeat: int):
    import symmplan
    from symmplan.capture import capture_fx
    from symmplan.place.algorithms import Lowerings

    gm, inputs = _graph(program, rank)
    expected = run(program, GROUPS, *(x.clone() for x in inputs))
    low = Lowerings("shm")
    want = capture_fx(
        gm,
        inputs,
        as_run=low.as_run,
        producer=lambda node: low.producer(node, lambda _: None),
        skip=low.skip,
    ).problem
    interpreter = _StraightLine(gm)
    batches = [[x.clone() for x in inputs] for _ in range(repeat)]
    with symmplan.eager(timeout=30.0) as session:
        for turn in range(repeat):
            got = interpreter.run(*batches[turn])
            session.step()
            _close(got, expected, turn)
        plan, stats = session.plan, session.stats
    plan.verify()
    if any("other views of it" in u.reason for u in want.unplanned):
        # A graph hands a copy to later readers, and must know them; a program updates its tensor.
        return plan.fingerprint, str(stats), False
    for mine, theirs in zip(_key(plan.problem), _key(want), strict=True):
        assert mine == theirs, f"{set(mine) ^ set(theirs)}"
    # Only a tensor that a dead view or wait holds on to makes a difference.
    held = any(o.name.endswith(":drop") for o in plan.problem.operations)
    assert held or plan.fingerprint == symmplan.plan(want).fingerprint
    return plan.fingerprint, str(stats), held


def _close(got, expected, turn):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=1e-5, msg=lambda m, i=i, t=turn: f"{t}.{i}: {m}"
        )


def _key(problem):
    return (
        [(b.name, b.nbytes, b.group, b.align, b.op, b.where) for b in problem.buffers],
        [
            (o.name, o.group, o.handshake, o.release)
            for o in problem.operations
            if not o.name.endswith(":drop")
        ],
        [
            (a.operation, a.buffer, a.write, a.remote)
            for a in problem.accesses
            if not a.operation.endswith(":drop")
        ],
    )


def _held(rank, world_size, program: Program, repeat: int):
    """The same program as people write it: all values are held until it ends."""
    import symmplan

    inputs = make_inputs(program, rank)
    expected = run(program, GROUPS, *(x.clone() for x in inputs))
    with symmplan.eager(timeout=30.0, debug=True) as session:
        for turn in range(repeat):
            got = run(program, GROUPS, *(x.clone() for x in inputs))
            _close(got, expected, turn)
            del got
            session.step()
        session.plan.verify()
        return session.plan.fingerprint, str(session.stats)


#: A view of what is updated in place afterwards has died, and two views had the same shape.
_UPDATED = Program((2,), (("relu", 0), ("view", 1), ("bump", 1, 0)), (0, 1))


#: The view lives on.
_SEEN = Program((2,), (("relu", 0), ("view", 1), ("bump", 1, 0)), (2,))


@example(_UPDATED)
@example(_SEEN)
@given(programs())
@settings(max_examples=10)
def test_random_straight_lines_plan_as_fx_does(pool, program):
    first, second = pool.run(_same_program, program, 3)
    assert first == second


@pytest.mark.further
@given(programs())
@settings(max_examples=15)
def test_random_programs_that_hold_their_values(pool, program):
    first, second = pool.run(_held, program, 3)
    assert first == second
