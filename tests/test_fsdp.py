"""FSDP2 in planned placements: everything it can do, bit for bit as without symmplan."""

from __future__ import annotations

import fsdp_programs as programs
import pytest
import torch
from ranks import RankPool, run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four():
    with RankPool(4) as pool:
        yield pool


def check(results, *, plain=0, copies=0, replans=0, rendezvous=1, departures=0):
    """Same bits on every rank, and how the collectives were served.

    A number must be met exactly; None leaves it open.
    """
    for result in results:
        assert result["differences"] == []
        stats = result["stats"]
        assert stats["served"] > 0
        assert stats["placed"] == stats["bound"]
        assert result["barriers"] == 0
        for name, wanted in {
            "plain": plain,
            "copies": copies,
            "replans": replans,
            "rendezvous": rendezvous,
            "departures": departures,
        }.items():
            assert wanted is None or stats[name] == wanted, (name, stats)
        peak, bound, _ = result["bytes"]
        assert peak == bound
    first = results[0]["stats"]
    assert all(r["stats"] == first for r in results)
    return first


def test_every_collective_of_every_later_step_is_placed_in_one_segment(two):
    stats = check(two.run(programs.plain))
    # 4 gathers in forward, 3 in backward (the root keeps its parameters), 4 reduce-scatters.
    assert stats["recorded"] == 11
    assert stats["served"] == 3 * 11
    assert stats["unshared_bytes"] > 2 * stats["segment_bytes"]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("plain", ()),
        ("mixed", (torch.bfloat16, torch.float32, None)),
        ("accumulation", (False, True)),
        ("by_all_to_all", (True,)),
    ],
)
def test_where_parameters_cannot_be_placed_gathers_are_flat(two, name, args):
    stats = check(two.run(programs.in_flat_buffers, name, *args))
    assert stats["served"] >= 3 * 11
    assert dict(stats["flat"]) == dict.fromkeys(
        ["model", "blocks.0", "blocks.1", "blocks.2"], "this torch's FSDP2 lacks what is replaced"
    )


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


# Plain FSDP2 cannot train after an inference_mode pass that came first.
@pytest.mark.parametrize(
    ("mode", "first"), [("no_grad", True), ("no_grad", False), ("inference_mode", False)]
)
def test_evaluation_between_training_steps(two, mode, first):
    """A pass without gradients uses the forward part of the plan."""
    check(two.run(programs.evaluation, mode, first), departures=None)


def test_a_program_without_gradients_is_planned_after_some_rounds(two):
    stats = check(two.run(programs.inference_only), departures=None)
    # The root stays unsharded, so a pass after the first one gathers 3 blocks.
    assert stats["recorded"] >= 8 * 4
    assert stats["recorded"] + stats["served"] == 4 + 15 * 3


@pytest.mark.parametrize(
    "orders",
    [
        [(0, 1, 2), (2, 1, 0), (0, 1, 2), (1, 0, 2)],
        [(0, 1, 2), (0, 0, 1, 2), (0, 1, 1, 1, 2), (2, 2)],
        [(0, 1, 2), (0,), (), (1, 2), (0, 1, 2)],
    ],
)
def test_a_step_that_departs_from_the_plan_is_served_right(two, orders):
    stats = check(two.run(programs.uneven_use, orders), copies=None, departures=None)
    assert stats["departures"] > 0


def test_a_module_that_the_first_step_skipped_is_plain_once_and_then_planned(two):
    orders = [(0, 2), (0, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)]
    stats = check(
        two.run(programs.uneven_use, orders),
        plain=3,
        replans=1,
        rendezvous=None,
        departures=None,
    )
    assert stats["reasons"] == {"the plan does not know this collective": 3}


def test_two_models_have_a_plan_each(two):
    for result in two.run(programs.two_models):
        assert result["differences"] == []
        assert all(result["placed"])
        assert result["rendezvous"] == [1, 1]
        assert result["plain"] == result["staged"] == [0, 0]


@pytest.mark.parametrize("name", ["hybrid", "hybrid_accumulation", "two_dimensions"])
def test_meshes_of_two_dimensions(four, name):
    check(four.run(getattr(programs, name)))


def test_forward_and_backward_may_gather_over_different_groups(four):
    """They share one segment, which meets each of them once: FSDP2 makes one for each module."""
    results = four.run(programs.partial_reshard)
    assert [r["segments"] for r in results] == [1] * 4
    stats = check(results, rendezvous=1 + 4)
    assert stats["unshared_bytes"] > 3 * stats["segment_bytes"]


def test_weights_gathered_as_bytes_of_several_types(two):
    check(two.run(programs.float8))


def test_a_step_that_fails_on_all_ranks_leaves_the_next_ones_right(two):
    check(two.run(programs.failing_step), copies=None, departures=None)


@pytest.mark.parametrize("who", [(0,), (0, 1)])
@pytest.mark.parametrize("threads", [True, False])
def test_buffers_that_somebody_keeps_longer_stay_intact(two, who, threads):
    """Later users of their bytes are staged, on that rank alone."""
    results = two.run(programs.in_flat_buffers, "holder", who, True, threads)
    for rank, result in enumerate(results):
        assert result["gathered within"]
        assert result["differences"] == []
        assert result["intact"]
        assert result["stats"]["plain"] == 0
        assert (result["stats"]["copies"] > 0) == (rank in who)
        assert (result["looked at"] > 0) == (rank in who and not threads)


def test_a_rank_that_keeps_buffers_from_the_start_makes_all_ranks_plan_for_it(two):
    results = two.run(programs.in_flat_buffers, "holder", (1,), False, False)
    check(results)
    assert results[1]["intact"]


def test_ranks_that_record_different_programs_all_raise(two):
    outcomes = two.outcomes(programs.disagreement)
    assert [o.error.kind for o in outcomes] == ["AgreementError"] * 2


def test_everything_stays_as_it_is_if_it_shall(two):
    for result in two.run(programs.ordinary):
        assert result["differences"] == []
        placed, plain, segment_bytes, summary = result["looked"]
        assert (placed, segment_bytes) == (0, 0)
        assert plain == 3 * 11
        assert "choose='ordinary'" in summary


@pytest.mark.parametrize("prefetch", [False, True])
def test_reduce_scatters_as_an_all_to_all_and_a_sum(two, prefetch):
    results = two.run(programs.by_all_to_all, prefetch)
    stats = check(results)
    assert stats["segment_bytes"] == stats["lower_bound_bytes"]
    assert all(r["looked"].count("c10d::alltoall_base_") == 4 for r in results)


def test_each_kind_and_size_is_measured_once(two):
    for result in two.run(programs.choice):
        assert result["differences"] == []
        choices, summary = result["looked"]
        assert len(choices) == len(set(choices)) >= 4
        assert {kind for kind, *_ in choices} == {"all_gather", "reduce_scatter"}
        assert all(ranks == 2 for _, _, ranks, _ in choices)
        assert ("symmetric memory was not clearly faster" in summary) != all(c[-1] for c in choices)


@pytest.mark.parametrize(("kind", "count"), [("reduce_scatter", 4), ("all_gather", 7)])
def test_what_is_slower_in_symmetric_memory_stays_out_of_the_plan(two, kind, count):
    results = two.run(programs.forced_choice, kind)
    stats = check(results, plain=3 * count)
    assert stats["served"] == 3 * (11 - count)
    reason = "symmetric memory was not clearly faster: 5 us, against 2 us in torch's own way"
    assert stats["reasons"] == {reason: 3 * count}
    assert stats["segment_bytes"] == stats["lower_bound_bytes"]
    assert all(reason in r["looked"] for r in results)


def test_the_life_of_a_handle(two, shared_memory_is_left_clean):
    for told in two.run(programs.lifecycle):
        assert "has no FSDP2 module" in told["no fsdp"]
        assert "fix: call fully_shard" in told["no fsdp"]
        assert "unknown memory backend 'tape'" in told["memory"]
        assert "unknown way to choose 'dice'" in told["choose"]
        assert "effort is 'none'" in told["effort"]
        assert "handle.remove()" in told["twice"]
        assert "no FSDP collective has run yet" in told["too early"]
        assert told["repr"] == "<symmplan.fsdp.Handle: 4 modules, recording>"
        assert told["plan"] is None
        assert told["frozen"] == 1
        assert told["placed"] == 2 * 11
        assert told["after remove"] == 0
        assert told["again"] == 2 * 11
        assert told["live"] == 1
        assert told["live at end"] == 0


def test_a_module_that_changes_its_group_is_plain_once_and_then_planned(four):
    results = four.run(programs.other_groups)
    stats = check(results, plain=4, replans=1, rendezvous=None, departures=None)
    assert stats["reasons"] == {"it ran over another group than planned": 4}


def test_tensors_that_a_collective_holds_longer_do_not_count_as_held(two):
    (plain,) = {r["bytes"] for r in two.run(programs.plain)}
    results = two.run(programs.lingering)
    check(results)
    assert {r["bytes"] for r in results} == {plain}


def test_one_rank_needs_no_plan():
    assert run_ranks(programs.alone, 1) == [(None, 0, 0, 0)]
