"""What crosses from a compiled forward to its backward stays in its placement, on two ranks.

Each hazard in turn: forwards that run again, kept graphs, hooks, graph breaks, growth.
"""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from crossing_checks import (
    GROUPS,
    KIB,
    check_grads,
    expected_of,
    held_leases,
    in_segment,
    leaves_of,
    new_backend,
    setup,
    two_gathers,
)
from crossing_programs import _Gather, may_keep_graphs
from ranks import pool_of

pytestmark = pytest.mark.ranks

pool = pool_of(2, setup=setup, timeout=120.0)


# -- forward, backward --------------------------------------------------------------------------


def _in_place(rank, world_size, inner, debug):
    backend = new_backend(inner, debug=debug)
    compiled = torch.compile(two_gathers, backend=backend, fullgraph=True)
    expected = expected_of(rank)
    try:
        for _ in range(3):
            leaves = leaves_of(rank)
            loss = compiled(*leaves)
            held, lanes = held_leases(backend)
            saved = sum(in_segment(backend, t) for t in loss.grad_fn.saved_tensors)
            check_grads(loss, leaves, expected)
            del loss
            assert held_leases(backend)[0] == 0
        (plan,) = backend.plans
        plan.verify()
        summary = plan.summary()
        return backend.stats, backend.staged(), (held, lanes), saved, summary
    finally:
        backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("debug", [False, True])
def test_what_is_saved_is_not_copied(pool, inner, debug):
    first, second = pool.run(_in_place, inner, debug)
    assert first == second
    stats, staged, held, saved, summary = first
    assert staged == ()
    assert held == (2, 2)
    assert saved >= 2
    assert stats.crossing_bytes == 4 * KIB
    assert stats.evacuated == 0
    assert stats.segment_bytes == stats.lower_bound_bytes
    assert "cross" in summary


# -- several runs -------------------------------------------------------------------------------


def _runs(rank, world_size, order, inner="eager"):
    """Two forwards, then their backwards in an order; the second inputs differ."""
    backend = new_backend(inner, debug=True)
    compiled = torch.compile(two_gathers, backend=backend, fullgraph=True)
    scales = (1.0, 0.5)
    expected = [expected_of(rank, scale=s) for s in scales]
    try:
        leaves = [leaves_of(rank, scale=s) for s in scales]
        losses = [compiled(*pair) for pair in leaves]
        for i in order:
            check_grads(losses[i], leaves[i], expected[i])
            losses[i] = None
        assert held_leases(backend)[0] == 0
        return backend.stats.evacuated, backend.evacuated()
    finally:
        backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_forward_twice_then_backward_twice(pool, order, inner):
    for evacuated, why in pool.run(_runs, order, inner):
        # The second forward needs the first's bytes; so does the first backward the second's.
        assert evacuated == (2 if order == (1, 0) else 4)
        assert "its forward ran again" in why[0][1]


def _fixed(rank, world_size):
    """As if Inductor made CUDA graphs of them."""
    from symmplan.integrate.compile.compiled_graph import CompiledGraph

    rewrite = functools.partialmethod(CompiledGraph.rewrite, fixed=True)
    with mock.patch.object(CompiledGraph, "rewrite", rewrite):
        return _runs(rank, world_size, (1, 0))


@pytest.mark.further
def test_for_cuda_graphs_it_is_copied_back(pool):
    for evacuated, why in pool.run(_fixed):
        assert evacuated == 4
        assert [count for count, _ in why] == [2, 2]
        assert "CUDA graph" in why[1][1]


def _kept(rank, world_size, inner):
    backend = new_backend(inner, debug=True)
    compiled = torch.compile(two_gathers, backend=backend, fullgraph=True)
    expected = expected_of(rank)
    try:
        with may_keep_graphs():
            leaves = leaves_of(rank)
            loss = compiled(*leaves)
            for keep in (True, True, False):
                check_grads(loss, leaves, expected, keep=keep)
        return backend.evacuated()
    finally:
        backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_kept_graph_is_used_again(pool, inner):
    for ((count, why),) in pool.run(_kept, inner):
        assert count == 2
        assert "retain_graph" in why


def _used_twice(rank, world_size):
    """A compiled part that a model uses three times, as when each layer is compiled."""
    backend = new_backend(debug=True)

    def layer(x, w):
        return (_Gather.apply(torch.tanh(x @ w), GROUPS[0]).square() @ w)[: x.shape[0]]

    def model(part, x, w):
        for _ in range(3):
            x = part(x, w)
        return x.sum()

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    expected = expected_of(rank, lambda *leaves: model(layer, *leaves))
    try:
        for _ in range(2):
            leaves = leaves_of(rank)
            check_grads(model(compiled, *leaves), leaves, expected)
        return backend.stats.evacuated
    finally:
        backend.release()


@pytest.mark.long
def test_a_part_used_three_times(pool):
    assert pool.run(_used_twice) == [2 * 2, 2 * 2]


def _evaluated(rank, world_size):
    """A forward without gradients between a forward and its backward, compiled before them."""
    backend = new_backend(debug=True)
    compiled = torch.compile(two_gathers, backend=backend, fullgraph=True)
    expected = expected_of(rank)
    try:
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(compiled(*leaves_of(rank)), expected[0])
            leaves = leaves_of(rank)
            loss = compiled(*leaves)
            with torch.no_grad():
                torch.testing.assert_close(compiled(*leaves_of(rank)), expected[0])
            check_grads(loss, leaves, expected)
        return backend.stats
    finally:
        backend.release()


@pytest.mark.further
def test_evaluation_between_forward_and_backward(pool):
    first, second = pool.run(_evaluated)
    assert first == second
    assert first.evacuated > 0


def _unused(rank, world_size):
    """Losses that nobody differentiates."""
    backend = new_backend(debug=True)
    compiled = torch.compile(two_gathers, backend=backend, fullgraph=True)
    expected = expected_of(rank)
    try:
        for _ in range(4):
            torch.testing.assert_close(compiled(*leaves_of(rank)).detach(), expected[0])
        held = held_leases(backend)
        leaves = leaves_of(rank)
        check_grads(compiled(*leaves), leaves, expected)
        return held, backend.stats.evacuated
    finally:
        backend.release()


def test_backward_that_never_runs(pool):
    assert pool.run(_unused) == [((0, 2), 0)] * 2


def _checkpointed(rank, world_size, inside, inner):
    from torch.utils.checkpoint import checkpoint

    backend = new_backend(inner, debug=True)
    expected = expected_of(rank)

    def wrapped(*leaves):
        return checkpoint(two_gathers, *leaves, use_reentrant=False)

    if inside:
        run = torch.compile(wrapped, backend=backend, fullgraph=True)
    else:
        compiled = torch.compile(two_gathers, backend=backend, fullgraph=True)

        def run(*leaves):
            return checkpoint(compiled, *leaves, use_reentrant=False)

    try:
        for _ in range(2):
            leaves, more = leaves_of(rank), leaves_of(rank)
            loss, other = run(*leaves), run(*more)
            check_grads(other, more, expected)
            check_grads(loss, leaves, expected)
        return backend.stats, backend.evacuated()
    finally:
        backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpointing(pool, inside, inner):
    first, second = pool.run(_checkpointed, inside, inner)
    assert first == second
    if not inside:
        ((count, why),) = first[1]
        assert count > 0
        assert "hooks" in why


# -- several graphs -----------------------------------------------------------------------------


def _broken(rank, world_size, inner):
    """Three graphs, forward in order and backward in reverse, which grow the segment meanwhile."""
    backend = new_backend(inner, debug=True)

    def stage(x, w):
        return _Gather.apply(torch.tanh(x @ w), GROUPS[0]).square() @ w

    def model(x, w):
        x = stage(x, w)
        torch._dynamo.graph_break()
        x = stage(x, w)
        torch._dynamo.graph_break()
        return stage(x, w).sum()

    compiled = torch.compile(model, backend=backend, dynamic=False)
    expected = expected_of(rank, model)
    try:
        for _ in range(3):
            leaves = leaves_of(rank)
            loss = compiled(*leaves)
            held = held_leases(backend)
            check_grads(loss, leaves, expected)
            del loss
        for plan in backend.plans:
            plan.verify()
        return backend.stats, held, held_leases(backend)[0]
    finally:
        backend.release()


@pytest.mark.further
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_graph_breaks_evacuate_nothing(pool, inner):
    first, second = pool.run(_broken, inner)
    assert first == second
    stats, held, after = first
    assert stats.graphs >= 3
    assert stats.crossing_bytes == (2 + 4 + 8) * KIB
    assert (held, after) == ((3, 3), 0)
    assert stats.evacuated == 0
    assert stats.segment_bytes == stats.lower_bound_bytes
    assert stats.rendezvous > 1  # it grew while tensors were saved in it


def _two_models(rank, world_size):
    """Trained in turn when they were compiled, then together."""
    backend = new_backend(debug=True)
    models = [two_gathers, lambda x, w: two_gathers(x * 2, w) * 3]
    compiled = [torch.compile(m, backend=backend, fullgraph=True) for m in models]
    expected = [expected_of(rank, m) for m in models]
    try:
        for run, wanted in zip(compiled, expected, strict=True):
            leaves = leaves_of(rank)
            check_grads(run(*leaves), leaves, wanted)
        before = backend.stats
        both = [leaves_of(rank), leaves_of(rank)]
        losses = [run(*leaves) for run, leaves in zip(compiled, both, strict=True)]
        for loss, leaves, wanted in zip(losses[::-1], both[::-1], expected[::-1], strict=True):
            check_grads(loss, leaves, wanted)
        return before, backend.evacuated()
    finally:
        backend.release()


@pytest.mark.further
def test_models_that_meet_later_share_and_evacuate(pool):
    for before, ((count, why),) in pool.run(_two_models):
        assert before.segment_bytes == before.crossing_bytes // 2  # one after the other
        assert before.evacuated == 0
        assert count == 2
        assert "another graph" in why


def _recompiled(rank, world_size):
    """Shapes that come one after the other share one set of segments."""
    backend = new_backend(debug=True)
    compiled = torch.compile(two_gathers, backend=backend, fullgraph=True, dynamic=False)
    sizes = []
    try:
        for rows in (8, 16, 4, 32, 8):
            leaves = leaves_of(rank, rows=rows)
            check_grads(compiled(*leaves), leaves, expected_of(rank, rows=rows))
            sizes.append(sum(a.segment_bytes for a in backend._pool.arenas))
        return sizes, backend.stats
    finally:
        backend.release()


@pytest.mark.further
def test_recompilations_share(pool):
    (sizes, stats), other = pool.run(_recompiled)
    assert (sizes, stats) == other
    assert sizes == [2 * KIB, 4 * KIB, 4 * KIB, 8 * KIB, 8 * KIB]
    assert stats.evacuated == 0


def _dynamic(rank, world_size):
    backend = new_backend(debug=True)
    compiled = torch.compile(two_gathers, backend=backend, fullgraph=True)
    try:
        for rows in (8, 16, 4, 12):
            x, w = leaves_of(rank, rows=rows)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=32)
            check_grads(compiled(x, w), (x, w), expected_of(rank, rows=rows))
        return backend.stats
    finally:
        backend.release()


@pytest.mark.further
def test_dynamic_shapes_cross(pool):
    first, second = pool.run(_dynamic)
    assert first == second
    assert first.graphs == 1
    assert first.crossing_bytes == 8 * KIB
    assert first.evacuated == 0
