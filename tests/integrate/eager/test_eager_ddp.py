"""Distributed data parallel in an eager session."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import pool_of
from torch import nn

import symmplan

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=120.0)


def _trained(rank, world, before, iterations, options):
    """Gradients of each iteration in a session, and without one; or the session's error."""
    found = []
    for serves in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(300, 300) for _ in range(4)]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)

        def iterate(i, model=model, found=found):
            model.zero_grad()
            model(torch.full((2, 300), rank + i + 1.0)).sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])

        for i in range(before):
            iterate(i)
        if not serves:
            for i in range(iterations):
                iterate(before + i)
            continue
        try:
            with symmplan.eager(memory="shm", timeout=30.0, **options) as session:
                for i in range(iterations):
                    iterate(before + i)
                    session.step()
                stats = session.stats
        except symmplan.errors.RunError as error:
            return str(error)
    half = len(found) // 2
    same = [all(map(torch.equal, a, b)) for a, b in zip(found[:half], found[half:], strict=True)]
    dist.barrier()
    return same, stats.served, stats.iterations, stats.plain


@pytest.mark.parametrize("options", [{}, {"collectives": "process group"}])
def test_it_is_served_after_two_iterations(two, options):
    for same, served, iterations, plain in two.run(_trained, 2, 5, options):
        assert same == [True] * 7
        assert iterations == 5
        # Of the process group's own works it takes futures, whose end is not seen: they run, but in
        # ordinary memory. Else all buckets are served, in each iteration behind the recorded one.
        ran, others = (plain, served) if options else (served, plain)
        assert ran >= 2 * 4
        assert not others


@pytest.mark.parametrize("before", [0, 1])
def test_before_that_the_error_says_so(two, before):
    for text in two.run(_trained, before, 3, {}):
        assert "DistributedDataParallel" in text
        assert "enter the session after two iterations" in text
