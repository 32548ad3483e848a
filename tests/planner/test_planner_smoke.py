from __future__ import annotations

import pytest

from symmplan.errors import CapacityError, PlanFormatError
from symmplan.model import Access, Buffer, Operation, Plan, Problem
from symmplan.planner import plan


def small() -> Problem:
    return Problem.from_intervals([("a", 0, 3, 4), ("b", 1, 2, 5), ("c", 3, 5, 9), ("d", 2, 4, 1)])


def test_plan_is_verified_and_tight():
    made = plan(small())
    made.verify()
    assert made.peak_bytes == made.lower_bound_bytes == 10
    assert made.optimal


def test_json_round_trip():
    made = plan(small())
    again = Plan.from_json(made.to_json())
    assert again.to_json() == made.to_json()
    assert again.fingerprint == made.fingerprint
    with pytest.raises(PlanFormatError, match="cut off"):
        Plan.from_json(made.to_json()[:-9])


def test_capacity_names_a_small_set():
    with pytest.raises(CapacityError) as e:
        plan(small(), capacity=8)
    assert e.value.buffers


def test_streams_share_only_what_is_ordered():
    ops = [Operation("x0", "x"), Operation("x1", "x"), Operation("y0", "y"), Operation("y1", "y")]
    buffers = [Buffer("a", 256), Buffer("b", 256)]
    accesses = [Access("x0", "a"), Access("y0", "a"), Access("x1", "b"), Access("y1", "b")]
    assert plan(Problem(buffers, ops, accesses)).peak_bytes == 512
    ordered = Problem(buffers, ops, accesses, edges=[("x0", "y1"), ("y0", "x1")])
    made = plan(ordered)
    made.verify()
    assert made.peak_bytes == 256
