"""FSDP2 in planned placements: everything it can do, bit for bit as without symmplan."""

from __future__ import annotations

import fsdp_programs as programs
import pytest
import torch
from ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four():
    with RankPool(4) as pool:
        yield pool


def check(results, *, plain=0, staged=0, replans=0, rendezvous=1, departures=0):
    """Same bits on every rank, and how the collectives were served.

    A number must be met exactly; None leaves it open.
    """
    for result in results:
        assert result["differences"] == []
        stats = result["stats"]
        assert stats["placed"] > 0
        assert stats["placed"] == stats["bound"] + stats["staged"]
        assert result["barriers"] == 0
        for name, wanted in {
            "plain": plain,
            "staged": staged,
            "replans": replans,
            "rendezvous": rendezvous,
            "departures": departures,
        }.items():
            assert wanted is None or stats[name] == wanted, (name, stats)
        peak, bound, unshared = result["bytes"]
        assert peak == bound <= unshared
    first = results[0]["stats"]
    assert all(r["stats"] == first for r in results)
    return first


def test_every_collective_of_every_later_step_is_placed_in_one_segment(two):
    stats = check(two.run(programs.plain))
    # 4 gathers in forward, 3 in backward (the root keeps its parameters), 4 reduce-scatters.
    assert stats["recorded"] == 11
    assert stats["placed"] == 3 * 11
    assert stats["unshared_bytes"] > 3 * stats["segment_bytes"]


@pytest.mark.parametrize(
    ("param", "reduce", "output"),
    [
        (torch.bfloat16, None, None),
        (torch.bfloat16, torch.float32, None),
        (torch.float16, torch.float32, torch.float32),
        (None, torch.bfloat16, torch.bfloat16),
    ],
)
def test_mixed_precision(two, param, reduce, output):
    check(two.run(programs.mixed, param, reduce, output))


@pytest.mark.parametrize("after_forward", [True, False])
def test_reshard_after_forward(two, after_forward):
    check(two.run(programs.reshard, after_forward))


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (2, 0), (0, 2), (3, 3)])
def test_prefetch_lists(two, forward, backward):
    check(two.run(programs.prefetch, forward, backward))


@pytest.mark.parametrize("reshard_after", [True, False])
@pytest.mark.parametrize("sync", [True, False])
def test_gradient_accumulation(two, sync, reshard_after):
    check(two.run(programs.accumulation, sync, reshard_after), departures=None)


@pytest.mark.parametrize(
    "name",
    [
        "frozen",
        "tied",
        "nested",
        "root_only",
        "no_root",
        "several_forwards",
        "state_dict",
        "offload",
        "clipping",
        "divide_factor",
    ],
)
def test_kinds_of_models_and_steps(two, name):
    check(two.run(getattr(programs, name)))


@pytest.mark.parametrize("outside", [True, False])
def test_activation_checkpointing(two, outside):
    check(two.run(programs.checkpointed, outside))


@pytest.mark.parametrize("async_op", [True, False])
def test_unsharding_by_hand(two, async_op):
    check(two.run(programs.explicit_unshard, async_op))
