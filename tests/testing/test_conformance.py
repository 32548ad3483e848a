"""The conformance kit: every packer passes it, and wrong packers do not."""

from __future__ import annotations

import numpy as np
import pytest

from examples import share
from symmplan.errors import VerificationError
from symmplan.model import Problem
from symmplan.planner import plan
from symmplan.planner.items import conflicts_of, items_of
from symmplan.planner.packing.greedy import (
    first_fit,
    greedy_orders,
    lowest_first,
    sweep_fit,
)
from symmplan.planner.packing.task import Space, task_of
from symmplan.testing import check_offsets, check_packer


def by_task(function):
    def pack(problem):
        items = items_of(problem)
        task = task_of(items, np.arange(len(items)))
        conflicts = conflicts_of(task)
        offset = function(task, conflicts) * task.unit
        return {
            name: int(o)
            for i, o in zip(task.items.tolist(), offset.tolist(), strict=True)
            for name in items.members[i]
        }

    return pack


PACKERS = {
    "plan": lambda p: {n: x.offset for n, x in plan(p).placements.items()},
    "sweep": by_task(lambda task, _: sweep_fit(task)),
    "lowest first": by_task(
        lambda task, conflicts: lowest_first(Space(task, conflicts), np.arange(len(task)))
    ),
    **{
        f"first fit {k}": by_task(lambda t, c, k=k: first_fit(t, c, [*greedy_orders(t, c)][k]))
        for k in range(6)
    },
}


@pytest.mark.parametrize("name", PACKERS)
def test_every_packer_conforms(name):
    check_packer(PACKERS[name], examples=share(60))


def test_the_kit_catches_wrong_packers():
    with pytest.raises(VerificationError) as e:
        check_packer(lambda p: {b.name: 0 for b in p.buffers})
    assert e.value.kind == "overlap"
    with pytest.raises(VerificationError) as e:
        check_packer(lambda _: {})
    assert e.value.kind == "missing_buffer"

    def in_listed_order(problem):
        at, offsets = 0, {}
        for b in problem.buffers:
            at = -(-at // b.align) * b.align
            offsets[b.name] = at
            at += b.nbytes
        return offsets

    with pytest.raises(AssertionError):
        check_packer(in_listed_order)
    with pytest.raises(AssertionError):
        check_packer(
            lambda p: (
                {b.name: 1 << 20 for b in p.buffers if len(p.buffers) == 1} or PACKERS["plan"](p)
            )
        )


def test_offsets_are_checked_one_by_one():
    problem = Problem.from_intervals([("a", 0, 2, 4), ("b", 1, 3, 4)])
    assert check_offsets(problem, {"a": 0, "b": 4}) == 8
    for offsets, kind in (
        ({"a": 0, "b": 3}, "overlap"),
        ({"a": -1, "b": 4}, "out_of_segment"),
        ({"a": 0, "b": 4, "c": 9}, "unknown_buffer"),
    ):
        with pytest.raises(VerificationError) as e:
            check_offsets(problem, offsets)
        assert e.value.kind == kind
