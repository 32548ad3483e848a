"""Plans on a budget, and programs whose memory cannot be had on some rank."""

from __future__ import annotations

import json

import budget_programs as programs
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool

import symmplan
from symmplan.errors import OptionError, PlanFormatError
from symmplan.model import Access, Buffer, Operation, Plan, Problem
from symmplan.planner import plan as plan_problem
from symmplan.planner.budget import Demotable, bytes_of, within


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


# Sizes as people write them.


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("40GiB", 40 << 30),
        ("10MB", 10_000_000),
        ("512 MiB", 512 << 20),
        (" 1.5kib ", 1536),
        ("7", 7),
        ("8 B", 8),
        ("2TB", 2 * 10**12),
        (0, 0),
        (None, None),
    ],
)
def test_sizes(text, nbytes):
    assert bytes_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 GiBs", "1iB", "4 x", "1e3", True, 1.5, -1])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(OptionError, match="capacity is"):
        bytes_of(text)
    with pytest.raises(OptionError, match="capacity is"):
        symmplan.backend(capacity=text)


# What is demoted.


@st.composite
def kinds(draw):
    """Kinds of collectives: size, calls that are live one after the other, seconds, algorithms."""
    rows = []
    for i in range(draw(st.integers(1, 5))):
        size = 256 * draw(st.integers(1, 64))
        seconds = draw(st.one_of(st.none(), st.floats(0.0, 1.0)))
        rows.append((f"kind{i}", size, draw(st.integers(1, 4)), seconds, draw(st.booleans())))
    return rows, draw(st.lists(st.integers(0, 9), min_size=20, max_size=20))


def _make(rows, order):
    """What `within` plans: each call lives from its operation to a later one."""

    def make(gave):
        buffers, accesses, demotables = [], [], []
        operations = [Operation(f"o{i}") for i in range(len(order))]
        for k, (key, size, calls, seconds, doubled) in enumerate(rows):
            now = gave.get(key, "copy engine" if doubled else "symmetric")
            if now == "ordinary":
                continue
            mine = []
            for c in range(calls):
                begin = (k * 3 + c * 5) % len(order)
                end = min(len(order) - 1, begin + order[(k + c) % len(order)])
                for copy in range(2 if now == "copy engine" else 1):
                    name = f"{key}.{c}.{copy}"
                    buffers.append(Buffer(name, size, "g"))
                    accesses += [Access(f"o{i}", name, write=True) for i in {begin, end}]
                    mine.append(name)
            less = (
                {"symmetric": 0.5, "ordinary": 0.0} if now == "copy engine" else {"ordinary": 0.0}
            )
            times = {}
            if seconds is not None:
                times = {
                    "ordinary": 1.0,
                    "symmetric": 1.0 - seconds / 2,
                    "copy engine": 1 - seconds,
                }
            demotables.append(Demotable(key, key, now, calls, size, frozenset(mine), less, times))
        problem = Problem(buffers=buffers, operations=operations, accesses=accesses)
        return plan_problem(problem), demotables, now if rows else None

    return make


@pytest.mark.further
@given(kinds(), st.integers(0, 100))
def test_a_plan_keeps_to_its_budget_and_nobody_gives_algorithm_in_vain(drawn, percent):
    make = _make(*drawn)
    whole = make({})[0]
    capacity = whole.peak_bytes * percent // 100
    plan, _ = within(capacity, make)
    plan.verify()
    assert plan.peak_bytes <= capacity
    if percent == 100:
        assert plan.budget is None
        return
    if plan.budget is None:
        assert whole.peak_bytes <= capacity
        return
    assert plan.budget.wanted_bytes == whole.peak_bytes > capacity
    gave = {g.what: g.after for g in plan.budget.demotions}
    for what in gave:
        others = {k: w for k, w in gave.items() if k != what}
        assert make(others)[0].peak_bytes > capacity or len(gave) == 1
    assert "budget: " in plan.summary()
    assert evolve(plan, budget=None).fingerprint == plan.fingerprint
    read = Plan.from_json(plan.to_json())
    assert read.budget == plan.budget
    assert read.to_json() == plan.to_json()
    assert "budget" not in evolve(plan, budget=None).to_json()


@pytest.mark.parametrize(
    "budget",
    [
        [],
        {"capacity": 1},
        {"capacity": 1, "wanted_bytes": 2.5},
        {"capacity": 1, "wanted_bytes": 2, "why": ""},
        {"capacity": 1, "wanted_bytes": 2, "demotions": {}},
        {"capacity": 1, "wanted_bytes": 2, "demotions": [{"what": "x"}]},
        {
            "capacity": 1,
            "wanted_bytes": 2,
            "demotions": [
                {"what": "x", "calls": 1, "nbytes": 2, "before": "symmetric", "after": "by foot"}
            ],
        },
    ],
)
def test_a_budget_that_is_none_is_refused_where_a_plan_is_read(budget):
    rows = [("a", 4096, 1, None, False)]
    plan, _ = within(0, _make(rows, [4] * 20))
    tree = json.loads(plan.to_json())
    with pytest.raises(PlanFormatError, match="budget"):
        Plan.from_json(json.dumps({**tree, "budget": budget}))


def test_who_saves_least_for_its_bytes_gives_algorithm():
    """Two of one size: the one that is used once goes before the one that is used often."""
    rows = [("seldom", 4096, 1, None, False), ("often", 4096, 4, None, False)]
    plan, _ = within(4096, _make(rows, [4] * 20))
    assert [g.what for g in plan.budget.demotions][:1] == ["seldom"]
    measured = [("slow", 4096, 1, 0.1, False), ("fast", 4096, 1, 0.9, False)]
    plan, _ = within(4096, _make(measured, [4] * 20))
    assert [(g.what, g.after) for g in plan.budget.demotions] == [("slow", "ordinary")]
    assert plan.budget.demotions[0].seconds == pytest.approx(0.05)


# FSDP2.


def _alike(results):
    assert len({r["looked"]["fingerprint"] for r in results}) == 1
    for result in results:
        assert result["differences"] == []
        assert result["held"] == 0
    return results[0]


@pytest.mark.ranks
@pytest.mark.parametrize("choose", ["placed", "copy engine", "push", "measure"])
def test_fsdp_keeps_to_the_least_budget(two, choose):
    wanted = _alike(two.run(programs.fsdp_on, [None], choose))
    assert wanted["looked"]["gave"] is None
    assert not wanted["warned"]
    for part in (0, 0.3, 0.7):
        capacity = int(part * wanted["bytes"][0])
        result = _alike(two.run(programs.fsdp_on, [f"{capacity}B", "1GiB"], choose))
        assert result["bytes"][0] <= capacity
        assert not result["warned"]
        if wanted["bytes"][0] and choose != "measure":  # which may find another time that none gain
            assert result["looked"]["gave"]
            assert "budget: " in result["looked"]["summary"]
        if not part:
            assert result["stats"]["served"] == 0
            assert result["stats"]["segment_bytes"] == 0


@pytest.mark.long
@pytest.mark.ranks
def test_without_a_capacity_it_is_what_the_fullest_rank_has_free(two):
    wanted = _alike(two.run(programs.fsdp_on, [None], "placed"))["bytes"][0]
    free = wanted // 2
    less = _alike(two.run(programs.fsdp_where_free, [1 << 30, free]))
    assert 0 < less["bytes"][0] <= free * 9 // 10  # a tenth is left alone
    assert "budget: " in less["looked"]["summary"]


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [*programs.STAGES, *programs.MEASURING])
def test_fsdp_without_memory_on_one_rank_runs_as_ever(
    two, stage, victim, shared_memory_is_left_clean
):
    results = two.run(programs.fsdp_failing, stage, "OutOfSharedMemoryError", victim, 0, "measure")
    result = _alike(results)
    assert [r["failed"] for r in results] == [rank == victim for rank in range(2)]
    assert sum(len(r["warned"]) for r in results) == 1
    assert f"rank {victim}: no luck today" in result["warned"][0]
    assert "fix: try tomorrow" in result["warned"][0]
    for r in results:
        assert r["stats"]["served"] == r["stats"]["segment_bytes"] == 0
        assert r["stats"]["plain"] > 0
        assert any("no luck today" in why for why in r["stats"]["reasons"])
    # As if nothing had been.
    again = _alike(two.run(programs.fsdp))
    assert again["stats"]["served"] > 0
    assert again["stats"]["plain"] == 0


# Sessions and graphs.


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.parametrize("program", [programs.eager, programs.compiled])
def test_sessions_and_graphs_keep_to_the_least_budget(two, program):
    wanted = two.run(program, [None])[0]
    assert wanted["peak"] > 0
    assert not wanted["gave"]
    for part in (0, 0.4, 0.9):
        capacity = int(part * wanted["peak"])
        results = two.run(program, [f"{capacity}B", "1GiB"])
        assert len({r["summary"] for r in results}) == 1
        for result in results:
            assert result["wrong"] == result["warned"] == []
            assert result["held"] == 0
            assert result["peak"] <= capacity
            assert result["gave"]
            assert "budget: " in result["summary"]
            assert (result["served"] == 0) == (part == 0)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("name", "stage", "victim"),
    [
        ("eager", "allocate", 1),
        ("compiled", "allocate", 1),
        *(
            pytest.param(
                *(name, stage, victim),
                marks=pytest.mark.further if stage == "rendezvous" else pytest.mark.slow,
            )
            for name in ("eager", "compiled")
            for stage in (*programs.STAGES, *programs.MEASURING)
            for victim in (0, 1)
        ),
    ],
)
def test_sessions_and_graphs_without_memory_on_one_rank_run_as_ever(
    two, name, stage, victim, shared_memory_is_left_clean
):
    choose = "measure" if stage in programs.MEASURING else "placed"
    given = (programs.with_failing, name, stage, "MemoryError", victim, 0, choose)
    results = two.run(*given)
    assert [r["failed"] for r in results] == [rank == victim for rank in range(2)]
    assert sum(len(r["warned"]) for r in results) == 1
    for result in results:
        assert result["wrong"] == []
        assert result["served"] == result["held"] == result["peak"] == 0
        assert all("MemoryError: no luck" in why for why in result["reasons"])
        assert result["reasons"]
        assert sum(result["reasons"].values()) == result["plain"]
        assert result["plain"] > 0
    for result in two.run(getattr(programs, name), [None]):
        assert result["served"] > 0
        assert result["wrong"] == []


def _second_group(rank, size):
    import torch.distributed as dist

    dist.new_group(range(size))


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("fsdp", range(4, 8)),
        pytest.param("eager", range(4, 8), marks=pytest.mark.further),
        *(
            pytest.param(name, seeds, marks=mark, id=f"{name}-{len(seeds)}")
            for name in ("fsdp", "eager", "compiled", "overlapped")
            for seeds, mark in (
                (range(8, 20), pytest.mark.further),
                (range(20, 320), pytest.mark.slow),
            )
        ),
    ],
)
def test_random_faults_and_budgets(name, seeds, shared_memory_is_left_clean):
    with RankPool(2, timeout=1200) as pool:
        pool.run(_second_group)
        results = pool.run(programs.seeded, name, seeds)
    assert [bad for bad, _ in results] == [[], []]
    assert sum(hit for _, hit in results) > len(seeds) // 4


@pytest.mark.long
@pytest.mark.ranks
def test_what_one_rank_has_failed_at_is_known_to_none():
    with RankPool(2) as pool:  # in which nobody has asked before
        assert pool.run(programs.measured_again) == [([], [], 0)] * 2


@pytest.mark.ranks
@pytest.mark.further
def test_what_inductor_compiled_is_compiled_again_without_memory(two):
    for result in two.run(programs.inductor_failing):
        assert result["wrong"] == []
        assert result["served"] == result["held"] == result["peak"] == 0
        assert result["plain"] > 0


# Meshes, and how much measuring takes.


@pytest.mark.ranks
@pytest.mark.further
def test_a_mesh_does_without_what_one_rank_cannot_have(shared_memory_is_left_clean):
    with RankPool(4) as four:
        for stage, victim in (("allocate", 3), ("rendezvous", 0), ("settle", 2), ("share", 1)):
            results = four.run(programs.mesh_failing, stage, victim)
            assert sum(len(r["warned"]) for r in results) == 1
            for result in results:
                assert result["differences"] == []
                assert result["held"] == 0
            # Rows plan for themselves: only the victim's does without.
            served = [r["stats"]["served"] > 0 for r in results]
            assert served == [rank // 2 != victim // 2 for rank in range(4)]


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["fsdp", "eager", "compiled"])
def test_what_is_too_large_to_be_measured_is_measured_on_a_part(two, name):
    room = 16 << 10 if name == "fsdp" else 4 << 10
    for wrong, taken, choices in two.run(programs.measured_small, name, room):
        assert wrong == []
        assert taken
        assert max(taken) < room
        assert all(seconds > 0 for _, seconds in choices)
        if name == "fsdp":
            assert max(nbytes for nbytes, _ in choices) > room / 4


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize("name", ["fsdp", "eager", "compiled"])
def test_where_a_rank_has_no_room_to_measure_the_rules_choose(two, name):
    for wrong, warned, timed, served, plain in two.run(programs.measured_nowhere, name):
        assert wrong == warned == timed == []
        assert served > 0  # in shared memory everything is placed by rule
        assert plain == 0
