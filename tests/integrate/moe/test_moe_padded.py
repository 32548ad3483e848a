"""Experts whose routes the host need not see: in shared memory, and by interpreted kernels.

The kernels meet by the signals that they use on devices, between real ranks that are late.
"""

from __future__ import annotations

import pytest
from expert_programs import (
    kept_rows,
    missing_rank,
    one_without,
    overflows,
    padded_calls,
    unseen,
    wider_rows,
    wrong_counts,
)
from interpreted import interpreted_pool_of, needs_triton
from ranks import RankPool
from test_moe import random_calls

import symmplan
from symmplan.errors import OptionError

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module", params=[2, 3])
def pool(request):
    with RankPool(request.param, timeout=180.0) as ranks:
        yield ranks


interpreted = interpreted_pool_of(2, 3, timeout=280.0)


@pytest.mark.parametrize(
    ("seeds", "choose", "apart"),
    [(range(8), "auto", False), (range(8, 14), "push", True), (range(14, 18), "ordinary", True)],
)
def test_padded_rows_go_where_they_are_meant_to(pool, seeds, choose, apart):
    first, *others = pool.run(padded_calls, seeds, choose, "cpu", apart)
    assert all(other == first for other in others)
    assert any(first) == (choose != "ordinary")


def test_overflow_is_told_by_all_ranks(pool):
    for texts in pool.run(overflows, "push"):
        assert set(texts) == {f"a rank gets {8 * pool.world_size} rows"}


def test_a_checkpointed_layer_keeps_no_rows(pool):
    assert pool.run(kept_rows) == [[True, False]] * pool.world_size


def _bounds(rank, world_size):
    with symmplan.expert_parallel(max_tokens=4, timeout=30.0) as experts:
        for wrong in (5, -1, 1.5):
            with pytest.raises(OptionError, match="rows is"):
                experts.routes([1] * world_size, rows=wrong)


def test_rows_that_could_not_come_back(pool):
    pool.run(_bounds)


@needs_triton
@pytest.mark.parametrize("seeds", [range(4)])
def test_kernels_move_rows_that_the_host_counts(interpreted, seeds):
    first, *others = interpreted.run(random_calls, seeds, "symmetric")
    assert all(other == first for other in others)


@needs_triton
@pytest.mark.parametrize(
    ("seeds", "apart"),
    [(range(4), False), (range(4, 7), True)]
    + [
        pytest.param(range(at, at + 20), bool(at % 40), marks=pytest.mark.slow)
        for at in range(100, 300, 20)
    ],
)
def test_kernels_move_padded_rows(interpreted, seeds, apart):
    first, *others = interpreted.run(padded_calls, seeds, "symmetric", "cpu", apart)
    assert all(other == first for other in others)
    assert all(first)


@needs_triton
def test_counts_of_kernels_are_checked_where_copies_move_rows(interpreted):
    text = f"a rank gets {8 * interpreted.world_size} rows"
    assert all(set(texts) == {text} for texts in interpreted.run(overflows, "push"))
    first, *others = interpreted.run(padded_calls, range(3), "push")
    assert all(first)
    assert all(other == first for other in others)


@needs_triton
def test_kernels_write_nothing_that_does_not_fit(interpreted):
    size = interpreted.world_size
    for texts in interpreted.run(overflows, "symmetric"):
        assert set(texts) == {f"a rank gets {8 * size} rows"}


@needs_triton
def test_kernels_run_on_all_ranks_or_on_none(interpreted):
    assert interpreted.run(one_without, "symmetric") == [True] * interpreted.world_size


@needs_triton
def test_what_nobody_asked_for_is_told_at_the_end(interpreted):
    size = interpreted.world_size
    assert interpreted.run(unseen) == [f"a rank gets {8 * size} rows"] * size


@needs_triton
def test_kernels_see_counts_that_are_none(interpreted):
    last = interpreted.world_size - 1
    assert interpreted.run(wrong_counts) == [[(last,), (last,)]] * (last + 1)


@needs_triton
def test_kernels_give_up_where_a_rank_does_not_come(interpreted):
    last = interpreted.world_size - 1
    *missing, none = interpreted.run(missing_rank)
    assert none is None
    assert missing == [(last,)] * last


@needs_triton
def test_kernels_see_that_a_rank_alone_has_wider_rows(interpreted):
    last = interpreted.world_size - 1
    *others, own = interpreted.run(wider_rows)
    assert others == [[((last,), True)] * 2] * last
    assert all(ranks != (last,) and found for ranks, found in own)
