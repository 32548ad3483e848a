"""Crossing activations that others need or hold: ops of the backward, users, kept parameters."""

from __future__ import annotations

import pytest
import torch
from crossing_checks import (
    GROUPS,
    KIB,
    check_grads,
    expected_of,
    in_segment,
    leaves_of,
    new_backend,
    setup,
    two_gathers,
)
from crossing_programs import F, _Gather, _Keep, _Push, _Reduce, _wait
from ranks import pool_of

pytestmark = pytest.mark.ranks

pool = pool_of(2, setup=setup, timeout=120.0)


# -- ops of the backward that need it in place --------------------------------------------------


def _needed(rank, world_size, inner):
    backend = new_backend(inner, debug=True)

    def model(x, w):
        return (_Keep.apply(x @ w, GROUPS[0]) @ w).sum()

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = expected_of(rank, model)
    try:
        leaves = leaves_of(rank)
        check_grads(compiled(*leaves), leaves, expected)
        once = backend.stats
        runs = [leaves_of(rank) for _ in range(2)]
        losses = [compiled(*leaves) for leaves in runs]
        for loss, leaves in zip(losses, runs, strict=True):
            check_grads(loss, leaves, expected)
        return once, backend.evacuated()
    finally:
        backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_collective_of_the_backward_takes_what_was_saved(pool, inner):
    first, second = pool.run(_needed, inner)
    assert first == second
    once, why = first
    assert (once.staged, once.evacuated) == (0, 0)
    assert once.crossing_bytes == 2 * KIB
    assert [w.partition(",")[0].partition(";")[0] for _, w in why] == [
        "its forward ran again before its backward",
        "it had been copied out",
    ]


class _Late(torch.autograd.Function):
    """Its backward reads what the peer saved, without meeting it first."""

    @staticmethod
    def forward(ctx, x, group):
        whole = _wait(F.all_gather_into_tensor(x.contiguous(), 2, group))
        ctx.save_for_backward(whole)
        ctx.group = group
        return whole.sin()

    @staticmethod
    def backward(ctx, grad):
        (whole,) = ctx.saved_tensors
        return torch.ops.symmplan_late.peek(whole, grad, ctx.group), None


def _peeked(rank, world_size):
    import time

    import symmplan

    @symmplan.symm_args("x", group="group_name")
    @torch.library.custom_op("symmplan_late::peek", mutates_args=())
    def peek(x: torch.Tensor, y: torch.Tensor, group_name: str) -> torch.Tensor:
        from symmplan.memory import locate

        half = x.shape[0] // 2
        if locate(x) is None:
            return (x * y)[half:]
        placed = symmplan.placed.handle(x, group_name)
        return (placed.peer((placed.rank + 1) % 2) * y)[half:]

    @peek.register_fake
    def _(x, _y, _group_name):
        return x.new_empty(x.shape[0] // 2, *x.shape[1:])

    def model(x, w):
        return (_Late.apply(x @ w, GROUPS[0]) @ w).sum()

    backend = new_backend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = [expected_of(rank, model, scale=s) for s in (1.0, 2.0)]
    try:
        runs = [leaves_of(rank, scale=s) for s in (1.0, 2.0)]
        losses = [compiled(*leaves) for leaves in runs]
        time.sleep(0.5 * rank)  # rank 0 must not read what rank 1 has not yet copied back
        for loss, leaves, wanted in zip(losses, runs, expected, strict=True):
            check_grads(loss, leaves, wanted)
        torch.distributed.barrier()
        return backend.evacuated()
    finally:
        backend.release()


@pytest.mark.long
def test_peers_read_what_was_copied_back(pool):
    first, second = pool.run(_peeked)
    assert first == second
    assert "needs it in its placement" in first[-1][1]


# -- other holders ------------------------------------------------------------------------------


def _returned(rank, world_size, inner):
    """A backward that returns what was saved as a gradient, which is kept beyond the next run."""

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            whole = _wait(F.all_gather_into_tensor(x.contiguous(), 2, group))
            ctx.save_for_backward(whole)
            return whole[: x.shape[0]] * 1

        @staticmethod
        def backward(ctx, _grad):
            (whole,) = ctx.saved_tensors
            return whole[: whole.shape[0] // 2], None

    def model(x, w):
        return (Odd.apply(x, GROUPS[0]) @ w).sum()

    backend = new_backend(inner)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = expected_of(rank, model)
    try:
        x, w = leaves_of(rank)
        compiled(x, w).backward()
        more = leaves_of(rank, scale=3.0)
        compiled(*more).backward()
        torch.distributed.barrier()
        torch.testing.assert_close(x.grad, expected[1][0])
        return backend.stats.evacuated, backend.stats.crossing_bytes
    finally:
        backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_gradient_is_no_view_of_a_placement(pool, inner):
    assert pool.run(_returned, inner) == [(0, 2 * KIB)] * 2


def _aliased(rank, world_size):
    import symmplan

    backend = new_backend()
    compiled = torch.compile(two_gathers, backend=backend, fullgraph=True)
    try:
        loss = compiled(*leaves_of(rank))
        views = [t.detach() for t in loss.grad_fn.saved_tensors if in_segment(backend, t)]
        with pytest.raises(symmplan.errors.RunError, match="view of a tensor saved") as caught:
            compiled(*leaves_of(rank))
        del views, loss
        leaves = leaves_of(rank)
        check_grads(compiled(*leaves), leaves, expected_of(rank))
        return caught.value.fix
    finally:
        backend.release()


def test_a_view_that_cannot_move_is_an_error(pool):
    for fix in pool.run(_aliased):
        assert "clone the saved tensors that you keep" in fix


def _shown(rank, world_size):
    """The user gets what is saved, too: one copy serves both."""
    backend = new_backend(debug=True)

    def model(x, w):
        whole = _Gather.apply(x @ w, GROUPS[0])
        return (whole.sin() @ w).sum(), whole

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = expected_of(rank, lambda *leaves: model(*leaves)[0])
    try:
        leaves = leaves_of(rank)
        loss, whole = compiled(*leaves)
        kept = whole.detach().clone()
        compiled(*leaves_of(rank, scale=2.0))
        torch.testing.assert_close(whole.detach(), kept)
        check_grads(loss, leaves, expected)
        return backend.stats.crossing_bytes, [reason for *_, reason in backend.staged()]
    finally:
        backend.release()


def test_what_the_user_sees_is_copied_out(pool):
    assert pool.run(_shown) == [(0, ["it leaves the graph"])] * 2


def _released(rank, world_size):
    import symmplan

    backend = new_backend()
    compiled = torch.compile(two_gathers, backend=backend, fullgraph=True)
    leaves = leaves_of(rank)
    loss = compiled(*leaves)
    backend.release()
    finite = all(bool(t.isfinite().all()) for t in loss.grad_fn.saved_tensors)
    with pytest.raises(symmplan.errors.ReleasedError) as caught:
        torch.autograd.grad(loss, leaves)
    return finite, str(caught.value), backend.stats.evacuated


@pytest.mark.further
def test_release_before_backward(pool):
    for finite, text, evacuated in pool.run(_released):
        assert finite
        assert "released" in text
        assert evacuated == 0  # of the new, empty set of segments


def _unmet(rank, world_size):
    """What peers pushed without meeting crosses, and is evacuated."""
    backend = new_backend(debug=True)

    def model(x, w):
        return (_Push.apply(x @ w, GROUPS[0]).sin() @ w).sum()

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    scales = (1.0, 0.5, 2.0)
    expected = [expected_of(rank, model, scale=s) for s in scales]
    try:
        for _ in range(3):
            runs = [leaves_of(rank, scale=s) for s in scales]
            losses = [compiled(*leaves) for leaves in runs]
            for loss, leaves, wanted in zip(losses, runs, expected, strict=True):
                check_grads(loss, leaves, wanted)
        return backend.stats
    finally:
        backend.release()


def test_what_peers_push_crosses(pool):
    first, second = pool.run(_unmet)
    assert first == second
    assert first.crossing_bytes == KIB
    assert first.evacuated > 0


# -- with kept parameters -----------------------------------------------------------------------


class _Layer(torch.nn.Module):
    """Peers read one parameter, another is all-reduced; what is gathered is saved for backward."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.read = torch.nn.Parameter(torch.randn(16, 16) / 4)
        self.summed = torch.nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        read = torch.ops.symmplan_test.peer_mean(self.read.detach(), GROUPS[0])
        whole = _Gather.apply(x @ read @ _Reduce.apply(self.summed, GROUPS[0]), GROUPS[0])
        kept = _Keep.apply(whole.square()[: x.shape[0]] @ self.read, GROUPS[0])
        return (kept * self.summed.mean()).square().sum() + (self.read * read).sum()


def _trained(rank, world_size, inner):
    """Parameters and activations in placements at once; then what makes both of them move."""
    backend = new_backend(inner, bind=True, debug=True)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))

    def train(model, run):
        losses, states = [], []
        for step in range(6):
            if step == 3:  # the old parameters are still looked at
                states.append(model.state_dict())
                halves = {k: v * 0.5 for k, v in states[0].items()}
                model.load_state_dict(halves, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            loss = run(x) + (run(2 * x) if step > 1 else 0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step == 1:
                before = backend.stats
        return losses, [p.detach().clone() for p in model.parameters()], states, before

    try:
        models = [_Layer(rank), _Layer(rank)]
        expected = train(models[0], models[0])
        got = train(models[1], torch.compile(models[1], backend=backend, fullgraph=True))
        torch.testing.assert_close(got[:3], expected[:3], rtol=1e-4, atol=1e-5)
        for plan in backend.plans:
            plan.verify()
        return got[3], backend.stats
    finally:
        backend.release()


@pytest.mark.further
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_kept_parameters_and_crossing_activations(pool, inner):
    first, second = pool.run(_trained, inner)
    assert first == second
    before, after = first
    assert before.kept == 2
    assert before.crossing_bytes > 0
    assert (before.missed, before.evacuated) == (0, 0)
    assert after.missed > 0
    assert after.evacuated > 0
