"""The ways in which FSDP2's collectives run: forced, measured, and agreed."""

from __future__ import annotations

import fsdp_ways as ways
import pytest
import torch
from ranks import RankPool

pytestmark = pytest.mark.ranks

SKIPS = [(0, 2), (0, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)]


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("mixed", (torch.bfloat16, torch.bfloat16, None)),
        ("mixed", (torch.bfloat16, torch.float32, None)),
        ("accumulation", (True, False)),
        ("prefetch", (2, 2)),
        ("several_forwards", ()),
        ("nested", ()),
        ("failing_step", ()),
        ("uneven_use", ([(0, 1, 2), (0, 1, 2), (2, 1, 0), (0, 0, 1), (0, 1, 2)],)),
        ("uneven_use", (SKIPS,)),
        ("holder", ((0,), True, True)),
        ("holder", ((0, 1), True, False)),
    ],
)
def test_all_to_all_and_sum_in_all_kinds_of_programs(two, name, args):
    """The sum of two parts is rounded once, as gloo does it, so the bits are the same."""
    for result in two.run(ways.forced, "copy engine", name, *args):
        assert result["differences"] == []
        stats = result["stats"]
        assert stats["served"] > 0
        assert stats["plain"] == (3 if args == (SKIPS,) else 0)
        if name == "holder":
            assert result["intact"]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("accumulation", (True, False)),
        ("mixed", (torch.bfloat16, torch.bfloat16, None)),
        ("mixed", (torch.bfloat16, torch.float32, None)),
        ("mixed", (torch.float16, torch.float16, None)),
        ("accumulation", (False, True)),
        ("several_forwards", ()),
        ("failing_step", ()),
        ("uneven_use", ([(0, 1, 2), (0, 1, 2), (2, 1, 0), (0, 0, 1), (0, 1, 2)],)),
        ("uneven_use", (SKIPS,)),
        ("uneven", ()),
        ("placements", ()),
        ("offload", ()),
        ("clipping", ()),
        ("divide_factor", ()),
        ("tied", ()),
        ("checkpointed", (False,)),
        ("in_backward_optimizer", ()),
    ],
)
def test_pushes_in_all_kinds_of_programs(two, name, args):
    for result in two.run(ways.forced, "push", name, *args):
        assert result["differences"] == []
        assert result["stats"]["served"] > 0
        assert result["stats"]["copies"] == 0


@pytest.mark.further
@pytest.mark.parametrize("name", ["hybrid", "hybrid_accumulation"])
def test_pushes_over_two_meshes(name):
    with RankPool(4) as four:
        for result in four.run(ways.forced, "push", name):
            assert result["differences"] == []
            assert result["stats"]["plain"] == 0


@pytest.mark.parametrize("blocks", [3, 4])
def test_nobody_pushes_over_what_a_peer_has_yet_to_sum(two, blocks):
    """With an even and an odd number of reductions in a step."""
    for result in two.run(ways.late_sums, blocks):
        assert result["differences"] == []


def test_what_is_pushed_has_two_slots(two):
    """Half floats are divided before they are reduced, so they go another way."""
    for dtype in (torch.bfloat16, torch.float16):
        for result in two.run(ways.slots, dtype):
            assert result["differences"] == []
            if dtype == torch.bfloat16:
                assert result["looked"] == [("slot, push", True)] * 2
            else:
                assert not any("push" in where for where, _ in result["looked"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_16_bit_sums_are_rounded_once(dtype):
    roundings = 2.0 if dtype == torch.float32 else 0.51  # 32 bits: once for each of four ranks
    with RankPool(4) as four:
        for reduction in ("SUM", "AVG"):
            for error in four.run(ways.summed, dtype, reduction):
                assert error <= roundings
        assert four.run(ways.summed, dtype, "MAX") == [None] * 4


@pytest.mark.parametrize("where", ["planning", "measuring"])
def test_a_rank_that_fails_alone_fails_all_ranks_at_once(two, where):
    """And leaves them in step: the next plan is made as if nothing had been."""
    peer, own = two.run(ways.failing_freeze, where)
    assert own == f"ArithmeticError: no luck in {where}"
    assert "rank 1 failed: ArithmeticError: no luck" in peer
    for result in two.run(ways.forced, "measure", "plain"):
        assert result["differences"] == []


def test_what_is_new_is_measured_while_others_hold_their_buffers(two):
    results = two.run(ways.measured_again)
    assert results[0]["looked"][0] == results[1]["looked"][0]
    for result in results:
        assert result["differences"] == []
        choices, intact = result["looked"]
        assert result["stats"]["replans"] == 1
        assert len(choices) == len(set(choices))
        # Three blocks of three widths and the root: each has both kinds.
        assert len({nbytes for kind, nbytes in choices if kind == "all_gather"}) == 4
        assert intact == [True, True]
