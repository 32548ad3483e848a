"""Plans are values, whatever made them: they are pickled, copied and compared, and still advise."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from ranks import pool_of
from simulate_programs import Config, program

import symmplan

KINDS = ("fsdp", "compiled", "eager", "experts")

two = pool_of(2)


def made(rank, ranks, config):
    """The plans of ``config`` and what each advises; what ranks return is pickled."""
    torch._dynamo.reset()
    planners = program(config)
    plans = []
    for planner in planners:
        if hasattr(planner, "freeze") and not planner.planned:
            planner.freeze()
        plans += planner.plans if hasattr(planner, "plans") else [planner.plan]
    told = [(plan, (plan.advice(), plan.trades())) for plan in plans]
    for planner in planners:
        (planner.remove if hasattr(planner, "remove") else planner.release)()
    return told


def check(plan, advice):
    for copied in (pickle.loads(pickle.dumps(plan)), copy.copy(plan), copy.deepcopy(plan)):
        assert copied == plan
        assert copied.fingerprint == plan.fingerprint
        assert copied.summary() == plan.summary()
        assert (copied.advice(), copied.trades()) == advice
        copied.verify()


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_real_ranks_are_values(kind, two):
    mine, peers = two.run(made, Config(kind, 2, steps=2, widths=(1, 3, 2, 1)))
    assert mine == peers
    for plan, advice in mine:
        assert len(plan.placements)
        check(plan, advice)
    if kind == "fsdp":
        assert "unsharded_modules" in {a.kind for _, (_, trades) in mine for a in trades}


@pytest.mark.further
@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_simulated_ranks_are_values(kind):
    torch._dynamo.reset()  # what other tests compiled counts against Dynamo's limit
    run = functools.partial(program, Config(kind, 2, steps=2, widths=(1, 3, 2, 1)))
    report = symmplan.simulate(run, ranks=2, memory="shm")
    assert report.plans
    for plan in report.plans:
        check(plan, (plan.advice(), plan.trades()))


def test_plans_of_problems_are_values():
    plan, other = (
        symmplan.plan(symmplan.Problem.from_intervals([("a", 0, 4, 64), ("b", 2, 6, nbytes)]))
        for nbytes in (64, 128)
    )
    check(plan, (plan.advice(), plan.trades()))
    assert plan != other
