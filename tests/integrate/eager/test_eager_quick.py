"""Eager sessions: calls that are as planned are served, all others are found out."""

from __future__ import annotations

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks


def _setup(rank, world_size):
    import custom_ops

    custom_ops.load()


pool = pool_of(2, setup=_setup, timeout=120.0)
alone = pool_of(1, setup=_setup, timeout=120.0)


def _wait(x):
    return torch.ops._c10d_functional.wait_tensor(x)


def _reduced(y, **more):
    import torch.distributed as dist

    work = dist.all_reduce(y, **more)
    if work is not None:
        work.wait()
    return y


def _gathered(x):
    import torch.distributed as dist

    out = x.new_empty(2 * len(x))
    dist.all_gather_into_tensor(out, x)
    return out


def _scattered(x):
    import torch.distributed as dist

    out = x.new_empty(len(x) // 2)
    dist.reduce_scatter_tensor(out, x)
    return out


def _broadcast(x):
    import torch.distributed as dist

    dist.broadcast(x, 1)
    return x


_F, _T = torch.ops._c10d_functional, torch.ops.symmplan_test

#: name -> the program: of how to call a producer, a tensor and the name of the group.
PROGRAMS = {
    "functional all-gather": lambda make, x, g: _wait(_F.all_gather_into_tensor(x + 1, 2, g)),
    "functional all-gather of what is placed": lambda make, x, g: _wait(
        _F.all_gather_into_tensor(make(torch.mul, x, 2.0), 2, g)
    ),
    "functional reduce-scatter": lambda make, x, g: _wait(
        _F.reduce_scatter_tensor(make(torch.mul, x, 2.0), "sum", 2, g)
    ),
    "functional all-reduce": lambda make, x, g: _wait(
        _F.all_reduce(make(torch.mul, x, 2.0), "sum", g)
    ),
    "functional all-reduce in place": lambda make, x, g: _wait(
        _F.all_reduce_(make(torch.mul, x, 2.0), "sum", g)
    ),
    "all_reduce": lambda make, x, g: _reduced(make(torch.mul, x, 2.0)),
    "all_reduce of parts": lambda make, x, g: _reduced(make(torch.cat, [x, 2 * x])),
    "asynchronous all_reduce": lambda make, x, g: _reduced(make(torch.mul, x, 2.0), async_op=True),
    "all_reduce of what is copied": lambda make, x, g: _reduced(x.sort().values),
    "all_gather_into_tensor": lambda make, x, g: _gathered(make(torch.mul, x, 2.0)),
    "reduce_scatter_tensor": lambda make, x, g: _scattered(make(torch.mul, x, 2.0)),
    "broadcast": lambda make, x, g: _broadcast(make(torch.mul, x, 2.0)),
    "custom op, copied result": lambda make, x, g: _T.peer_sum(x, g),
    "custom op, out variant": lambda make, x, g: _T.scale(x, g),
    "custom op with a barrier": lambda make, x, g: _T.peer_mean(make(torch.mul, x, 2.0), g),
    "custom op that pushes": lambda make, x, g: _T.push_next(x, g),
    "custom op, copied argument": lambda make, x, g: _T.peer_mean(x + 1, g),
}


def _plainly(fn, *args):
    return fn(*args)


def _together():
    """No rank hears of what another does next before it has come as far."""
    import torch.distributed as dist

    from symmplan.coordination.own import own_work

    with own_work:
        dist.barrier()


def _rows(c10d):
    from symmplan.place.algorithms import _C10D, _SHM, Lowerings

    Lowerings.table = property(lambda _: _C10D if c10d else _SHM)


def _steady(rank, world_size, name, c10d):
    import torch.distributed as dist

    import symmplan
    from symmplan.coordination.own import own_work

    _rows(c10d)
    program, group = PROGRAMS[name], dist.group.WORLD.group_name
    methods, call = dict(vars(dist.ProcessGroup)), _F.all_reduce.default._op
    with symmplan.eager(timeout=30.0, memory="shm") as session:
        for turn in range(5):
            for layer in range(3):
                x = torch.arange(8.0) + rank + turn * layer
                got = program(symmplan.placed.out, x, group) + 0
                with own_work:
                    assert torch.allclose(got, program(_plainly, x, group) + 0), (turn, layer)
            session.step()
        # Nothing of torch's is another than without a session.
        assert dict(vars(dist.ProcessGroup)) == methods
        assert _F.all_reduce.default._op is call
        return session.stats.served, session.stats.copies


@pytest.mark.parametrize("c10d", [False, True])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_calls_as_planned_are_served(pool, name, c10d):
    first, second = pool.run(_steady, name, c10d)
    assert first == second
    assert first[0] == 12


def _numbers(rank, world_size):
    """Arguments that the plan leaves open are those of the call: numbers, other tensors."""
    import torch.distributed as dist

    import symmplan
    from symmplan.coordination.own import own_work

    group = dist.group.WORLD.group_name
    with symmplan.eager(timeout=30.0, memory="shm") as session:
        for turn in range(4):
            x = torch.arange(8.0) + rank + turn
            factors = (1.0 + turn, 0.25 * turn)
            got = _T.weighted([x, 2 * x], *factors, group)
            out = torch.empty(4).as_strided((4,), (1,)) if turn % 2 else torch.empty(8)[::2]
            dist.reduce_scatter_tensor(out, symmplan.placed.out(torch.mul, x, 2.0 + turn))
            with own_work:
                parts = torch.empty(4)
                dist.reduce_scatter_tensor(parts, x * (2.0 + turn))
            assert torch.equal(got, x * factors[0] + 2 * x * factors[1]), turn
            assert torch.equal(out, parts), turn
            del got
            session.step()
        return session.stats.served


def test_what_the_plan_leaves_open_is_that_of_the_call(pool):
    assert pool.run(_numbers) == [6, 6]


def _lines(rank, world_size, name):
    """How many lines of symmplan's own run where a served call is made, `placed.out` included."""
    import torch.distributed as dist
    from steps import lines_of

    import symmplan

    program, group, x = PROGRAMS[name], dist.group.WORLD.group_name, torch.arange(8.0)
    with symmplan.eager(timeout=30.0, memory="shm") as session:
        for _ in range(2):
            program(symmplan.placed.out, x, group)
            session.step()
        lines = lines_of(lambda: program(symmplan.placed.out, x, group))
        session.step()
    return lines


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("all_reduce", 250),
        ("functional all-reduce in place", 240),
        ("functional all-reduce", 240),
    ],
)
def test_a_served_call_runs_few_lines(alone, name, most):
    """Everything that can be is decided before a call is first served."""
    (lines,) = alone.run(_lines, name)
    assert lines <= most


def _differs(rank, world_size, name, change, c10d):
    import torch.distributed as dist

    import symmplan
    from symmplan.errors import RunError

    _rows(c10d)
    program, group = PROGRAMS[name], dist.group.WORLD.group_name
    x = torch.arange(8.0) + rank
    with symmplan.eager(timeout=20.0, memory="shm") as session:
        for _ in range(3):
            program(symmplan.placed.out, x, group)
            session.step()
        other = x[:4] if change == "shape" else x.double()
        _together()
        with pytest.raises(RunError, match="other arguments"):
            program(symmplan.placed.out, other, group)
        session.replan()
        for _ in range(3):
            program(symmplan.placed.out, other, group)
            session.step()
        return session.stats.iterations


@pytest.mark.parametrize(("change", "c10d"), [("shape", False), ("shape", True), ("type", True)])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_call_that_differs_is_found(pool, name, change, c10d):
    assert pool.run(_differs, name, change, c10d) == [6, 6]


def _other_words(rank, world_size, c10d):
    """The same tensors, another reduction, root or group."""
    import torch.distributed as dist

    import symmplan
    from symmplan.errors import RunError

    _rows(c10d)
    calls = {
        "reduction": (
            dist.all_reduce,
            lambda y: dist.all_reduce(y, op=dist.ReduceOp.MAX),
        ),
        "root": (lambda y: dist.broadcast(y, 0), lambda y: dist.broadcast(y, 1)),
        "functional": (
            lambda y: _wait(_F.all_reduce_(y, "sum", dist.group.WORLD.group_name)),
            lambda y: _wait(_F.all_reduce_(y, "max", dist.group.WORLD.group_name)),
        ),
    }
    for planned, other in calls.values():
        with symmplan.eager(timeout=20.0, memory="shm") as session:
            for _ in range(3):
                planned(symmplan.placed.out(torch.mul, torch.ones(8), 2.0))
                session.step()
            _together()
            with pytest.raises(RunError, match="other arguments"):
                other(symmplan.placed.out(torch.mul, torch.ones(8), 2.0))
            session.replan()
            session.step()
    return True


@pytest.mark.further
@pytest.mark.parametrize("c10d", [False, True])
def test_other_words_are_found(pool, c10d):
    assert pool.run(_other_words, c10d) == [True, True]


def _modes(rank, world_size):
    """A dispatch mode of the program's sees its collectives, in a session too."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    import symmplan

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    _rows(c10d=True)
    with symmplan.eager(timeout=20.0, memory="shm") as session:
        for _ in range(3):
            dist.all_reduce(symmplan.placed.out(torch.mul, torch.ones(8), 2.0))
            session.step()
        seen = []
        with Names():
            y = symmplan.placed.out(torch.mul, torch.ones(8), 2.0)
            dist.all_reduce(y)
        assert bool((y == 4).all())
        del y
        session.step()
    return "c10d::allreduce_" in seen


def test_dispatch_modes_see_collectives(pool):
    assert pool.run(_modes) == [True, True]
