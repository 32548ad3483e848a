"""The complete search decides every target rightly; glued blocks unglue to packings."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
from attrs import evolve
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from instances import cut_rectangle
from strategies import gap_rows, hard_rows, interval_problems, problems

from symmplan.model import Plan, Problem
from symmplan.planner import plan
from symmplan.planner.items import conflicts_of, items_of
from symmplan.planner.packing import improve, solve
from symmplan.planner.packing.blocks import Style, glue
from symmplan.planner.packing.greedy import squeak
from symmplan.planner.packing.search import search
from symmplan.planner.packing.task import Space, task_of
from symmplan.testing import lowest_peak

LIMIT = 200_000


def prepared(problem):
    items = items_of(problem)
    task = task_of(items, np.arange(len(items)))
    conflicts = conflicts_of(task)
    return task, conflicts


def check(task, conflicts, offset, target):
    assert (offset >= 0).all()
    assert (offset % task.align == 0).all()
    assert (offset + task.size).max() <= target
    for a, b in zip(*conflicts.pairs(), strict=True):
        assert offset[a] + task.size[a] <= offset[b] or offset[b] + task.size[b] <= offset[a]


def decide(problem, data):
    task, conflicts = prepared(problem)
    names = [f"{i:02}" for i in range(len(task))]
    pairs = {frozenset((names[a], names[b])) for a, b in zip(*conflicts.pairs(), strict=True)}
    best = lowest_peak(
        dict(zip(names, task.size.tolist(), strict=True)),
        pairs,
        dict(zip(names, task.align.tolist(), strict=True)),
    )
    space = Space(task, conflicts)
    rank = np.asarray(data.draw(st.permutations(range(len(task)))), dtype=np.int64)
    found = search(space, best, rank, LIMIT)
    assert found.offset is not None
    check(task, conflicts, found.offset, best)
    below = search(space, best - 1, rank, LIMIT)
    assert below.offset is None
    assert below.impossible
    offset, peak = squeak(space, rank, best, 20)
    assert peak >= best
    check(task, conflicts, offset, peak)


@settings(max_examples=100, deadline=None)
@given(interval_problems(max_buffers=7, max_time=6, max_bytes=6), st.data())
def test_search_is_right_on_intervals(problem, data):
    decide(problem, data)


@settings(max_examples=80, deadline=None)
@given(problems(groups=("g",), remote=False, constraints=False, pins=False, max_bytes=6), st.data())
def test_search_is_right_on_partial_orders_with_alignments(problem, data):
    decide(problem, data)


@settings(max_examples=100, deadline=None)
@given(interval_problems(max_buffers=6, max_time=6, max_bytes=6), st.data())
def test_search_respects_pins(problem, data):
    task, conflicts = prepared(problem)
    assume(len(task) > 1)
    # Pin one item anywhere; the best peak follows from pinning it there in all packings.
    pin = np.full(len(task), -1, dtype=np.int64)
    which = data.draw(st.integers(0, len(task) - 1))
    pin[which] = data.draw(st.integers(0, 8))
    task = evolve(task, pin=pin)
    space = Space(task, conflicts)
    rank = np.arange(len(space))
    total = int(task.size.sum() + pin[which])
    results = [search(space, t, rank, LIMIT) for t in range(total + 1)]
    feasible = [r.offset is not None for r in results]
    assert all(r.impossible != f for r, f in zip(results, feasible, strict=True))
    assert feasible == sorted(feasible)
    first = feasible.index(True)
    offset = pin.copy()
    offset[space.free] = results[first].offset
    check(task, conflicts, offset, max(first, int(pin[which] + task.size[which])))
    # A brute force over all offsets of the free items agrees.
    assert first == _lowest_with_pin(task, conflicts.matrix(), which, first)


def _lowest_with_pin(task, clash, which, at_most):
    free = [i for i in range(len(task)) if i != which]
    best = at_most + 1

    def place(left, placed, top):
        nonlocal best
        if top >= best:
            return
        if not left:
            best = top
            return
        for i in left:
            size, at = int(task.size[i]), 0
            for low, high in sorted(placed[j] for j in placed if clash[i, j]):
                if at + size > low:
                    at = max(at, high)
            rest = [j for j in left if j != i]
            place(rest, {**placed, i: (at, at + size)}, max(top, at + size))

    pin = int(task.pin[which])
    place(free, {which: (pin, pin + int(task.size[which]))}, 0)
    return best


@settings(max_examples=100, deadline=None)
@given(
    interval_problems(max_buffers=12),
    st.integers(0, 8),
    st.builds(
        Style,
        power=st.integers(0, 2),
        early=st.sampled_from((2, 4, 8)),
        noise=st.sampled_from((0, 8)),
        seed=st.integers(0, 99),
    ),
)
def test_blocks_unglue_to_packings(problem, spare, style):
    task, conflicts = prepared(problem)
    space = Space(task, conflicts)
    target = int(space.load.max()) + spare
    for blocks in glue(space, target, style, (2, 4, 6)):
        tops = np.append(0, np.cumsum(blocks.size))
        offset = blocks.spread(tops[:-1], len(space))
        check(task, conflicts, offset, int(tops[-1]))
        # No section is fuller than the target allows.
        load = np.zeros(space.sections, dtype=np.int64)
        for low, high, size in zip(blocks.low, blocks.high, blocks.size, strict=True):
            load[low:high] += size
        assert load.max() <= target


def test_gluing_takes_a_perfect_packing_to_few_blocks():
    task, conflicts = prepared(Problem.from_intervals(cut_rectangle(120, seed=3, width=300)))
    space = Space(task, conflicts)
    *_, last = glue(space, int(space.load.max()), Style(), ())
    assert len(last.size) < 60


def test_without_work_nothing_is_searched_or_glued(monkeypatch):
    task, conflicts = prepared(Problem.from_intervals(gap_rows()))
    space, stages = Space(task, conflicts), []

    def glued(*args):
        for blocks in glue(*args):
            stages.append(improver.work)
            yield blocks

    monkeypatch.setattr(improve, "glue", glued)

    def improver_of(work):
        return improve.Improver(space, np.zeros(len(space), dtype=np.int64), 8, 7, work)

    improver = improver_of(0)
    assert not any(found is not None for found in improver._searches(7, 1))
    assert not stages
    assert improver.work == 0
    improver = improver_of(LIMIT)
    list(improver._glued(7, Style(), 100))
    first, second = stages[:2]
    del stages[:]
    improver = improver_of(LIMIT - second)  # what there is to do before the second stage
    list(improver._glued(7, Style(), 100))
    assert stages == [first - second]


def test_a_plan_says_how_its_search_ended(monkeypatch, caplog):
    problem = Problem.from_intervals(hard_rows())
    said = {}
    with monkeypatch.context() as less:
        less.setitem(solve.WORK, "fast", 1)
        said["limit"] = plan(problem)
    with monkeypatch.context() as less:
        less.setitem(solve.MAX_SEARCHED, "optimal", 9)
        said["skipped"] = plan(problem, effort="optimal")
    monkeypatch.setattr(improve, "_SAID", 0)
    monkeypatch.setattr(improve, "time", SimpleNamespace(monotonic=lambda: 5.0))
    with caplog.at_level(logging.INFO, "symmplan"):
        said["complete"] = plan(problem, effort="optimal")
    assert "of the work done" in caplog.text
    for end, made in said.items():
        made.verify()
        assert (made.search, made.optimal) == (end, end == "complete")
        assert Plan.from_json(made.to_json()).search == end
    assert "search ended by its limit of work" in said["limit"].summary()
    assert "not searched: too many buffers at once" in said["skipped"].summary()
    assert "not searched: too many buffers at once" in said["skipped"]._repr_html_()
