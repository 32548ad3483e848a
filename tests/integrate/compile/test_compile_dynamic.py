"""Sizes that are not known when a graph is compiled: planned for their bounds, or explained."""

from __future__ import annotations

import attrs
import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional

pair = pool_of(2, timeout=120.0)


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
    backend = symmplan.backend(inner=inner, timeout=30.0, debug=inner == "eager" or "poison")
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


@pytest.mark.long
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_dimension_without_a_bound_is_planned_for_a_size_class(pair, inner):
    """Of 6, 32, 4 and 18 rows, 6 is planned for 8, and 32 for all of them."""
    (stats, reasons), other = pair.run(_run, inner, None)
    assert (stats, reasons) == other
    assert (stats.graphs, stats.replans, stats.rendezvous) == (2, 1, 2)
    assert stats.placed >= 8
    assert stats.segment_bytes == stats.lower_bound_bytes >= 64 * 8 * 4
    assert not any("symbolic" in reason for reason in reasons)


def _unknown(rank, size):
    """A size that only the data tells has no bound at all."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0)
    group = dist.group.WORLD.group_name

    def program(x):
        return F.wait_tensor(F.all_gather_into_tensor(x.nonzero().sin(), 2, group)) + 1

    x = torch.tensor([0.0, 1.0, 2.0, 0.0])
    try:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(program, backend=backend, fullgraph=True)
            torch.testing.assert_close(compiled(x), program(x))
        return backend.stats, sorted({u.reason for p in backend.plans for u in p.unplanned})
    finally:
        backend.release()


def test_a_size_that_only_data_tells_is_explained(pair):
    (stats, reasons), _ = pair.run(_unknown)
    assert stats.placed == 0
    assert any("mark_dynamic(tensor, dim, max=...)" in reason for reason in reasons)


def _rows(compiled, group, rows, limit=None):
    x = torch.ones(rows, 8)
    if limit is not None:
        torch._dynamo.mark_dynamic(x, 0, min=2, max=limit)
    return compiled(x, torch.eye(8), group)


def _outgrown(rank, size, limits):
    import logging

    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logging.getLogger("symmplan").addHandler(handler)
    backend = symmplan.backend(inner="eager", timeout=30.0)
    group = dist.group.WORLD.group_name
    compiled = torch.compile(_gathers, backend=backend, fullgraph=True)
    found = []
    try:
        for rows, limit in zip((4, 64, 60, 4), limits, strict=True):
            got = _rows(compiled, group, rows, limit)
            torch.testing.assert_close(got, _gathers(torch.ones(rows, 8), torch.eye(8), group))
            found.append((backend.stats, sum(a.segment_bytes for a in backend._pool.arenas)))
        return found, said
    finally:
        logging.getLogger("symmplan").removeHandler(handler)
        backend.release()


@pytest.mark.parametrize("limits", [(16, 64, 64, 16), (16, None, None, None)])
def test_outgrowing_a_plan_is_said_and_planned_again_on_all_ranks(pair, limits):
    first, second = pair.run(_outgrown, limits)
    assert first == second
    ((small, before), (large, after), *later), said = first
    assert (small.graphs, large.graphs) == (1, 2)
    assert (small.replans, large.replans) == (0, 1)
    assert (small.rendezvous, large.rendezvous) == (1, 2)
    # The old segment is given back.
    assert large.segment_bytes == large.lower_bound_bytes == after > before == small.segment_bytes
    ran = {name: getattr(later[0][0], name) for name in ("iterations", "served", "copies")}
    assert later[0] == (attrs.evolve(large, **ran), after)
    ((level, text),) = said
    assert level == "WARNING"
    assert "is 64, planned were up to 16" in text
    assert "compiled and planned again, on all ranks, for up to 64" in text


def _outgrown_alone(rank, size):
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=5.0)
    group = dist.group.WORLD.group_name
    compiled = torch.compile(_gathers, backend=backend, fullgraph=True)
    try:
        _rows(compiled, group, 4, 16)
        _rows(compiled, group, 64 if rank else 8, None if rank else 16)
    finally:
        backend.release()


def test_a_rank_that_outgrows_its_plan_alone_fails_on_all(pair):
    for outcome in pair.outcomes(_outgrown_alone):
        assert outcome.error is not None
        assert outcome.error.kind in ("AgreementError", "PeerTimeoutError"), outcome.error.text
