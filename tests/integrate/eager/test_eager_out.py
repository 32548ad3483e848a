"""`placed.out`: random producers write straight into placements, as plain PyTorch computes."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import pool_of

pytestmark = pytest.mark.ranks

ROWS, COLUMNS = 4, 8

#: name -> (how many tensors it takes, the call); all of ROWS x COLUMNS, and so is the result.
PRODUCERS = {
    "add": (2, lambda make, a, b: make(torch.add, a, b)),
    "alpha": (2, lambda make, a, b: make(torch.add, a, b, alpha=0.5)),
    "mul": (1, lambda make, a: make(torch.mul, a, 1.5)),
    "mm": (2, lambda make, a, b: make(torch.mm, a @ b.T / 8, a)),
    "addmm": (2, lambda make, a, b: make(torch.addmm, b, a[:, :4], b[:4, :], beta=0.5)),
    "matmul": (1, lambda make, a: make(torch.matmul, torch.eye(ROWS), a)),
    "cat": (2, lambda make, a, b: make(torch.cat, [a[:2], b[2:]])),
    "stack": (2, lambda make, a, b: make(torch.stack, [a[0], b[1], a[2], b[3]])),
    "where": (2, lambda make, a, b: make(torch.where, a > b, a, b)),
    "softmax": (1, lambda make, a: make(torch.softmax, a, 1)),
    "cumsum": (1, lambda make, a: make(torch.cumsum, a, 0)),
    "rows": (1, lambda make, a: make(torch.index_select, a, 0, torch.tensor([3, 1, 0, 2]))),
    "clamp": (1, lambda make, a: make(torch.clamp, a, -1.0, 1.0)),
    "view": (1, lambda make, a: make(torch.sin, a.T).T),  # read through another view
}


@attrs.frozen
class Step:
    """A producer of earlier values, what happens to its result, and who forgets what."""

    producer: str
    operands: tuple[int, ...]
    then: str
    forget: int | None


@st.composite
def programs(draw):
    known, steps = [0, 1], []
    for i in range(draw(st.integers(1, 8))):
        producer = draw(st.sampled_from(sorted(PRODUCERS)))
        count = PRODUCERS[producer][0]
        operands = tuple(draw(st.sampled_from(known)) for _ in range(count))
        then = draw(st.sampled_from(["in place", "functional", "gather", "both", "nothing"]))
        known.append(i + 2)
        forget = draw(st.none() | st.sampled_from(known[2:]))
        if forget is not None:
            known.remove(forget)
        steps.append(Step(producer, operands, then, forget))
    return tuple(steps), draw(st.booleans())


pool = pool_of(2, timeout=120.0)


def _run(steps, inputs, make, name, check=lambda _: None):
    import torch.distributed as dist

    ops = torch.ops._c10d_functional
    values = dict(enumerate(inputs))
    results = []
    for i, step in enumerate(steps):
        made = PRODUCERS[step.producer][1](make, *(values[v] for v in step.operands))
        check(made)
        if step.then in ("in place", "both"):
            dist.all_reduce(made)
        if step.then in ("functional", "both"):
            results.append(ops.wait_tensor(ops.all_reduce(made, "sum", name)) + 0)
        if step.then == "gather":
            results.append(ops.wait_tensor(ops.all_gather_into_tensor(made, 2, name)) + 0)
        values[i + 2] = made / 4
        results.append(made + 1)
        del made
        values.pop(step.forget, None)
    return results


def _same(rank, world_size, program, c10d):
    import torch.distributed as dist

    import symmplan
    from symmplan.memory import locate
    from symmplan.place import algorithms

    kept = algorithms.Lowerings.table
    if c10d:  # as on devices
        algorithms.Lowerings.table = property(lambda _: algorithms._C10D)
    steps, no_grad = program
    name = dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2)]
    expected = _run(steps, inputs, lambda fn, *a, **k: fn(*a, **k), name)
    placed = []

    def check(tensor):
        if session.planned:
            placed.append(locate(tensor) is not None)

    try:
        with (
            torch.set_grad_enabled(not no_grad),
            symmplan.eager(timeout=30.0, memory="shm", debug=True) as session,
        ):
            for turn in range(4):
                got = _run(steps, [x.clone() for x in inputs], symmplan.placed.out, name, check)
                for i, (a, b) in enumerate(zip(got, expected, strict=True)):
                    assert torch.equal(a, b) or torch.allclose(a, b, atol=1e-5), (turn, i)
                session.step()
            session.plan.verify()
            stats = session.stats
    finally:
        algorithms.Lowerings.table = kept
    return stats.bound, stats.staged, placed, session.plan.fingerprint


@pytest.mark.further
@given(programs(), st.booleans())
@settings(max_examples=5)
def test_random_producers_write_where_they_are_told(pool, program, c10d):
    first, second = pool.run(_same, program, c10d)
    assert first == second
    _, _, placed, _ = first
    # Whatever feeds an op that needs it in symmetric memory lies there, in every iteration.
    needs = ("in place", "both") if c10d else ("in place", "both", "functional")
    needs += ("gather",) if c10d else ()
    wanted = [step.then in needs for step in program[0]] * 3
    assert placed == wanted


def _live(rank, world_size, program):
    """No two placed tensors that are alive at the same time share a byte."""
    import weakref

    import torch.distributed as dist

    import symmplan
    from symmplan.memory import locate

    steps, _ = program
    name = dist.group.WORLD.group_name
    inputs = [torch.ones(ROWS, COLUMNS) for _ in range(2)]
    alive = []
    seen = [0]

    def check(tensor):
        found = locate(tensor)
        if found is None:
            return
        begin = found[0].address + found[1]
        mine = (begin, begin + tensor.numel() * tensor.element_size())
        for other, (low, high) in alive:
            if other() is not None:
                seen[0] += 1
                assert mine[1] <= low or high <= mine[0]
        alive.append((weakref.ref(tensor), mine))

    with symmplan.eager(timeout=30.0, memory="shm") as session:
        for _ in range(3):
            _run(steps, inputs, symmplan.placed.out, name, check)
            session.step()
    return seen[0]


@pytest.mark.further
@given(programs())
@settings(max_examples=15)
def test_live_tensors_share_no_byte(pool, program):
    pool.run(_live, program)


def _not_out(rank, world_size):
    """Functions without ``out=`` and calls that autograd follows say so or are just made."""
    import symmplan

    x = torch.ones(4, 8, requires_grad=True)
    with symmplan.eager(timeout=20.0, memory="shm") as session:
        for _ in range(2):
            y = symmplan.placed.out(torch.mul, x, 2.0)
            y.sum().backward()
            session.step()
        assert bool((x.grad == 4).all())
    return session.stats.placed


def test_calls_that_autograd_follows_are_just_made(pool):
    assert pool.run(_not_out) == [0, 0]


def _fixes(rank, size):
    """Inputs of sums from three places: what would avoid the copy of each."""
    import torch.distributed as dist

    import symmplan

    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name

    outside = torch.ones(8, 8)

    def made():
        x = torch.full((8, 8), float(rank + 1))
        yield torch.mm(x, x)
        yield torch.empty(8, 8)
        yield outside

    with symmplan.eager(timeout=20.0, memory="shm") as session:
        for _ in range(2):
            for x in made():
                ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", size, name))
            session.step()
        return [copy.fix for copy in session.copies if copy.where == "input"]


def test_a_copy_says_what_would_avoid_it(pool):
    first, second = pool.run(_fixes)
    assert first == second
    assert first == [
        "write symmplan.placed.out(torch.mm, ...) where it is made",
        "allocate it with symmplan.placed.empty",
        "make it in the iteration, in memory from symmplan.placed.empty",
    ]
