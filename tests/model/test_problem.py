"""Problems: what is refused, intervals and CSV files, canonical JSON, fingerprints."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from strategies import interval_lists, problems

from examples import examples
from symmplan.errors import CapacityError, OptionError, PlanFormatError, PlanningError, ProblemError
from symmplan.model import Access, Barrier, Buffer, Operation, Plan, Problem, Unplanned
from symmplan.planner import plan

OP = Operation("o")
A = Buffer("a", 4, align=1)
USE = Access("o", "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffers": [A, A]}, "buffer 'a' is listed twice"),
        ({"operations": [OP, OP]}, "operation 'o' is listed twice"),
        ({"buffers": [Buffer("", 1)]}, "has the name ''"),
        ({"buffers": [evolve(A, nbytes=0)]}, "size of 0 bytes"),
        ({"buffers": [evolve(A, nbytes=True)]}, "size of True bytes"),
        ({"buffers": [evolve(A, nbytes=1.5)]}, "size of 1.5 bytes"),
        ({"buffers": [evolve(A, nbytes=1 << 60)]}, "bytes"),
        ({"buffers": [evolve(A, align=3)]}, "alignment of 3 bytes"),
        ({"buffers": [evolve(A, align=0)]}, "alignment of 0 bytes"),
        ({"buffers": [evolve(A, group="")]}, "names the group ''"),
        ({"buffers": [evolve(A, align=4, offset=2)]}, "pinned at byte 2"),
        ({"buffers": [evolve(A, offset=-1)]}, "pinned at byte -1"),
        ({"accesses": []}, "buffer 'a' is never accessed"),
        ({"accesses": [USE, Access("o", "x")]}, "unknown buffer"),
        ({"accesses": [USE, Access("x", "a")]}, "unknown operation"),
        ({"edges": [("o", "o")]}, "does not order two operations"),
        ({"edges": [("o", "x")]}, "unknown operation 'x'"),
        ({"together": [("a", "a")]}, "two different buffer names"),
        ({"apart": [("a", "x")]}, "unknown buffer 'x'"),
        ({"shared_groups": [("g", "g")]}, "shared_groups holds"),
        (
            {
                "buffers": [A, evolve(A, name="b", group="x")],
                "together": [("a", "b")],
                "accesses": [USE, Access("o", "b")],
            },
            "different groups",
        ),
    ],
)
def test_nonsense_is_refused_with_the_names_involved(change, message):
    parts = {"buffers": [A], "operations": [OP], "accesses": [USE], **change}
    with pytest.raises(ProblemError) as e:
        Problem(**parts)
    assert message in str(e.value)
    assert "fix: " in str(e.value)


@pytest.mark.parametrize(
    ("buffers", "pairs", "message"),
    [
        ([evolve(A, offset=0), evolve(A, name="b", offset=2)], {}, "common bytes"),
        (
            [evolve(A, offset=0), evolve(A, name="b", offset=8)],
            {"together": [("a", "b")]},
            "must share its offset",
        ),
        (
            [A, evolve(A, name="b")],
            {"together": [("a", "b")], "apart": [("b", "a")]},
            "must not share a segment",
        ),
        (
            [evolve(A, offset=1), evolve(A, name="b", align=4)],
            {"together": [("a", "b")]},
            "does not suit all",
        ),
    ],
)
def test_contradictions_are_explained(buffers, pairs, message):
    problem = Problem(buffers, [OP], [Access("o", b.name) for b in buffers], **pairs)
    with pytest.raises(PlanningError, match=message) as e:
        plan(problem)
    assert "fix: " in str(e.value)


def test_plan_checks_its_arguments():
    problem = Problem([A], [OP], [USE])
    with pytest.raises(OptionError, match="capacity"):
        plan(problem, capacity="4")
    assert plan(problem, capacity=4).peak_bytes == 4


def test_an_empty_problem_has_an_empty_plan():
    made = plan(Problem([], [], []))
    made.verify()
    assert (made.peak_bytes, made.segments, made.optimal) == (0, (), True)
    assert Plan.from_json(made.to_json()).to_json() == made.to_json()


@examples(80, deadline=None)
@given(interval_lists(max_buffers=8), st.integers(1, 40))
def test_capacity_is_met_or_a_set_that_cannot_fit_is_named(rows, capacity):
    problem = Problem.from_intervals(rows)
    try:
        made = plan(problem, capacity=capacity)
    except CapacityError as e:
        best = plan(problem)
        assert best.peak_bytes > capacity
        part = [r for r in rows if r[0] in e.buffers]
        assert part
        if best.lower_bound_bytes > capacity and best.segments[0].proof == "clique":
            assert sum(r[3] for r in part) > capacity
            assert max(r[1] for r in part) < min(r[2] for r in part)
    else:
        assert made.peak_bytes <= capacity


# Intervals and CSV --------------------------------------------------------------------------------


def test_intervals_are_half_open():
    assert plan(Problem.from_intervals([("a", 0, 1, 4), ("b", 1, 2, 4)])).peak_bytes == 4
    assert plan(Problem.from_intervals([("a", -5, 1, 4), ("b", 0, 2, 4)])).peak_bytes == 8


def test_intervals_have_numbers_of_numpy_and_an_alignment():
    rows = [("a", 0, 2, 4), ("b", 1, 3, 5), ("c", 2, 4, 300)]
    table = np.array([row[1:] for row in rows], dtype=np.int32)
    problem = Problem.from_intervals((n, *r) for (n, *_), r in zip(rows, table, strict=True))
    assert problem == Problem.from_intervals(rows)
    assert type(problem.buffers[0].nbytes) is int
    assert {b.align for b in problem.buffers} == {1}
    aligned = Problem.from_intervals(rows, align=256)
    assert {b.align for b in aligned.buffers} == {256}
    assert all(p.offset % 256 == 0 for p in plan(aligned).placements.values())
    with pytest.raises(ProblemError, match="asks for an alignment of 3 bytes"):
        Problem.from_intervals(rows, align=3)
    with pytest.raises(ProblemError, match="not of the form"):
        Problem.from_intervals([("a", np.float64(0), 1, 4)])


@pytest.mark.parametrize(
    "rows",
    [
        [("a", 1, 1, 4)],
        [("a", 0, 1, 0)],
        [("a", 0, 1)],
        [("a", 0, 1, "4")],
        [("a", 0, 1, 4), ("a", 0, 1, 4)],
    ],
)
def test_bad_intervals_are_refused(rows):
    with pytest.raises(ProblemError):
        Problem.from_intervals(rows)


def test_csv(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("id,lower,upper,size,extra\r\n1,0,3,4,x\r\n2,3,5,9,y\r\n")
    assert plan(Problem.from_csv(path)).peak_bytes == 9
    for text, message in (
        ("id,lower,upper\n1,0,3\n", "lacks the column 'size'"),
        ("", "lacks the column 'id'"),
        ("id,lower,upper,size\n1,0,x,4\n", "line 2: upper is 'x'"),
        ("id,lower,upper,size\n1,0,3\n", "line 2: the line has 3 values"),
        ("id,lower,upper,size\n1,0,3,-4\n", "line 2: size is -4"),
        ("id,lower,upper,size\n1,3,3,4\n", "which is empty"),
    ):
        path.write_text(text)
        with pytest.raises(ProblemError) as e:
            Problem.from_csv(path)
        assert message in str(e.value)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProblemError, match="cannot be read"):
        Problem.from_csv(path)
    with pytest.raises(ProblemError, match="cannot be read"):
        Problem.from_csv(tmp_path / "absent.csv")


# JSON ---------------------------------------------------------------------------------------------


@examples(100, deadline=None)
@given(problems())
def test_json_keeps_everything(problem):
    problem = evolve(problem, unplanned=[Unplanned("t", "op", "x", "why", 4)])
    text = problem.to_json()
    again = Problem.from_json(text)
    assert again.to_json() == text
    assert set(again.buffers) == set(problem.buffers)
    assert set(again.accesses) == set(problem.accesses)
    assert again.unplanned == problem.unplanned
    try:
        made = plan(problem)
    except PlanningError:
        return
    read = Plan.from_json(made.to_json())
    assert read.to_json() == made.to_json()
    assert read.fingerprint == made.fingerprint
    assert dict(read.placements) == dict(made.placements)


def sample():
    return plan(Problem.from_intervals([("a", 0, 3, 4), ("b", 1, 2, 5), ("c", 3, 5, 9)]))


def edited(**change):
    tree = json.loads(sample().to_json())
    for path, value in change.items():
        at = tree
        *algorithm, last = path.split("__")
        for step in algorithm:
            at = at[int(step) if isinstance(at, list) else step]
        if isinstance(at, list):
            at[int(last)] = value
        elif value is None:
            del at[last]
        else:
            at[last] = value
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON, or was cut off"),
        ("{", "not JSON, or was cut off"),
        ("[]", "holds no object"),
        ("{}", "of another kind"),
        ("[" * 100_000, "cannot be parsed|cut off"),
        ('{"format": NaN}', "NaN"),
        ('{"format": "x", "format": "y"}', "appears twice"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be parsed|another kind"),
        (b"{}", "no str"),
        (edited(version=99), "version 99"),
        (edited(version=True), "version True"),
        (edited(format="symmplan.problem"), "another kind"),
        (edited(extra=1), "unknown key 'extra'"),
        (edited(segments=None), "lacks 'segments'"),
        (edited(problem=None), "lacks 'problem'"),
        (edited(problem=[]), "problem is not one"),
        (edited(problem__buffers={}), "buffers is an object"),
        (edited(problem__buffers__0=3), r"buffers\[0\] is a number"),
        (edited(problem__buffers__0__nbytes="4"), r"buffers\[0\].nbytes is a string"),
        (edited(problem__buffers__0__nbytes=0), "not well formed"),
        (edited(problem__buffers__0__nbytes=None), "lacks 'nbytes'"),
        (edited(problem__buffers__0__colour="red"), "unknown key 'colour'"),
        (edited(problem__edges=[["t0"]]), "not well formed"),
        (edited(problem__edges=[[1, 2]]), "malformed"),
        (edited(placements=[]), "placements is no object"),
        (edited(placements__a=[0, 0, 4]), "placement of 'a' is malformed"),
    ],
)
def test_foreign_and_broken_texts_are_refused(text, message):
    with pytest.raises(PlanFormatError, match=message) as e:
        Plan.from_json(text)
    assert "fix: " in str(e.value)


@examples(100, deadline=None)
@given(st.data())
def test_a_corrupt_text_never_crashes(data):
    from symmplan.errors import SymmplanError

    text = sample().to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    kind = data.draw(st.sampled_from(("cut", "drop", "replace")))
    if kind == "cut":
        broken = text[:at]
    elif kind == "drop":
        broken = text[:at] + text[at + 1 :]
    else:
        broken = text[:at] + data.draw(st.sampled_from('09"{}[]:,a-')) + text[at + 1 :]
    try:
        read = Plan.from_json(broken)
    except SymmplanError:
        return
    read.verify()


# Fingerprints -------------------------------------------------------------------------------------


def mesh(first, second):
    ops = [
        Operation("gather", group=first, handshake=True, release=True),
        Operation("reduce", group=second, handshake=True, release=True),
    ]
    buffers = [Buffer("x", 1000, first), Buffer("y", 3000, second), Buffer("z", 500, first)]
    accesses = [
        Access("gather", "x", remote=True),
        Access("gather", "z", remote=True),
        Access("reduce", "y", remote=True),
    ]
    return Problem(buffers, ops, accesses, shared_groups=[(first, second)])


GOLDEN = "fec90fbfc8b61d4b5d46f646009693f7890085a3fa06d428245d1b31d3f9134d"


def test_golden_fingerprint():
    # Changes only with an entry under "Plan format" in the change log.
    assert plan(mesh("dp", "tp")).fingerprint == GOLDEN


def test_group_names_do_not_count_but_groups_do():
    one = plan(mesh("dp", "tp"))
    assert plan(mesh("17", "4")).fingerprint == one.fingerprint
    assert plan(mesh("a", "b")).fingerprint == plan(mesh("b", "a")).fingerprint
    assert plan(mesh("a", "a2")).placements == plan(mesh("z", "a2")).placements
    single = evolve(mesh("dp", "tp"), shared_groups=())
    assert plan(single).fingerprint != one.fingerprint


def test_what_people_see_does_not_count_and_what_bytes_depend_on_does():
    problem = mesh("dp", "tp")
    made = plan(problem).fingerprint

    def with_x(**change):
        buffers = tuple(evolve(b, **change) if b.name == "x" else b for b in problem.buffers)
        return plan(evolve(problem, buffers=buffers)).fingerprint

    assert with_x(op="a::b", where="out", dtype="float32", shape=(250,)) == made
    for change in ({"nbytes": 1001}, {"align": 512}, {"persistent": True}, {"signal_pad": True}):
        assert with_x(**change) != made
    renamed = [
        evolve(o, name="all_gather") if o.name == "gather" else o
        for o in mesh("dp", "tp").operations
    ]
    accesses = [
        evolve(a, operation="all_gather") if a.operation == "gather" else a
        for a in problem.accesses
    ]
    assert plan(evolve(problem, operations=renamed, accesses=accesses)).fingerprint != made


@pytest.mark.long
def test_plans_do_not_depend_on_the_hash_seed():
    code = (
        "from symmplan.planner import plan;"
        "from symmplan.model import Problem;"
        "from instances import stream_program, cut_rectangle;"
        "print(plan(stream_program(400)).fingerprint,"
        "plan(Problem.from_intervals(cut_rectangle(60, seed=3))).fingerprint)"
    )
    texts = set()
    for seed in ("0", "1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        texts.add(done.stdout)
    assert len(texts) == 1


@given(problems(), st.randoms(use_true_random=False))
def test_problems_and_plans_are_values(problem, random):
    """What is read, or listed otherwise, is equal and has the same hash."""
    shuffled = evolve(
        problem,
        buffers=random.sample(problem.buffers, len(problem.buffers)),
        accesses=random.sample(problem.accesses, len(problem.accesses)),
        edges=random.sample(problem.edges, len(problem.edges)),
    )
    for same in (Problem.from_json(problem.to_json()), shuffled):
        assert same == problem
        assert hash(same) == hash(problem)
    first, *others = problem.buffers
    assert evolve(problem, buffers=[evolve(first, label="other"), *others]) != problem
    assert problem != 1
    try:
        made = plan(problem)
    except PlanningError:
        return
    read = Plan.from_json(made.to_json())
    assert read == made
    assert hash(read) == hash(made)
    assert {made: 1}[read] == 1
    assert evolve(made, barriers=(*made.barriers, Barrier("o", "g"))) != made
