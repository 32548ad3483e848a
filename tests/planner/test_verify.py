"""`verify` names every way in which a plan can be wrong."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from hypothesis import event, given
from hypothesis import strategies as st
from instances import steady_stream, stream_program
from steps import lines_of
from strategies import problems
from unsynchronised import unsynchronised

import symmplan.planner.verify as verify_package
from examples import examples
from symmplan.errors import PlanningError, VerificationError
from symmplan.model import Access, Barrier, Bound, Buffer, Operation, Placement, Problem
from symmplan.planner import order, plan
from symmplan.testing import conflicts


def rich():
    """A problem in which every rule has something to say."""
    ops = [
        Operation("o0", group="g"),
        Operation("o1"),
        Operation("o2", group="g"),
        Operation("o3"),
        Operation("p0", "side"),
    ]
    buffers = [
        Buffer("a", 100, "g", align=64),
        Buffer("b", 100, "g", align=64),
        Buffer("c", 200, "g", align=64),
        Buffer("twin", 100, "g", align=64),
        Buffer("pin", 64, "g", align=64, offset=640),
        Buffer("keep", 64, "g", align=64, persistent=True),
        Buffer("pad", 64, "g", align=64, signal_pad=True),
        Buffer("pad2", 64, "g", align=64, signal_pad=True),
        Buffer("alone", 64, "g", align=64),
        Buffer("other", 64, "h", align=64),
    ]
    accesses = [
        Access("o0", "a", write=True, remote=True),
        Access("o1", "a"),
        Access("o1", "twin", write=True),
        Access("o2", "b", write=True, remote=True),
        Access("o3", "b"),
        Access("o0", "c"),
        Access("o1", "c"),
        Access("o3", "pin"),
        Access("o3", "keep"),
        Access("o1", "pad"),
        Access("p0", "pad2"),
        Access("o2", "alone"),
        Access("o2", "other"),
    ]
    return Problem(buffers, ops, accesses, together=[("a", "twin")], apart=[("alone", "b")])


@pytest.fixture(scope="module")
def made():
    p = plan(rich())
    p.verify()
    return p


def kind_of(wrong):
    with pytest.raises(VerificationError) as e:
        wrong.verify()
    assert str(e.value).startswith("plan is wrong: ")
    assert "expected" in str(e.value)
    return e.value.kind


def moved(made, name, **change):
    places = dict(made.placements)
    places[name] = evolve(places[name], **change)
    return evolve(made, placements=places)


def resized(made, k, **change):
    segments = list(made.segments)
    segments[k] = evolve(segments[k], **change)
    return evolve(made, segments=segments)


def without(made, name):
    return evolve(made, placements={n: p for n, p in made.placements.items() if n != name})


def placed(made, name):
    return next(i for i, s in enumerate(made.segments) if s.name == made.placements[name].segment)


def joined(made, name, other):
    """Move a buffer to the segment of another, above everything."""
    k = placed(made, other)
    top = made.segments[k].nbytes
    grown = resized(made, k, nbytes=top + 64)
    return moved(grown, name, segment=made.segments[k].name, offset=top)


MUTATIONS = {
    "overlap": lambda m: moved(m, "c", offset=m.placements["a"].offset),
    "misaligned": lambda m: moved(m, "b", offset=m.placements["b"].offset + 1),
    "out_of_segment": lambda m: moved(m, "b", offset=m.segments[placed(m, "b")].nbytes),
    "missing_buffer": lambda m: without(m, "c"),
    "unknown_buffer": lambda m: evolve(
        m, placements={**m.placements, "ghost": Placement("segment0", 0, 1)}
    ),
    "unknown_segment": lambda m: moved(m, "c", segment="nowhere"),
    "nbytes": lambda m: moved(m, "c", nbytes=201),
    "group": lambda m: moved(m, "other", segment=m.placements["c"].segment),
    "segment_groups": lambda m: resized(m, 0, groups=("g", "h")),
    "segment_name": lambda m: resized(m, 1, name=m.segments[0].name),
    "pin": lambda m: moved(m, "pin", offset=0),
    "together": lambda m: moved(m, "twin", offset=m.placements["twin"].offset + 64),
    "apart": lambda m: joined(m, "alone", "b"),
    "pad": lambda m: resized(joined(m, "pad2", "pad"), placed(m, "pad2"), signal_pad=False),
    "signal_pad": lambda m: resized(m, placed(m, "pad"), signal_pad=False),
    "barrier": lambda m: evolve(m, barriers=()),
    "unknown_barrier": lambda m: evolve(m, barriers=(Barrier("nothing", "g"),)),
    "segment_size": lambda m: resized(m, 0, nbytes=m.segments[0].nbytes + 64),
    "segment_empty": lambda m: evolve(
        m, segments=(*m.segments, evolve(m.segments[0], name="idle", signal_pad=False))
    ),
    "lower_bound": lambda m: resized(m, 0, lower_bound_bytes=m.segments[0].lower_bound_bytes - 64),
}


@pytest.mark.parametrize("kind", MUTATIONS)
def test_each_corruption_is_named(made, kind):
    assert kind_of(MUTATIONS[kind](made)) == kind


@pytest.mark.parametrize(
    "change",
    [
        {"lower_bound_bytes": 1 << 40},
        {"lower_bound_bytes": 1},
        {"witness": ()},
        {"witness": ("nobody",)},
        {"witness": ("a", "a")},
        {"witness": ("a", "b")},
        {"proof": "hope"},
        {"proof": "pin", "witness": ("c",)},
    ],
)
def test_each_wrong_bound_is_named(made, change):
    assert kind_of(resized(made, placed(made, "c"), **change)) == "lower_bound"


def test_a_false_claim_to_be_optimal_is_refuted():
    rows = [("a", 0, 2, 3), ("b", 1, 3, 3), ("c", 2, 4, 3)]
    made = plan(Problem.from_intervals(rows))
    (segment,) = made.segments
    wasteful = evolve(
        made,
        segments=(evolve(segment, nbytes=9, lower_bound_bytes=9),),
        placements={n: Placement("segment0", 3 * i, 3) for i, n in enumerate("abc")},
    )
    assert wasteful.optimal
    assert kind_of(wasteful) == "lower_bound"
    honest = evolve(wasteful, segments=(evolve(segment, nbytes=9),))
    honest.verify()
    assert not honest.optimal


def test_joint_bounds_are_checked(made):
    assert made.bounds
    assert kind_of(evolve(made, bounds=())) == "lower_bound"
    (bound, *_) = made.bounds
    assert kind_of(evolve(made, bounds=(evolve(bound, nbytes=bound.nbytes + 64),))) == (
        "lower_bound"
    )
    assert kind_of(evolve(made, bounds=(Bound(("x",), 64),))) == "lower_bound"


def test_a_persistent_buffer_shares_with_nothing(made):
    wrong = moved(made, "alone", segment=made.placements["keep"].segment)
    wrong = moved(wrong, "alone", offset=made.placements["keep"].offset)
    assert kind_of(wrong) in ("overlap", "apart")


@examples(80, deadline=None)
@given(problems(pins=False), st.data())
def test_a_moved_buffer_is_caught_exactly_if_it_is_wrong(problem, data):
    try:
        made = plan(problem)
    except PlanningError:
        return
    name = data.draw(st.sampled_from(sorted(made.placements)))
    b = next(b for b in problem.buffers if b.name == name)
    place = made.placements[name]
    segment = next(s for s in made.segments if s.name == place.segment)
    room = (segment.nbytes - b.nbytes) // b.align
    offset = b.align * data.draw(st.integers(0, max(0, room)))
    wrong = moved(made, name, offset=offset)
    if any(name in pair for pair in problem.together):
        with contextlib.suppress(VerificationError):
            wrong.verify()
        return
    clash = any(
        wrong.placements[x].segment == wrong.placements[y].segment
        and wrong.placements[x].offset < wrong.placements[y].end
        and wrong.placements[y].offset < wrong.placements[x].end
        for x, y in map(sorted, conflicts(problem))
    )
    kind = ""
    try:
        wrong.verify()
    except VerificationError as e:
        kind = e.kind
    assert kind in ("", "overlap", "barrier", "segment_size")
    assert (kind == "overlap") == clash
    if not clash:
        assert (kind == "barrier") == bool(unsynchronised(wrong))


@examples(200, deadline=None)
@given(problems(pins=False, constraints=False), st.data())
def test_every_barrier_is_needed_or_harmless_and_a_missing_one_is_caught(problem, data):
    made = plan(problem)
    if not made.barriers:
        return
    k = data.draw(st.integers(0, len(made.barriers) - 1))
    fewer = evolve(made, barriers=made.barriers[:k] + made.barriers[k + 1 :])
    if unsynchronised(fewer):
        assert kind_of(fewer) == "barrier"
    else:
        fewer.verify()


@contextlib.contextmanager
def wrong_clocks(ahead):
    """The planner takes so many more operations of each chain to have happened before."""
    build = order._build

    def built(problem):
        made = build(problem)
        lengths = np.asarray([len(members) for members in made.members], dtype=np.int32)
        return evolve(made, before=np.minimum(made.before + np.int32(ahead), lengths))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(order, "_build", built)
        yield


@examples(100, deadline=None)
@given(problems(pins=False, remote=False, groups=("g",)), st.integers(1, 3))
def test_a_planner_whose_clocks_are_wrong_is_caught(problem, ahead):
    """Its clocks say of some operations that they happened before others, and they did not."""
    with wrong_clocks(ahead):
        try:
            made = plan(evolve(problem))
        except PlanningError:
            return
    broken = any(
        made.placements[x].segment == made.placements[y].segment
        and made.placements[x].offset < made.placements[y].end
        and made.placements[y].offset < made.placements[x].end
        for x, y in made.conflict_graph().edges
    )
    try:
        made.verify()
    except VerificationError as error:
        event(error.kind)
    else:
        assert not broken


def test_operations_that_only_wrong_clocks_order_overlap():
    ops = [Operation("o0", "s0"), Operation("o1", "s1")]
    accesses = [Access("o0", "a"), Access("o1", "b")]
    with wrong_clocks(1):
        made = plan(Problem([Buffer("a", 8, align=1), Buffer("b", 8, align=1)], ops, accesses))
    assert made.peak_bytes == 8
    assert list(made.conflict_graph().edges) == [("a", "b")]
    assert kind_of(made) == "overlap"


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_verify_shares_no_code_with_the_planner():
    shared = "symmplan.planner.graphs"
    allowed = ("symmplan.errors", "symmplan.model", "symmplan.planner.verify", shared)
    here = Path(verify_package.__file__).parent
    files = sorted(here.glob("*.py"))
    assert len(files) > 5
    for file in (*files, here.parent / "graphs.py"):
        for name in imports(file):
            assert not name.startswith("symmplan") or name.startswith(allowed), (file, name)
    for file in sorted({*here.parent.rglob("*.py")} - {*files}):
        assert shared not in imports(file), file


@pytest.mark.further
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(lambda n: Problem.from_intervals(steady_stream(n)), id="intervals"),
        pytest.param(stream_program, id="streams"),
    ],
)
def test_verify_grows_with_its_plan_and_not_with_its_square(problem):
    small, large = (lines_of(plan(problem(n)).verify) for n in (1000, 8000))
    assert 0 < small < large < 16 * small  # its square would be 64


def _one_buffer(*operations, accesses):
    return Problem(buffers=[Buffer("x", 64, "g")], operations=operations, accesses=accesses)


@pytest.mark.parametrize(
    ("problem", "before"),
    [
        (  # peers read what they cannot know to be written
            _one_buffer(
                Operation("fill"),
                Operation("pull", group="g", release=True),
                accesses=[Access("fill", "x", write=True), Access("pull", "x", remote=True)],
            ),
            {"pull"},
        ),
        (  # we read what peers may not have written yet
            _one_buffer(
                Operation("push", group="g", handshake=True),
                Operation("read"),
                accesses=[Access("push", "x", write=True, remote=True), Access("read", "x")],
            ),
            {"read"},
        ),
        (  # an asynchronous gather of x, while we read x, too: nothing changes
            _one_buffer(
                Operation("fill"),
                Operation("start", group="g", handshake=True),
                Operation("read"),
                Operation("wait", group="g", release=True),
                accesses=[
                    Access("fill", "x", write=True),
                    Access("start", "x", remote=True),
                    Access("read", "x"),
                    Access("wait", "x", remote=True),
                ],
            ),
            set(),
        ),
        (  # a collective meets by itself
            _one_buffer(
                Operation("fill"),
                Operation("reduce", group="g", handshake=True, release=True),
                Operation("read"),
                accesses=[
                    Access("fill", "x", write=True),
                    Access("reduce", "x", write=True, remote=True),
                    Access("read", "x"),
                ],
            ),
            set(),
        ),
    ],
)
def test_bytes_of_one_buffer_pass_between_ranks_only_where_they_meet(problem, before):
    made = plan(problem)
    made.verify()
    assert {b.before for b in made.barriers} == before
    if before:
        assert kind_of(evolve(made, barriers=())) == "barrier"
    assert not unsynchronised(made)


def test_ranks_of_which_nobody_else_tells_must_hear_of_each_other():
    """In rows and columns some other rank would tell; a plan does not know who its groups are."""
    groups = {"b0": "h", "b1": "g", "b2": "g", "b3": "g", "b4": "g", "b5": "g"}
    reads = [
        "o1 b0",
        "o1 b1",
        "o2 b2",
        "o2 b3",
        "o3 b3",
        "o4 b3",
        "o0 b4",
        "o1 b4",
        "o2 b4",
        "o2 b5",
    ]
    made = plan(
        Problem(
            buffers=[Buffer(name, 1, group, align=1) for name, group in groups.items()],
            operations=[Operation("o0", "s0", "h", synchronizes=True)]
            + [Operation(f"o{i}", "s0") for i in range(1, 6)],
            accesses=[
                Access(*read.split(), write=False, remote=read in ("o1 b0", "o4 b3"))
                for read in reads
            ],
        )
    )
    assert len(made.barriers) > 1
    for k in range(len(made.barriers)):
        fewer = evolve(made, barriers=made.barriers[:k] + made.barriers[k + 1 :])
        assert unsynchronised(fewer)
        assert kind_of(fewer) == "barrier"
