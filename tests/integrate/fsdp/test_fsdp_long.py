"""Fifty steps of AdamW: the bits of plain FSDP2, and no further from exact sums than it is."""

from __future__ import annotations

import pytest
import torch
from fsdp_models import Net, batch, both, removed, shard, train
from ranks import RankPool
from torch.distributed.fsdp import MixedPrecisionPolicy

pytestmark = pytest.mark.ranks

STEPS = 50


def fifty(rank, world, algorithm):
    return both(
        lambda: shard(Net()), lambda *args: train(*args, steps=STEPS), rank, choose=algorithm
    )


def error(model, rank, world):
    """How far gradients are from those in 64 bits at the same parameters, on average."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exact = Net().double()
    far = 0.0
    for step in range(STEPS):
        model(batch(step, rank)).float().pow(2).mean().backward()
        with torch.no_grad():
            for mine, whole in zip(exact.parameters(), model.parameters(), strict=True):
                mine.copy_(whole.full_tensor())
        losses = [exact(batch(step, r).double()).pow(2).mean() for r in range(world)]
        torch.stack(losses).mean().backward()
        pairs = zip(exact.parameters(), model.parameters(), strict=True)
        off = [(a.grad - b.grad.full_tensor().double(), a.grad) for a, b in pairs]
        far += float(sum(d.square().sum() for d, _ in off) / sum(g.square().sum() for _, g in off))
        exact.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return (far / STEPS) ** 0.5


def errors(rank, world, algorithm, dtype):
    """Of plain FSDP2, and of symmplan."""
    import symmplan

    found = []
    for placed in (False, True):
        torch.manual_seed(7)
        model = shard(Net(), mp_policy=MixedPrecisionPolicy(dtype, dtype))
        if not placed:
            found.append(error(model, rank, world))
            continue
        with removed(symmplan.fsdp.apply(model, choose=algorithm, timeout=30.0)) as handle:
            found.append(error(model, rank, world))
            assert handle.stats.served > STEPS
    return found


@pytest.mark.further
@pytest.mark.parametrize("algorithm", ["push", "placed"])
def test_sums_of_two_ranks_have_the_same_bits(algorithm):
    with RankPool(2) as pool:
        for result in pool.run(fifty, algorithm):
            assert result["differences"] == []


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["push", "placed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_more_are_no_further_from_exact_ones(dtype, algorithm):
    with RankPool(3) as pool:
        for plain, placed in pool.run(errors, algorithm, dtype):
            assert 0 < placed <= 1.05 * plain
