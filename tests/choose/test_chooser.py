"""How collectives run where nothing is measured; `test_choose.py` runs what was chosen."""

from __future__ import annotations

import pytest
import torch

from symmplan.choose.choice import NO_ROOM
from symmplan.choose.chooser import nearest
from symmplan.choose.op_cases import OpCase
from symmplan.integrate.fsdp.cases import CallCase
from symmplan.memory.backends.torch_symm import SPLIT_WORDS
from symmplan.model import Algorithm
from symmplan.planner.budget import Demotable, together
from symmplan.runtime.measure import choose_algorithms
from symmplan.runtime.options import Options
from symmplan.runtime.prepare import Preparation

CPU = torch.device("cpu")
COMMON = {"memory": "shm", "group": "g", "ranks": 2, "dtype": "float32", "numels": (8,)}
ODD = CallCase(op="all_gather", algorithms=("copy engine",), **COMMON)
GATHER = CallCase(op="all_gather", algorithms=("symmetric", "copy engine"), **COMMON)
REDUCE = CallCase(op="reduce_scatter", algorithms=("symmetric", "copy engine", "push"), **COMMON)
SUM = OpCase(
    op="_c10d_functional::all_reduce.default", algorithms=("symmetric",), others=(), **COMMON
)


def _chosen(choose):
    preparation = Preparation(Options(choose=choose), "a test", "a test")
    cases = {"odd": ODD, "gather": GATHER, "sum": SUM}
    return choose_algorithms(cases, {"far": "out of reach"}, CPU, preparation, memory="shm")


def test_what_is_left_out_is_ordinary_for_its_reason_whatever_the_others_are():
    placed, ordinary = _chosen("placed"), _chosen("ordinary")
    assert placed.ordinary == {"far": "out of reach", "odd": SPLIT_WORDS}
    assert placed.algorithms["sum"] == placed.algorithms["gather"] == Algorithm("symmetric")
    assert set(ordinary.ordinary) == {"far", "odd", "gather", "sum"}
    assert ordinary.ordinary["sum"] == "choose='ordinary'"
    assert placed.choices == ordinary.choices == ()


def test_all_collectives_of_a_case_give_algorithm_and_no_others():
    placed = _chosen("placed")
    assert placed.algorithm("gather", {GATHER: "ordinary"}) == Algorithm("ordinary", NO_ROOM)
    assert placed.algorithm("gather", {GATHER: "symmetric"}) == Algorithm("symmetric")
    assert placed.algorithm("sum", {GATHER: "ordinary"}) == Algorithm("symmetric")
    assert placed.algorithm("far", {GATHER: "symmetric"}) == Algorithm("ordinary", "out of reach")


@pytest.mark.parametrize(
    ("wanted", "algorithms"),
    [
        ("push", ["copy engine", "copy engine", "push", "symmetric"]),
        ("copy engine", ["copy engine", "copy engine", "copy engine", "symmetric"]),
        ("symmetric", ["ordinary", "symmetric", "symmetric", "symmetric"]),
    ],
)
def test_what_has_not_the_algorithm_that_is_meant_takes_the_next(wanted, algorithms):
    assert [nearest(wanted, case).name for case in (ODD, GATHER, REDUCE, SUM)] == algorithms


def test_a_part_keeps_to_the_bytes_and_divides_among_the_ranks():
    assert GATHER.part(1 << 20) is GATHER
    large = CallCase(op="all_gather", **COMMON | {"numels": (1 << 20,)})
    part = large.part(4 * 99_999)
    assert max(part.sizes()) <= 4 * 99_999
    assert part.numels[0] % large.ranks == 0
    assert large.times(part) == large.numels[0] / part.numels[0] > 1


def test_demotables_of_one_kind_are_one():
    one = Demotable("a", "a", "symmetric", 1, 8, frozenset({"x"}))
    two = Demotable("a", "a", "symmetric", 1, 8, frozenset({"x", "y"}))
    other = Demotable("b", "b", "symmetric", 1, 8, frozenset({"z"}))
    first, last = together([one, other, two])
    assert (first.key, first.calls, first.buffers) == ("a", 2, {"x", "y"})
    assert (last.key, last.calls) == ("b", 1)
