"""Advice: every saving is real, and the expected advice is given."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from strategies import problems

from examples import examples
from symmplan.errors import PlanningError
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner import plan


def two_streams(*, edges=()):
    ops = [Operation("x0", "x"), Operation("y0", "y")]
    buffers = [Buffer("a", 1024), Buffer("b", 2048)]
    return Problem(buffers, ops, [Access("x0", "a"), Access("y0", "b")], edges=edges)


def kinds(made):
    return {a.kind: a for a in reversed(made.advice())}


def test_a_missing_wait_is_named_with_its_bytes():
    advice = [a for a in plan(two_streams()).advice() if a.kind == "order" and a.buffers]
    assert {a.edges for a in advice} == {(("x0", "y0"),), (("y0", "x0"),)}
    assert {a.saves for a in advice} == {1024}


def test_nothing_is_advised_where_nothing_helps():
    made = plan(two_streams(edges=[("x0", "y0")]))
    assert made.advice() == ()


def test_alignment_and_flags():
    ops = [Operation("o0"), Operation("o1")]
    buffers = [
        Buffer("a", 100, align=4096),
        Buffer("b", 100, align=64),
        Buffer("c", 100, align=64),
        Buffer("p", 5000, align=64, persistent=True),
    ]
    accesses = [Access("o0", n) for n in "abc"] + [Access("o1", "p")]
    found = kinds(plan(Problem(buffers, ops, accesses)))
    assert found["persistent"].saves > 0


def test_what_all_advice_saves_is_planned_and_no_sum():
    ops = [Operation("o0"), Operation("o1"), Operation("o2")]
    buffers = [Buffer("a", 1024), Buffer("p", 2048, persistent=True)]
    buffers += [Buffer("q", 2048, persistent=True)]
    made = plan(Problem(buffers, ops, [Access(f"o{i}", name) for i, name in enumerate("apq")]))
    alone = [a.saves for a in made.advice() if a.saves and a.kind != "total"]
    assert alone == [1024, 1024]
    found = kinds(made)["total"]
    assert found.saves == 3072
    assert found.problem.buffers[1:] == (Buffer("p", 2048), Buffer("q", 2048))


def test_a_barrier_between_runs_may_go_with_the_one_before_it():
    """Each of two operations got one; the later one's went when the earlier one was looked at."""
    buffers = [Buffer(f"b{i}", 1, g, signal_pad=True) for i, g in enumerate("gghghg")]
    buffers = [b if b.name == "b4" else evolve(b, persistent=True) for b in buffers]
    ops = [Operation("o0", group="h", synchronizes=True), *(Operation(f"o{i}") for i in (1, 2))]
    accesses = [Access("o0", f"b{i}", remote=i == 3) for i in (0, 2, 3, 5)]
    accesses += [Access("o1", f"b{i}", remote=i == 4) for i in (2, 3, 4)]
    accesses += [Access("o2", f"b{i}", write=i > 1, remote=i < 3) for i in (1, 2, 3)]
    made = plan(Problem(buffers, ops, accesses, shared_groups=[("g", "h")]))
    for a in made.advice():
        plan(a.problem).verify()


@examples(60, deadline=None)
@given(problems())
def test_every_saving_is_verified(problem):
    try:
        made = plan(problem)
    except PlanningError:
        return
    for a in made.advice():
        better = plan(a.problem)
        better.verify()
        assert made.peak_bytes - better.peak_bytes == a.saves > 0


def test_advice_calls_tensors_as_the_program_does():
    problem = two_streams()
    named = [evolve(b, label=f"layers.{b.name}.wq") for b in problem.buffers]
    (text, *_) = (a.text for a in plan(evolve(problem, buffers=named)).advice() if a.buffers)
    assert "'layers.a.wq' before 'layers.b.wq'" in text or "'layers.b.wq' before" in text
    same = [evolve(b, label="layers.0") for b in problem.buffers]
    (text, *_) = (a.text for a in plan(evolve(problem, buffers=same)).advice() if a.buffers)
    assert "'a' before 'b'" in text or "'b' before 'a'" in text
