"""The compile backend on unusual forms of ops: out variants, subgraphs, stray waits, bool."""

from __future__ import annotations

import pytest
import torch
from ranks import RanksFailed, pool_of

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional
T = torch.ops.symmplan_test


def _gather_out(x, group, size):
    out = torch.zeros(16, 8)
    gathered = F.wait_tensor(F.all_gather_into_tensor_out(x.relu(), size, group, out=out[4:12]))
    return gathered + 1, out * 2


def _scatter_out(x, group, size):
    out = x.new_empty(2, 8)
    return F.wait_tensor(F.reduce_scatter_tensor_out(x.sin(), "sum", size, group, out=out)) + 1


def _only_in_place(x, group, _size):
    h = x.relu()
    T.bump(h, group)
    return h + 1


def _out_that_is_returned(x, group, _size):
    return T.scale(x.relu(), group) + 1, T.peer_sum(x.sin(), group) * 2


def _branches(x, group, size):
    def gather(t):
        return F.wait_tensor(F.all_gather_into_tensor(t.sin(), size, group)) + 1

    return torch.cond(x.sum() > -1e9, gather, lambda t: torch.cat([t, t]), (x,))


def _raw_and_waited(x, group, size):
    started = F.all_gather_into_tensor(x.relu(), size, group)
    return started, F.wait_tensor(started) + 1


def _view_before_wait(x, group, size):
    started = F.all_gather_into_tensor(x.relu(), size, group)
    view = started[:2]
    return view, F.wait_tensor(started) + 1


def _waited_twice(x, group, size):
    started = F.all_gather_into_tensor(x.relu(), size, group)
    return F.wait_tensor(started), F.wait_tensor(started)


def _waited_outside(x, group, size):
    return F.all_gather_into_tensor(x.relu(), size, group), x + 1


def _sized_by_meta(x, group, size):
    """A size comes from a tensor on the meta device, as from a model that was not loaded."""
    like = torch.empty_like(x, device="meta")
    gathered = F.wait_tensor(F.all_gather_into_tensor(x.sin(), size, group))
    return gathered.view(-1, *like.shape).cos()


def _sized_otherwise(x, group, size):
    gathered = F.wait_tensor(F.all_gather_into_tensor(x.sin(), size, group))
    return gathered.view(-1, *x.shape).cos()


def _constants_and_meta(_x, group, size):
    like = torch.empty(size, 3, 2, device="meta")
    whole = F.wait_tensor(F.all_gather_into_tensor(torch.arange(6.0), size, group))
    return whole.view(like.shape) * 2


def _constants(_x, group, size):
    whole = F.wait_tensor(F.all_gather_into_tensor(torch.arange(6.0), size, group))
    return whole.view(size, 3, 2) * 2


def _gathered_on_meta(x, group, size):
    """A collective of sizes beside one of numbers."""
    like = torch.empty_like(x, device="meta")
    sizes = F.wait_tensor(F.all_gather_into_tensor(like * 2, size, group))
    return F.wait_tensor(F.all_gather_into_tensor(x.sin(), size, group)).view(sizes.shape) + 1


def _bool(x, group, size):
    return F.wait_tensor(F.all_gather_into_tensor(x > 0, size, group)).clone()


def _compare(rank, size, program, inner):
    """Run a program plainly and compiled; its statistics, and why tensors were left out."""
    import custom_ops
    import torch.distributed as dist

    import symmplan

    custom_ops.load()
    torch._dynamo.reset()
    torch.manual_seed(rank)
    x = torch.randn(4, 8)
    group = dist.group.WORLD.group_name

    def settled(results):
        return torch.utils._pytree.tree_map(F.wait_tensor, results)

    expected = settled(program(x.clone(), group, size))
    backend = symmplan.backend(inner=inner, timeout=30.0, debug=inner == "eager" or "poison")
    compiled = torch.compile(lambda t: program(t, group, size), backend=backend, fullgraph=True)
    try:
        for _ in range(2):
            got = settled(compiled(x.clone()))
            dist.barrier()
            for arena in backend._pool.arenas:
                for segment in arena.segments.values():
                    segment.tensor.fill_(255)  # results must not lie there
            torch.testing.assert_close(got, expected)
            dist.barrier()
        return backend.stats, sorted({u.reason for p in backend.plans for u in p.unplanned})
    finally:
        backend.release()


pair = pool_of(2, timeout=120.0)

#: Memory of one process: collectives stay asynchronous there.
single = pool_of(1, timeout=120.0)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize(
    "program", [_gather_out, _scatter_out, _only_in_place, _out_that_is_returned]
)
def test_out_and_in_place_forms_are_planned(pair, program, inner):
    try:
        first, second = pair.run(_compare, program, inner)
    except RanksFailed as error:
        if "We only support functionalizing" not in str(error):
            raise
        pytest.skip("this torch does not compile collectives with an out argument at all")
    assert first == second
    assert first[0].placed >= 1


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_what_branches_declare_is_counted_and_explained(pair, inner):
    (stats, reasons), _ = pair.run(_compare, _branches, inner)
    assert stats.placed == 0
    assert stats.unplanned == 2
    assert any("inside true_graph_0" in reason for reason in reasons)


@pytest.mark.parametrize(
    "program", [_raw_and_waited, _view_before_wait, _waited_twice, _waited_outside]
)
def test_asynchronous_results_leave_no_placement_behind(single, program):
    ((stats, reasons),) = single.run(_compare, program, "eager")
    assert stats.unplanned >= 1
    assert any("wait" in reason for reason in reasons)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_graph_of_constants_has_no_other_inputs_than_segments(pair, inner):
    for stats, _ in pair.run(_compare, _constants, inner):
        assert stats.placed == 1


@pytest.mark.parametrize(
    ("program", "without", "inner"),
    [
        (_sized_by_meta, _sized_otherwise, "eager"),
        (_constants_and_meta, _constants, "eager"),
        pytest.param(_sized_by_meta, _sized_otherwise, "inductor", marks=pytest.mark.further),
        pytest.param(_constants_and_meta, _constants, "inductor", marks=pytest.mark.further),
    ],
)
def test_a_meta_tensor_inside_changes_nothing(pair, program, without, inner):
    for (found, reasons), (wanted, others) in zip(
        *(pair.run(_compare, p, inner) for p in (program, without)), strict=True
    ):
        assert found.placed == wanted.placed == 1
        assert found.served == wanted.served
        assert reasons == others


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_collective_of_meta_tensors_is_left_out_and_explained(pair, inner):
    for stats, reasons in pair.run(_compare, _gathered_on_meta, inner):
        assert stats.placed == 1
        assert "it is on device meta, and symmetric memory is on cpu" in reasons


@pytest.mark.further
def test_bool_stays_bool_through_inductor(single):
    ((stats, _),) = single.run(_compare, _bool, "inductor")
    assert stats.placed == 2


def _two_gathers(x, group, size):
    """Two gathers under way at once; what is still under way after the first wait, as a tensor."""
    first = F.all_gather_into_tensor(x.relu(), size, group)
    second = F.all_gather_into_tensor(x.sin(), size, group)
    one = F.wait_tensor(first) + 1
    left = T.in_flight(one)
    two = F.wait_tensor(second) + 1
    third = F.wait_tensor(F.all_gather_into_tensor(one + two, size, group))
    return one, left, two, third * 2


def test_a_wait_ends_its_own_collective_only(single):
    ((stats, _),) = single.run(_compare, _two_gathers, "eager")
    assert stats.placed == 6


def _died_early(rank, size, inner, debug):
    """Results where capture has forgotten the last reader of a gathered tensor."""
    import torch.distributed as dist
    from attrs import evolve

    import symmplan
    from symmplan.integrate.compile import compiled_graph

    group = dist.group.WORLD.group_name
    capture = compiled_graph.capture_fx

    def forgetful(*args, **kwargs):
        captured = capture(*args, **kwargs)
        problem = captured.problem
        last = next(a for a in reversed(problem.accesses) if not a.write)
        kept = tuple(a for a in problem.accesses if a is not last)
        return evolve(captured, problem=evolve(problem, accesses=kept))

    torch._dynamo.reset()
    backend = symmplan.backend(inner=inner, timeout=30.0, debug=debug and "poison")
    x, w = torch.ones(4, 8), torch.eye(8)
    compiled_graph.capture_fx = forgetful
    try:
        compiled = torch.compile(
            lambda x, w: F.wait_tensor(F.all_gather_into_tensor(x.relu(), size, group)) @ w,
            backend=backend,
        )
        return compiled(x, w).sum().item()
    finally:
        compiled_graph.capture_fx = capture
        dist.barrier()
        backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_debugging_shows_a_lifetime_that_is_too_short(pair, inner):
    assert pair.run(_died_early, inner, False) == [64.0, 64.0]
    assert all(found != found for found in pair.run(_died_early, inner, True))  # not a number
