"""Inductor's code cache knows what crosses: from run to run, and beside plain Inductor."""

from __future__ import annotations

import os

import pytest
import torch
from crossing_checks import (
    GROUPS,
    autograd_cache_wanted,
    check_grads,
    expected_of,
    in_segment,
    leaves_of,
    new_backend,
    setup,
    two_gathers,
)
from crossing_programs import _Gather
from ranks import RankPool

pytestmark = pytest.mark.ranks


def _product(x, w):
    """Its backward declares nothing, and its gradient could lie where the gathered tensor does."""
    return (_Gather.apply(x.detach(), GROUPS[0]).sin() * w).sum()


def _leaves(rank):
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(rank))
    return x, torch.ones(32, 16).requires_grad_()


def _hits(rank, world_size, sides):
    """Compile by symmplan or by plain Inductor, in turn; where the gradient lies, and the hits."""
    from torch._dynamo.utils import counters

    found = []
    for side in sides:
        backend = new_backend("inductor")
        counters.clear()
        x, w = _leaves(rank)
        run = torch.compile(
            _product, backend="inductor" if side == "plain" else backend, fullgraph=True
        )
        (grad,) = torch.autograd.grad(run(x, w), [w])
        torch.testing.assert_close(grad, _Gather.apply(x, GROUPS[0]).sin())
        found.append((in_segment(backend, grad), counters["inductor"]["fxgraph_cache_hit"]))
        if side == "moved":  # what was saved is due when the other graph is planned
            other = torch.compile(two_gathers, backend=backend, fullgraph=True)
            leaves = leaves_of(rank)
            loss = run(x, w)
            counters.clear()
            check_grads(other(*leaves), leaves, expected_of(rank))
            torch.autograd.grad(loss, [w])
            found.append((backend.stats.evacuated, counters["inductor"]["fxgraph_cache_hit"]))
        torch.distributed.barrier()
        backend.release()
    return found


def _two_gathers(rank, world_size):
    from torch._dynamo.utils import counters

    backend = new_backend("inductor")
    counters.clear()
    run = torch.compile(two_gathers, backend=backend, fullgraph=True)
    for _ in range(2):
        leaves = leaves_of(rank)
        check_grads(run(*leaves), leaves, expected_of(rank))
    stats = backend.stats
    torch.distributed.barrier()
    backend.release()
    return counters["inductor"]["fxgraph_cache_hit"], stats.evacuated, stats.crossing_bytes > 0


def _begin(rank, world_size, directory):
    """Ranks with a cache each: none finds what the other has just compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/{rank}"
    autograd_cache_wanted()
    setup(rank, world_size)


@pytest.mark.slow
def test_code_from_the_cache_is_right(tmp_path):
    with RankPool(2, timeout=180.0) as ranks:
        ranks.run(_begin, str(tmp_path))
        # The plain backward writes the gradient where it finds what was saved.
        for found in ranks.run(_hits, ["plain", "symmplan"]):
            assert not any(inside for inside, _ in found)
        assert ranks.run(_two_gathers) == [(0, 0, True)] * 2
    with RankPool(2, timeout=180.0) as ranks:  # other processes
        ranks.run(_begin, str(tmp_path))
        assert ranks.run(_two_gathers) == [(2, 0, True)] * 2
        # The same graph, planned beside what another one has saved, is not taken from the cache.
        assert ranks.run(_hits, ["moved"]) == [[(False, 2), (0, 0)]] * 2
        for found in ranks.run(_hits, ["symmplan", "plain", "symmplan"]):
            assert found == [(False, 2)] * 3
