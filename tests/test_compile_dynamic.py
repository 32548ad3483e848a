"""Sizes that are not known when a graph is compiled: planned for their bounds, or explained."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPool

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional


@pytest.fixture(scope="module")
def pair():
    with RankPool(2, timeout=120.0) as ranks:
        yield ranks


def _gathers(x, w, group):
    hidden = (x @ w).relu()
    whole = F.wait_tensor(F.all_gather_into_tensor(hidden, 2, group))
    part = F.wait_tensor(F.reduce_scatter_tensor(whole @ w, "sum", 2, group))
    (total,) = F.all_reduce_coalesced([part.sin()], "sum", group)
    return F.wait_tensor(total) * 2, F.wait_tensor(F.all_gather_into_tensor(x, 2, group))


def _run(rank, size, inner, bound):
    """Outputs right at several sizes, with one compilation."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner=inner, timeout=30.0, debug=True)
    group = dist.group.WORLD.group_name
    compiled = torch.compile(_gathers, backend=backend, fullgraph=True)
    torch.manual_seed(rank)
    w = torch.randn(8, 8) / 3
    try:
        for rows in (6, 32, 4, 18):
            x = torch.randn(rows, 8)
            expected = _gathers(x, w, group)
            limits = {} if bound is None else {"min": 2, "max": bound}
            torch._dynamo.mark_dynamic(x, 0, **limits)
            torch.testing.assert_close(compiled(x, w, group), expected, rtol=1e-4, atol=1e-5)
        return backend.stats, sorted({u.reason for p in backend.plans for u in p.unplanned})
    finally:
        backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_bounded_dimension_is_planned_for_its_bound(pair, inner):
    (stats, reasons), other = pair.run(_run, inner, 32)
    assert (stats, reasons) == other
    assert stats.graphs == stats.rendezvous == 1
    assert stats.placed >= 4
    # 64 rows of 8 floats are gathered, while what they were gathered from is no longer needed.
    assert stats.segment_bytes == stats.lower_bound_bytes >= 64 * 8 * 4
    assert not any("symbolic" in reason for reason in reasons)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_dimension_without_a_bound_is_explained(pair, inner):
    (stats, reasons), _ = pair.run(_run, inner, None)
    assert stats.placed == 0
    assert any("mark_dynamic(tensor, dim, max=...)" in reason for reason in reasons)


def _outgrown(rank, size):
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0)
    group = dist.group.WORLD.group_name
    compiled = torch.compile(_gathers, backend=backend, fullgraph=True)
    w = torch.eye(8)
    try:
        x = torch.ones(4, 8)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
        compiled(x, w, group)
        small = backend.stats
        x = torch.ones(64, 8)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        torch.testing.assert_close(compiled(x, w, group), _gathers(x, w, group))
        return small, backend.stats
    finally:
        backend.release()


def test_a_larger_bound_is_a_new_plan_on_all_ranks(pair):
    first, second = pair.run(_outgrown)
    assert first == second
    small, large = first
    assert (small.graphs, large.graphs) == (1, 2)
    assert (small.rendezvous, large.rendezvous) == (1, 2)
    assert large.segment_bytes == large.lower_bound_bytes > small.segment_bytes
