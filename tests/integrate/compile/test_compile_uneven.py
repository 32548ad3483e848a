"""Compiled all-to-alls whose parts are not equally large, on all ranks or on some."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from doubles import installed
from ranks import pool_of

import symmplan
from symmplan.integrate.compile.exchanged import GIVEN, UNEVEN

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=200.0)

#: Rows that each rank sends to each: differing from the first, after equal ones, with none at all.
TABLES = {
    "differing": [[[1, 3], [2, 2]], [[3, 0], [1, 4]], [[2, 2], [2, 2]], [[5, 1], [0, 1]]],
    "balanced first": [[[2, 2], [2, 2]], [[1, 3], [2, 4]], [[4, 1], [3, 2]]],
    "equal totals": [[[1, 3], [3, 1]], [[3, 1], [1, 3]], [[0, 4], [4, 0]]],
    "even": [[[2, 2], [2, 2]], [[2, 2], [2, 2]]],
}


def _there_and_back(x, sends, gets):
    rows = fc.all_to_all_single(x * 2, gets, sends, dist.group.WORLD) + 1
    summed = fc.all_reduce(rows.sum(0), "sum", dist.group.WORLD)
    back = fc.all_to_all_single(rows * 3, sends, gets, dist.group.WORLD)
    return back + summed


def _trained(x, sends, gets):
    rows = fc.all_to_all_single_autograd(x * 2, gets, sends, dist.group.WORLD) + 1
    back = fc.all_to_all_single_autograd(rows * rows, sends, gets, dist.group.WORLD)
    return back.sin()


PROGRAMS = {f.__name__[1:]: f for f in (_there_and_back, _trained)}


def _of_numbers(f):
    """The program, which computes its lists from numbers; lists that it gets are another matter."""

    def program(x, first, second, third, fourth):
        return f(x, [first, second], [third, fourth])

    return program


def _run(rank, world, program, tables, options, dynamic=None, columns=8, lists=False):
    torch.compiler.reset()
    f, backend = PROGRAMS[program], symmplan.backend(memory="shm", timeout=30.0, **options)
    f = f if lists else _of_numbers(f)
    compiled = torch.compile(f, backend=backend, dynamic=dynamic)
    for step, table in enumerate(tables):
        sends, gets = table[rank], [row[rank] for row in table]
        x = torch.arange(sum(sends) * columns * 1.0).view(-1, columns) / 8 + rank + step
        inputs = [x.clone().requires_grad_(program == "trained") for _ in range(2)]
        given = (sends, gets) if lists else (*sends, *gets)
        got, want = (g(i, *given) for g, i in zip((compiled, f), inputs, strict=True))
        assert torch.equal(got, want), step
        if program == "trained":
            for result in (got, want):
                (result * result).sum().backward()
            assert torch.equal(inputs[0].grad, inputs[1].grad), step
    reasons = {u.reason for plan in backend.plans for u in plan.unplanned if "all_to_all" in u.op}
    placed = {b.op for plan in backend.plans for b in plan.problem.buffers}
    backend.release()
    kinds = ("all_to_all", "all_reduce")
    return reasons, *(any(kind in op for op in placed) for kind in kinds)


#: Even at first; then one rank keeps more or fewer rows to itself, and alone compiles again.
ALONE = [[[2, 2], [2, 2]], [[3, 2], [2, 2]], [[3, 2], [2, 0]], [[2, 2], [2, 2]], [[1, 2], [2, 2]]]
#: Why all-to-alls have no placement from the first on.
ORDINARY = {
    "ruled": {"choose": "ordinary"},
    "measured": {"choose": "measure"},
    "demoted": {"capacity": 0},
    "demoted, but for the sum": {"capacity": 6000},
}


def _one_alone(rank, world, program, why, dynamic):
    """What is placed, and what the all-to-alls do, where one rank compiles again alone."""
    from symmplan.choose import trials

    fastest, trials.fastest = trials.fastest, lambda *_, **__: "ordinary"
    try:
        with torch._dynamo.config.patch(recompile_limit=32):
            options = {"inner": "eager", **ORDINARY[why]}
            return _run(rank, world, program, ALONE, options, dynamic, 512)
    finally:
        trials.fastest = fastest


@pytest.mark.further
@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("why", ORDINARY)
def test_a_rank_compiles_ordinary_ones_again_alone(two, program, why, dynamic):
    found = two.run(_one_alone, program, why, dynamic)
    assert found[0] == found[1]
    reasons, exchanged, summed = found[0]
    assert reasons
    assert UNEVEN not in reasons
    assert not exchanged
    assert summed == (why == "demoted, but for the sum" and program == "there_and_back")


def _judge(found, tables):
    assert found[0] == found[1]
    reasons, exchanged, _ = found[0]
    assert (UNEVEN in reasons) == (tables in ("differing", "balanced first"))
    assert exchanged == (tables != "differing")


@pytest.mark.parametrize("tables", TABLES)
def test_uneven_all_to_alls_run(two, tables):
    found = two.run(_run, "there_and_back", TABLES[tables], {"inner": "eager"})
    _judge(found, tables)
    assert found[0][2]  # the others are placed all the same


@pytest.mark.further
@pytest.mark.parametrize("tables", TABLES)
def test_so_do_their_gradients(two, tables):
    _judge(two.run(_run, "trained", TABLES[tables], {"inner": "eager"}), tables)


@pytest.mark.further
@pytest.mark.parametrize("options", [{"collectives": "process group"}, {"choose": "measure"}])
def test_however_they_run(two, options):
    found = two.run(_run, "there_and_back", TABLES["differing"], {"inner": "eager", **options})
    assert found[0] == found[1]
    assert UNEVEN in found[0][0]


#: Placed; then in ordinary memory on all ranks; then one rank alone, or both, have the first sizes.
BACK = [[[2, 2], [2, 2]], [[1, 3], [2, 4]], [[3, 2], [2, 2]], [[2, 2], [2, 2]], [[2, 2], [2, 1]]]


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_rank_returns_to_a_graph_in_which_they_are_placed(two, program, dynamic):
    found = two.run(_run, program, BACK, {"inner": "eager"}, dynamic)
    _judge(found, "balanced first")


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("tables", [ALONE, BACK, TABLES["even"], TABLES["differing"]], ids=str)
def test_lists_may_change_on_one_rank_alone(two, tables, program, dynamic):
    found = two.run(_run, program, tables, {"inner": "eager"}, dynamic, 8, True)
    assert found[0] == found[1]
    reasons, exchanged, summed = found[0]
    assert GIVEN in reasons
    assert not exchanged
    assert summed == (program == "there_and_back")


@pytest.mark.further
def test_inductor_runs_them(two):
    _judge(two.run(_run, "there_and_back", TABLES["differing"], {}), "differing")


# Beside windows of NCCL: both ends of what is sent are in placements, or none is.


class _Exchanged(torch.autograd.Function):
    """Rows times themselves; backward exchanges what a gather brought in forward."""

    @staticmethod
    def forward(ctx, whole, counts, others):
        ctx.save_for_backward(whole)
        ctx.counts = counts, others
        return whole * 2

    @staticmethod
    def backward(ctx, grad):
        (whole,) = ctx.saved_tensors
        sends, gets = ctx.counts
        rows = fc.all_to_all_single(whole, gets, sends, dist.group.WORLD)
        return grad * rows.sum(), None, None


def _of_a_gather(x, rank, counts):
    whole = fc.all_gather_tensor(x * 2, 0, dist.group.WORLD)
    rows = fc.all_to_all_single(whole, [counts[rank]] * 2, [*counts], dist.group.WORLD)
    return rows.sum() + whole


def _of_a_saved_gather(x, rank, counts):
    whole = fc.all_gather_tensor_autograd(x * 2, 0, dist.group.WORLD)
    return _Exchanged.apply(whole, [*counts], [counts[rank]] * 2).sin()


def _result_that_leaves(x, rank, counts):
    ops = torch.ops._c10d_functional
    pending = ops.all_to_all_single(x * 2, [2, 2], [2, 2], dist.group.WORLD.group_name)
    return pending.view(-1), ops.wait_tensor(pending) + 1


def _beside_windows(rank, world, program, counts):
    torch.compiler.reset()
    with installed():
        backend = symmplan.backend(memory="nccl", timeout=30.0, choose="placed")
        compiled = torch.compile(program, backend=backend, dynamic=False)
        for turn in range(3):
            x = torch.arange(32.0).view(4, 8) + rank + turn
            inputs = [x.clone().requires_grad_(program is _of_a_saved_gather) for _ in range(2)]
            got, want = (
                f(i, rank, counts) for f, i in zip((compiled, program), inputs, strict=True)
            )
            for a, b in zip(*([x] if torch.is_tensor(x) else x for x in (got, want)), strict=True):
                torch.testing.assert_close(a, b)
            if program is _of_a_saved_gather:
                got.sum().backward()
                want.sum().backward()
                torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        placed = {b.op for plan in backend.plans for b in plan.problem.buffers}
        backend.release()
    return placed


@pytest.mark.long
@pytest.mark.parametrize("program", [_of_a_gather, _of_a_saved_gather, _result_that_leaves])
def test_in_nccls_memory_both_ends_are_in_placements_or_none_is(two, program):
    for placed in two.run(_beside_windows, program, (3, 5)):
        assert not any("all_to_all" in op for op in placed)
        assert any("all_gather" in op for op in placed) == (program is not _result_that_leaves)
