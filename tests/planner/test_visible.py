"""What peers see of a plan: the same for plans that fit together, another for those that do not."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from strategies import problems

import symmplan
from examples import examples
from symmplan.errors import PlanningError
from symmplan.model import Access, Barrier, Buffer, Operation, Placement, Plan, Problem, SegmentSpec
from symmplan.planner.fingerprint import visible


def _plan(*, prefix="", own=(), offset=256, nbytes=128, barrier="reduce", group="g", **facts):
    """A gather, what this rank does alone, a barrier, a reduction that peers read."""
    local = [f"{prefix}{name}" for name in own]
    gather, reduce = f"{prefix}gather", f"{prefix}reduce"
    problem = Problem(
        buffers=(Buffer(f"{prefix}a", 256, group), Buffer(f"{prefix}b", nbytes, group)),
        operations=(
            Operation(gather, group=group, **{"handshake": True, "release": True, **facts}),
            *(Operation(name) for name in local),
            Operation(reduce, group=group),
        ),
        accesses=(
            Access(gather, f"{prefix}a", write=True, remote=True),
            *(Access(name, f"{prefix}b", write=True) for name in local),
            Access(reduce, f"{prefix}b", remote=True),
        ),
    )
    return Plan(
        problem,
        segments=(SegmentSpec("s", (group,), 512, 384),),
        placements={
            f"{prefix}a": Placement("s", 0, 256),
            f"{prefix}b": Placement("s", offset, nbytes),
        },
        barriers=()
        if barrier is None
        else (Barrier(f"{prefix}{barrier}", group, (f"{prefix}b",)),),
    )


@pytest.mark.parametrize(
    "other",
    [
        _plan(prefix="again."),
        _plan(own=("mm",)),
        _plan(own=("mm", "add"), barrier="mm"),
        _plan(group="h"),
    ],
)
def test_what_a_rank_does_alone_is_not_seen(other):
    assert visible(other).fingerprint == visible(_plan()).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        _plan(offset=384),
        _plan(nbytes=64),
        _plan(barrier=None),
        _plan(barrier="gather"),
        _plan(release=False),
    ],
)
def test_what_peers_meet_or_touch_is_seen(other):
    assert visible(other).fingerprint != visible(_plan()).fingerprint


def test_barriers_behind_the_end_and_others_than_the_plans_are_seen():
    plan = _plan(own=("mm",), barrier=None)
    ends = visible(plan, [(3, "g")])
    assert [b.before for b in ends.barriers] == ["end"]
    assert visible(plan, [(1, "g")]).fingerprint == visible(plan, [(2, "g")]).fingerprint
    assert len({visible(plan, [(at, "g")]).fingerprint for at in range(4)}) == 3


def test_segments_and_their_bytes_stay():
    plan = _plan()
    seen = visible(plan)
    assert [(s.name, s.groups, s.nbytes) for s in seen.segments] == [("s", ("g",), 512)]
    assert list(seen.placements.values()) == list(plan.placements.values())


def test_operations_without_an_order_stay_as_they_are():
    plan = _plan()
    first, last = plan.problem.operations
    apart = (evolve(first, stream="side"), last)
    unordered = evolve(plan, problem=evolve(plan.problem, operations=apart))
    assert visible(unordered) is unordered


@examples(60)
@given(problems())
def test_every_plan_shows_something(problem):
    """Also one whose tensors are placed, and none of them is touched by a peer."""
    alone = evolve(
        problem,
        operations=[
            evolve(o, group=None, handshake=False, release=False, synchronizes=False)
            for o in problem.operations
        ],
        accesses=[evolve(a, remote=False, enters=False, releases=False) for a in problem.accesses],
    )
    for each in (problem, alone):
        try:
            plan = symmplan.plan(each)
        except PlanningError:  # what is pinned may not fit
            continue
        seen = visible(plan)
        assert len(seen.fingerprint) == 64
        assert (
            seen.segments
            == tuple(evolve(s, lower_bound_bytes=0, witness=()) for s in plan.segments)
            or seen is plan
        )
