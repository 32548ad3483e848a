"""The planner before the explorer: its plans are right, and each fact that it is told counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
from explorer import TinyProgram, explore
from explorer_counts import count
from explorer_programs import COLLECTIVES, REMOTE, planned, problem_of, tiny_programs
from hypothesis import HealthCheck, Phase, find, settings

import symmplan

if TYPE_CHECKING:
    from symmplan.model import Problem


def test_plans_are_right_and_most_barriers_needed():
    counts = count(200)
    assert counts.unknown == 0
    assert counts.sharing > counts.programs / 3
    assert counts.needed > 0.75 * counts.barriers
    # With one group, the rest keep writes apart that nobody reads.
    assert counts.one_group_needed > 0.9 * counts.one_group


def _kinds(program: TinyProgram) -> dict[str, str]:
    return {c.name: c.kind for c in program.calls}


def _operations(program: TinyProgram, problem: Problem, kinds, **facts) -> Problem:
    """A problem whose operations of some kinds have other facts."""
    kind = _kinds(program)
    changed = [attrs.evolve(o, **facts) if kind[o.name] in kinds else o for o in problem.operations]
    return attrs.evolve(problem, operations=changed)


def _accesses(program: TinyProgram, problem: Problem, kinds, **facts) -> Problem:
    kind = {c.name: c.kind for c in program.calls}
    kind |= {c.name: kind[c.of] for c in program.calls if c.of}
    changed = [
        attrs.evolve(a, **facts) if kind[a.operation] in kinds else a for a in problem.accesses
    ]
    return attrs.evolve(problem, accesses=changed)


def _without(program: TinyProgram, problem: Problem, kind: str, *, write: bool) -> Problem:
    """A problem that says nothing of what calls of a kind read, or write."""
    kinds = _kinds(program)
    kept = [a for a in problem.accesses if kinds[a.operation] != kind or a.write != write]
    names = {a.buffer for a in kept}
    return attrs.evolve(
        problem, accesses=kept, buffers=[b for b in problem.buffers if b.name in names]
    )


def _unheld(program: TinyProgram, problem: Problem) -> Problem:
    """A problem in which asynchronous calls are over at once."""
    waits = {c.name for c in program.calls if c.of}
    return attrs.evolve(
        problem,
        operations=[attrs.evolve(o, ends=()) for o in problem.operations],
        accesses=[a for a in problem.accesses if a.operation not in waits],
    )


#: ``{what is said that is not true: how}``
LIES = {
    "broadcast meets": lambda p, q: _operations(p, q, ["broadcast"], synchronizes=True),
    "all-to-all with empty parts meets": lambda p, q: _operations(
        p, q, ["all_to_all"], synchronizes=True
    ),
    "one-sided ops meet": lambda p, q: _operations(p, q, REMOTE, synchronizes=True),
    "one-sided ops handshake": lambda p, q: _operations(p, q, REMOTE, handshake=True),
    "one-sided ops release": lambda p, q: _operations(p, q, REMOTE, release=True),
    "collectives handshake": lambda p, q: _operations(
        p, q, [c for c in COLLECTIVES if c != "broadcast"], handshake=True
    ),
    "broadcasts release": lambda p, q: _operations(p, q, ["broadcast"], release=True),
    "one-sided ops enter": lambda p, q: _accesses(p, q, REMOTE, enters=True),
    "one-sided ops' accesses are released": lambda p, q: _accesses(p, q, REMOTE, releases=True),
    "no peer reads": lambda p, q: _accesses(p, q, ["read"], remote=False),
    "no peer writes": lambda p, q: _accesses(p, q, ["push"], remote=False),
    "a copy reads nothing": lambda p, q: _without(p, q, "copy", write=False),
    "a copy writes nothing": lambda p, q: _without(p, q, "copy", write=True),
    "ops read nothing": lambda p, q: _without(p, q, "local", write=False),
    "pushes read nothing": lambda p, q: _without(p, q, "push", write=False),
    "asynchronous calls are over at once": _unheld,
}


def _first(wanted, kinds: tuple[str, ...] = ()) -> TinyProgram:
    """A program of some kinds of calls of which something holds; raises if there is none."""
    calm = settings(
        max_examples=4000,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return find(tiny_programs(kinds=kinds), wanted, settings=calm)


#: Where only some kinds of calls can show it: those, so that it is found soon.
_SHOWN_BY = {
    "broadcast meets": ("broadcast", "push", "read"),
    "broadcasts release": ("broadcast", "push", "read"),
    "one-sided ops meet": ("push", "read"),
    "asynchronous calls are over at once": ("all_reduce", "broadcast", "push", "local"),
}


#: One in three in each run of the README's command.
_LIES = [pytest.param(lie, marks=[pytest.mark.further] * (i % 3 > 0)) for i, lie in enumerate(LIES)]


@pytest.mark.long
@pytest.mark.parametrize("lie", _LIES)
def test_what_the_planner_is_told_counts(lie):
    def misled(program: TinyProgram) -> bool:
        problem = problem_of(program)
        told = LIES[lie](program, problem)
        if told == problem:
            return False
        return explore(program, planned(program, symmplan.plan(told)), limit=200).kind == "wrong"

    _first(misled, _SHOWN_BY.get(lie, ()))


@pytest.mark.further
@pytest.mark.parametrize(
    ("fact", "kinds"), [("early", ("all_gather", "all_to_all")), ("late", ("all_reduce",))]
)
def test_own_bytes_touched_outside_the_doors_are_seen(fact, kinds):
    def misled(program: TinyProgram) -> bool:
        if not any(c.kind in kinds and c.handshake for c in program.calls):
            return False
        calls = [
            attrs.evolve(c, **{fact: True}) if c.kind in kinds and c.handshake else c
            for c in program.calls
        ]
        plan = planned(program, symmplan.plan(problem_of(program)))
        return explore(attrs.evolve(program, calls=tuple(calls)), plan, limit=200).kind == "wrong"

    _first(misled, (*kinds, "push", "read", "local"))
