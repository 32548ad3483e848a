"""Where the work of packing goes: what is tried, how long, and what is not tried at all."""

from __future__ import annotations

import numpy as np
import pytest
from instances import stream_program
from strategies import gap_rows, hard_rows

from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner.items import conflicts_of, count_candidates, items_of
from symmplan.planner.packing import solve
from symmplan.planner.packing.bound import heaviest_moment
from symmplan.planner.packing.greedy import first_fit, greedy_orders, sweep_fit
from symmplan.planner.packing.task import task_of


def task_from(problem):
    items = items_of(problem)
    return task_of(items, np.arange(len(items)))


def on_streams(*touched, edges=()):
    """Buffers of 8 bytes, and the operations a0, a1 and b0, b1 of two streams that touch them."""
    ops = [Operation(name, name[0]) for name in ("a0", "a1", "b0", "b1")]
    accesses = [Access(o, f"x{i}") for i, at in enumerate(touched) for o in at]
    buffers = [Buffer(f"x{i}", 8, align=1) for i in range(len(touched))]
    return Problem(buffers, ops, accesses, edges=edges)


ROWS = sorted(hard_rows(), key=lambda row: row[1])[1:]  # the first one is alone
HARD = Problem.from_intervals(ROWS)
GAP = Problem.from_intervals(gap_rows())


@pytest.fixture
def counted(monkeypatch):
    """How often parts of the packer are called."""
    counts = {}

    def count(name):
        there = getattr(solve, name)
        counts[name] = []

        def call(*args):
            counts[name].append(args)
            return there(*args)

        monkeypatch.setattr(solve, name, call)

    for name in ("first_fit", "heaviest_clique", "Improver"):
        count(name)
    return counts


def calls(counted):
    return {name: len(made) for name, made in counted.items()}


def test_nothing_is_tried_once_the_bound_is_met(counted):
    made = solve.pack(task_from(Problem.from_intervals([("a", 0, 2, 4), ("b", 1, 3, 2)])))
    assert made.peak == made.bound
    assert calls(counted) == {"first_fit": 1, "heaviest_clique": 0, "Improver": 0}


def test_what_one_instant_shows_needs_no_other_proof(counted):
    made = solve.pack(task_from(on_streams(["a0", "a1"], ["a1"])))
    assert made.peak == made.bound == 16
    assert calls(counted)["heaviest_clique"] == 0


def test_what_no_instant_shows_is_proven_before_anything_is_improved(counted):
    made = solve.pack(task_from(on_streams(["a1"], ["b0"], ["a0", "a1"])))
    assert made.peak == made.bound == 24
    assert calls(counted)["heaviest_clique"] == 1
    assert calls(counted)["Improver"] == 0


def test_of_equal_proofs_the_instant_s_is_kept(monkeypatch):
    nobody = np.zeros(0, dtype=np.int64)
    monkeypatch.setattr(
        solve, "heaviest_clique", lambda task, _: (heaviest_moment(task)[0], nobody)
    )
    made = solve.pack(task_from(stream_program(90, seed=1)))
    assert len(made.witness)


def test_work_that_is_used_up_is_used_up_for_all(counted, monkeypatch):
    monkeypatch.setattr(solve, "WORK", 1)
    last = max(end for _, _, end, _ in ROWS)
    other = [(f"{n}'", a + last, b + last, s + 1) for n, a, b, s in ROWS]
    made = solve.pack(task_from(Problem.from_intervals([*ROWS, *other])))
    assert made.peak > made.bound
    assert calls(counted)["Improver"] == 1


@pytest.mark.parametrize(("below", "orders"), [(0, 2), (1, 1)])
def test_greedy_orders_end_with_their_work(counted, monkeypatch, below, orders):
    task = task_from(HARD)
    spent = len(conflicts_of(task).neighbours) + 50 * len(task)
    monkeypatch.setattr(solve, "MAX_GREEDY", spent - below)
    monkeypatch.setattr(solve, "MAX_IMPROVED", 0)
    solve.pack(task)
    assert calls(counted)["first_fit"] == orders


def test_of_greedy_orders_the_first_of_the_best_is_kept(monkeypatch):
    monkeypatch.setattr(solve, "MAX_IMPROVED", 0)
    task = task_from(HARD)
    conflicts = conflicts_of(task)
    offsets = [first_fit(task, conflicts, order) for order in greedy_orders(task, conflicts)]
    peaks = [int((offset + task.size).max()) for offset in offsets]
    made = solve.pack(task)
    assert made.peak == min(peaks)
    assert (made.offset == offsets[peaks.index(min(peaks))]).all()


@pytest.mark.parametrize("below", [0, 1])
def test_conflicts_above_a_limit_are_not_listed(monkeypatch, below):
    task = task_from(HARD)
    monkeypatch.setattr(solve, "MAX_CONFLICTS", count_candidates(task) - below)
    made = solve.pack(task)
    assert (made.offset == sweep_fit(task)).all() == bool(below)


@pytest.mark.parametrize("below", [0, 1])
def test_components_above_a_limit_are_not_improved(counted, monkeypatch, below):
    task = task_from(HARD)
    monkeypatch.setattr(solve, "MAX_IMPROVED", len(task) - below)
    solve.pack(task)
    assert calls(counted)["Improver"] == 1 - below


def test_where_nothing_is_live_a_program_falls_into_components(counted):
    after = max(end for _, _, end, _ in ROWS) - ROWS[0][1]
    again = [(f"{name}'", a + after, b + after, size) for name, a, b, size in ROWS]
    task = task_from(Problem.from_intervals([*ROWS, *again]))
    made = solve.pack(task)
    assert {len(args[0]) for args in counted["first_fit"]} == {len(ROWS)}  # packed once
    assert (made.offset[: len(ROWS)] == made.offset[len(ROWS) :]).all()
