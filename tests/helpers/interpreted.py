"""Ranks in which Triton interprets kernels, on the CPU."""

from __future__ import annotations

import importlib.util

import pytest
from ranks import RankPool

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which interprets kernels"
)


def interpreted_pool_of(*sizes, **options):
    """A fixture of such ranks, one after the other for several sizes; see `ranks.pool_of`."""

    @pytest.fixture(scope="module", params=sizes)
    def interpreted(request):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            started = RankPool(request.param, method="spawn", **options)
        with started as pool:
            yield pool

    return interpreted
