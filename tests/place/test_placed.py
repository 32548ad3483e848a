"""Placed programs are carried out: in graphs here, in eager sessions in `test_right_numbers.py`."""

from __future__ import annotations

import copy

import placed_checks
import pytest
import torch
from explorer_graphs import ALGORITHMS, fx_programs, rewritten, traced, world
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from examples import examples

RANKS = 3


@pytest.fixture(scope="module", autouse=True)
def groups():
    with world(RANKS) as names:
        yield names


def _lowered(program, algorithm, groups, **how):
    return rewritten(copy.deepcopy(traced(program, groups, RANKS)), ALGORITHMS[algorithm], **how)


@examples(40)
@given(st.data())
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_graphs_do_what_was_planned(groups, algorithm, data):
    program = data.draw(fx_programs(ranks=RANKS))
    found = _lowered(program, algorithm, groups, poison=data.draw(st.booleans()))
    if found is not None:
        lowered = placed_checks.of_graph(found.module)
        placed_checks.check(found.program.captured, found.plan.barriers, lowered)


@pytest.fixture(scope="module")
def found(groups):
    """A program with barriers and copies, as lowered."""

    def fits(program):
        one = _lowered(program, "shm", groups)
        return one is not None and len(one.plan.barriers) > 1 and _copies(one)

    return _lowered(
        find(fx_programs(ranks=RANKS), fits, settings=settings(phases=[Phase.generate])),
        "shm",
        groups,
    )


def _copies(found):
    steps = found.program.captured.steps
    return [n for n, step in steps.items() if step.kind.startswith("copy")]


@pytest.mark.parametrize("fault", ["no barrier", "two barriers", "late", "no copy", "two copies"])
def test_a_fault_is_found(found, fault):
    lowered = placed_checks.of_graph(found.module)
    barrier = next(i for i, x in enumerate(lowered) if not isinstance(x, str))
    one = lowered.index(_copies(found)[0])
    if fault == "no barrier":
        del lowered[barrier]
    elif fault == "two barriers":
        lowered.insert(barrier, lowered[barrier])
    elif fault == "late":
        lowered.append(lowered.pop(barrier))
    elif fault == "no copy":
        del lowered[one]
    else:
        lowered.insert(one, lowered[one])
    with pytest.raises(AssertionError):
        placed_checks.check(found.program.captured, found.plan.barriers, lowered)


def test_nodes_say_which_operation_they_are(found):
    copies = [n for n in found.module.graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert all(":" in n.meta["operations"][0] for n in copies if "operations" in n.meta)
