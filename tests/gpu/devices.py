"""Ranks on CUDA devices of this host, one on each: what tests of GPUs have in common."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPool


def needs_devices(count=2):
    """The marks of a test that needs so many devices."""
    missing = torch.cuda.device_count() < count
    missing = pytest.mark.skipif(missing, reason=f"needs {count} CUDA devices")
    return [pytest.mark.gpu, pytest.mark.ranks, missing]


def worlds(*counts):
    """Numbers of ranks as parameters, each skipped where there are fewer devices."""
    return [pytest.param(count, marks=needs_devices(count)) for count in counts]


def pool_on(*counts, scope="module", make=RankPool, **options):
    """A fixture: ranks over NCCL, for several counts one after the other.

    ``make(count, **options)`` starts them. What is pending ends before they do.
    """

    @pytest.fixture(scope=scope, params=worlds(*counts) if len(counts) > 1 else None)
    def pool(request):
        with make(getattr(request, "param", counts[0]), init="nccl", **options) as ranks:
            yield ranks
            RankPool.outcomes(ranks, finish)

    return pool


def finish(rank, world):
    import torch.distributed as dist

    torch.cuda.synchronize()
    dist.destroy_process_group()
