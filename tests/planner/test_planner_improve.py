"""What improves packings makes packings; glued blocks unglue to them."""

from __future__ import annotations

import numpy as np
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from instances import cut_rectangle
from strategies import gap_rows, interval_problems, problems

from examples import examples
from symmplan.model import Problem
from symmplan.planner.items import conflicts_of, items_of
from symmplan.planner.packing import improve
from symmplan.planner.packing.blocks import Style, glue
from symmplan.planner.packing.bound import heaviest_moment
from symmplan.planner.packing.greedy import first_fit, squeak
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


@examples(80, deadline=None)
@given(
    problems(groups=("g",), remote=False, constraints=False, pins=False, max_bytes=6)
    | interval_problems(max_buffers=7, max_time=6, max_bytes=6),
    st.data(),
)
def test_squeaky_wheels_pack(problem, data):
    task, conflicts = prepared(problem)
    space = Space(task, conflicts)
    rank = np.asarray(data.draw(st.permutations(range(len(task)))), dtype=np.int64)
    names = [f"{i:02}" for i in range(len(task))]
    best = lowest_peak(
        dict(zip(names, task.size.tolist(), strict=True)),
        {frozenset((names[a], names[b])) for a, b in zip(*conflicts.pairs(), strict=True)},
        dict(zip(names, task.align.tolist(), strict=True)),
    )
    offset, peak = squeak(space, rank, best, 20)
    assert peak >= best
    check(task, conflicts, offset, peak)


@examples(60, deadline=None)
@given(interval_problems(max_buffers=12), st.integers(0, 20_000), st.data())
def test_an_improved_packing_is_one_and_no_higher(problem, work, data):
    task, conflicts = prepared(problem)
    pin = np.full(len(task), -1, dtype=np.int64)
    if data.draw(st.booleans()):
        pin[data.draw(st.integers(0, len(task) - 1))] = data.draw(st.integers(0, 8))
    task = evolve(task, pin=pin)
    start = first_fit(task, conflicts, np.arange(len(task)))
    peak = int((start + task.size).max())
    bound = int(heaviest_moment(task)[0])
    improver = improve.Improver(Space(task, conflicts), start, peak, bound, work)
    improver.run()
    assert bound <= improver.peak <= peak
    assert (improver.offset[pin >= 0] == pin[pin >= 0]).all()
    check(task, conflicts, improver.offset, improver.peak)


def test_where_all_is_pinned_nothing_is_improved():
    task, conflicts = prepared(Problem.from_intervals([("a", 0, 1, 1)]))
    task = evolve(task, pin=np.array([3]))
    improver = improve.Improver(Space(task, conflicts), task.pin, 4, 1, 1000)
    improver.run()
    assert (improver.offset.tolist(), improver.peak) == ([3], 4)


@examples(100, deadline=None)
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


def test_without_work_nothing_is_glued(monkeypatch):
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
    assert not improver._try(7)
    assert not stages
    assert improver.work == 0
    improver = improver_of(LIMIT)
    improver._glue(7, Style())
    first, second = stages[:2]
    del stages[:]
    improver = improver_of(LIMIT - second)  # what there is to do before the second stage
    improver._glue(7, Style())
    assert stages == [first - second]


def test_gluing_is_for_items_without_alignments_and_pinned_neighbours(monkeypatch):
    asked = []
    monkeypatch.setattr(improve, "glue", lambda *args: asked.append(args) or iter(()))
    task, conflicts = prepared(Problem.from_intervals(gap_rows()))
    size = len(task)
    pin = np.where(np.arange(size) == 0, 0, -1)
    align = np.where(np.arange(size) == 0, 2, 1)
    for changed, glues in (({}, True), ({"pin": pin}, False), ({"align": align}, False)):
        asked.clear()
        other = evolve(task, **changed)
        start = np.cumsum(other.size) * 2  # far above each other
        improve.Improver(Space(other, conflicts), start, 1 << 20, 1, LIMIT).run()
        assert bool(asked) == glues
