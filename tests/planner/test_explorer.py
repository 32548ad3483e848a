"""The explorer itself: it runs every order, and it sees what went wrong before."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib

import attrs
import pytest
from explorer import TinyBuffer, TinyCall, TinyPlan, TinyProgram, explore
from explorer.behaviours import BEHAVIOURS
from explorer.machine import (
    Interleaver,
    Post,
    Read,
    Symbols,
    Thread,
    Wait,
    lockstep,
    search,
)
from explorer.program import threads_of
from explorer_programs import tiny_programs
from hypothesis import assume, example, given
from hypothesis import strategies as st
from paths import HELPERS

from examples import examples

# -- every order -------------------------------------------------------------------------------


@st.composite
def crowded(draw, **kwargs) -> tuple[TinyProgram, TinyPlan]:
    """Programs whose buffers lie anywhere, with any barriers: many are wrong."""
    program = draw(tiny_programs(**kwargs))
    cells = {}
    for buffer in program.buffers:
        first = draw(st.integers(0, 2))
        cells[buffer.name] = tuple(range(first, first + buffer.cells))
    groups = st.sampled_from(["all", *program.groups])
    barriers = [(c.name, draw(groups)) for c in program.calls if draw(st.booleans())]
    return program, TinyPlan(cells, tuple(barriers))


def _prepared(program: TinyProgram, plan: TinyPlan):
    symbols = Symbols()
    expected = lockstep(threads_of(program, TinyPlan(), apart=True), symbols)
    return threads_of(program, plan), expected, symbols


def by_trying_all(threads, expected, symbols) -> str:
    """The verdict from all orders there are, one access at a time; states are visited once."""
    seen = set()
    todo: list[tuple[int, ...]] = [()]
    while todo:
        assume(len(seen) < 1500)
        order = todo.pop()
        machine = Interleaver(threads, symbols)
        for thread in order:
            event = machine.step(thread)
        if order and not event.write and event.value != expected[event.thread, event.at]:
            return "wrong"
        state = (tuple(machine._at), frozenset(machine._memory.items()), tuple(machine._known))
        if state not in seen:
            seen.add(state)
            todo += ((*order, thread) for thread in machine.ready)
    return "right"


@examples(60)
@given(crowded(ranks=(2,), groups=False, max_calls=1, iterations=1))
def test_agrees_with_trying_all_orders(case):
    prepared = _prepared(*case)
    assert search(*prepared, limit=3000).kind == by_trying_all(*prepared)


def by_definition(threads, expected, symbols) -> str:
    """The verdict without running any but one order.

    A read is right in all orders if a write of what it should see comes before it in all, and each
    write of something else comes before such a write, or after the read, in all. As long as all
    reads are right, writes write in all orders what they write in one.
    """
    sites = [
        (t, i, step) for t, thread in enumerate(threads) for i, step in enumerate(thread.steps)
    ]
    posts = {step.flag: (t, i) for t, i, step in sites if isinstance(step, Post)}

    @functools.cache
    def before(thread: int, at: int) -> frozenset[tuple[int, int]]:
        if not at:
            return frozenset()
        step = threads[thread].steps[at - 1]
        found = before(thread, at - 1)
        if isinstance(step, Wait):
            return found.union(*(before(*posts[flag]) for flag in step.flags))
        return found | {(thread, at - 1)}

    for thread, at, _ in sites:  # in small bites: recursion is as deep as threads wait
        before(thread, at)
    machine = Interleaver(threads, symbols)
    written: dict = {}  # cell -> {site: value}
    while machine.ready:
        event = machine.step(min(machine.ready))
        if event.write:
            written.setdefault(event.cell, {})[event.thread, event.at] = event.value
        elif event.value != expected[event.thread, event.at]:
            return "wrong"
    for thread, at, step in sites:
        if not isinstance(step, Read):
            continue
        read, value = (thread, at), expected[thread, at]
        writes = written.get(step.cell, {})
        good = [w for w, v in writes.items() if v == value and w in before(*read)]
        if not good:
            return "wrong"
        for other, v in writes.items():
            hidden = any(other in before(*w) for w in good) or read in before(*other)
            if v != value and not hidden:
                return "wrong"
    return "right"


#: A rank's peer overwrites what it is about to read, with the same value.
_EQUAL = (
    TinyProgram(
        2,
        (TinyBuffer("x", 2), TinyBuffer("sum", 2), TinyBuffer("y", 2)),
        (
            TinyCall("write", "local", writes=("x",)),
            TinyCall("reduce", "all_reduce", reads=("x",), writes=("sum",)),
            TinyCall("swap", "all_to_all", ("sum",), ("y",), handshake=True, transport="push"),
            TinyCall("read", "local", reads=("y",)),
        ),
    ),
    TinyPlan({"x": (0, 1), "sum": (0, 1), "y": (1, 2)}),
)


@example(_EQUAL)
@examples(150)
@given(crowded(max_calls=4))
def test_agrees_with_the_definition(case):
    prepared = _prepared(*case)
    outcome = search(*prepared, limit=1000)
    assume(outcome.kind != "gave up")
    assert outcome.kind == by_definition(*prepared)


# -- what went wrong before --------------------------------------------------------------------


def _program(ranks: int, *calls: TinyCall) -> TinyProgram:
    names = dict.fromkeys(n for c in calls for n in (*c.reads, *c.writes))
    sizes = {c.writes[0]: ranks for c in calls if c.kind == "all_gather"}
    buffers = tuple(TinyBuffer(n, sizes.get(n, 1)) for n in names)
    return TinyProgram(ranks, buffers, calls)


_call = TinyCall

#: ``{name: (program, buffers that share a cell, the barriers that make it right)}``
KNOWN = {
    "an in-place collective's input is copied where peers still read": (
        _program(
            2,
            _call("mul", "local", "", "x"),
            _call("peer_max", "read", "x", "m", handshake=True),
            _call("add", "local", "m", "t"),
            _call("copy", "copy", "t", "b"),
            _call("all_reduce", "all_reduce", "b", "b"),
            _call("use", "local", "b"),
        ),
        "x b",
        ["copy"],
    ),
    "the start of a collective is no meeting": (
        _program(
            2,
            _call("mul", "local", "", "x"),
            _call("old", "local", "x", "e"),
            _call("use old", "local", "e"),
            _call("gather", "all_gather", "x", "g", asynchronous=True),
            _call("push", "push", "x", "v", release=True),
            _call("wait", "wait", of="gather"),
            _call("use", "local", "v g"),
        ),
        "e v",
        ["push"],
    ),
    "a copy into a placement reads what peers still write": (
        _program(
            2,
            _call("mul", "local", "", "x"),
            _call("push", "push", "x", "v", handshake=True),
            _call("copy", "copy", "v", "b"),
            _call("read", "read", "b", "out", handshake=True, release=True),
        ),
        "",
        ["copy"],
    ),
    "two one-sided ops on one buffer": (
        _program(
            2,
            _call("mul", "local", "", "x"),
            _call("push", "push", "x", "v"),
            _call("read", "read", "v", "out", release=True),
        ),
        "",
        ["read"],
    ),
    "a collective reads its own input at once": (
        _program(
            2,
            _call("mul", "local", "", "x"),
            _call("push", "push", "x", "v", handshake=True),
            _call("gather", "all_gather", "v", "g"),
            _call("use", "local", "g"),
        ),
        "",
        ["gather"],
    ),
    "a broadcast meets with its root alone": (
        _program(
            3,
            _call("mul", "local", "", "x"),
            _call("push", "push", "x", "v", release=True),
            _call("read", "local", "v"),
            _call("mul2", "local", "", "b"),
            _call("broadcast", "broadcast", "b", "b"),
            _call("push2", "push", "x", "u", release=True),
            _call("use", "local", "u b"),
        ),
        "v u",
        ["push", "push2"],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_faults(name):
    program, shared, barriers = KNOWN[name]
    cells = dict.fromkeys(shared.split(), ("shared",))
    right = TinyPlan(cells, tuple((call, "all") for call in barriers))
    assert explore(program, right).kind == "right"
    for i in range(len(barriers)):
        left = right.barriers[:i] + right.barriers[i + 1 :]
        verdict = explore(program, TinyPlan(cells, left))
        assert verdict.kind == "wrong"
        assert verdict.wrong.call in str(verdict)


def test_a_wrong_read_is_told_with_how_it_comes_about():
    program, _, _ = KNOWN["two one-sided ops on one buffer"]
    wrong = explore(program).wrong
    assert (wrong.call, wrong.buffers) == ("read", ("v",))
    first, expected, got, *schedule = str(wrong).splitlines()
    assert f"rank {wrong.rank}, 'read', iteration {wrong.iteration} reads cell" in first
    assert expected == f"  expected {wrong.expected}"
    assert "'push'" in expected
    assert got == f"  got {wrong.saw}"
    assert [line.strip() for line in schedule] == list(wrong.schedule)
    assert schedule[-1].startswith(f"  rank {wrong.rank}: 'read'")


# -- every door --------------------------------------------------------------------------------

#: Right because of one habit of one call alone.
DOORS = {
    "handshake": _program(
        2,
        _call("old", "local", "", "e"),
        _call("use old", "local", "e"),
        _call("call", "push", "e", "e2", handshake=True, release=True),
        _call("use", "local", "e2"),
    ),
    "release": _program(
        2,
        _call("mul", "local", "", "x"),
        _call("call", "push", "x", "v", handshake=True, release=True),
        _call("use", "local", "v"),
    ),
    "enters": _program(
        2,
        _call("mul", "local", "", "x"),
        _call("call", "all_gather", "x", "g", transport="push"),
        _call("use", "local", "g"),
    ),
    "releases": _program(
        2,
        _call("mul", "local", "", "x"),
        _call("call", "all_gather", "x", "g", transport="pull"),
        _call("use", "local", "g"),
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_without_one_door_it_is_wrong(door, monkeypatch):
    program = DOORS[door]
    assert explore(program).kind == "right"
    if door in ("handshake", "release"):
        calls = [attrs.evolve(c, **{door: False}) if c.name == "call" else c for c in program.calls]
        assert explore(attrs.evolve(program, calls=tuple(calls))).kind == "wrong"
    else:
        changed = attrs.evolve(BEHAVIOURS["all_gather"], **{door: False})
        monkeypatch.setitem(BEHAVIOURS, "all_gather", changed)
        assert explore(program).kind == "wrong"


def test_an_asynchronous_call_holds_its_buffers():
    start = _call("gather", "all_gather", "x", "g", asynchronous=True)
    calls = [_call("mul", "local", "", "x"), start, _call("wait", "wait", of="gather")]
    late = _call("again", "local", "", "y")
    use = _call("use", "local", "g y")
    shared = TinyPlan({"x": ("s",), "y": ("s",)})
    assert explore(_program(2, *calls, late, use), shared).kind == "right"
    assert explore(_program(2, *calls[:2], late, calls[2], use), shared).kind == "wrong"


def test_ranks_with_nothing_for_each_other_do_not_meet():
    def program(**facts) -> TinyProgram:
        calls = (
            _call("mul", "local", "", "x"),
            _call("old", "local", "", "e"),
            _call("use old", "local", "e"),
            _call("exchange", "all_to_all", "x", "y", **facts),
            _call("push", "push", "x", "v", release=True),
            _call("use", "local", "y v"),
        )
        sizes = {"x": 2, "y": 2}
        names = ("x", "y", "e", "v")
        return TinyProgram(2, tuple(TinyBuffer(n, sizes.get(n, 1)) for n in names), calls)

    shared = TinyPlan({"e": ("s",), "v": ("s",)}, (("mul", "all"),))
    assert explore(program(), shared).kind == "right"
    assert explore(program(empty=((1, 0),)), shared).kind == "wrong"


# -- its own errors ----------------------------------------------------------------------------


def test_gives_up_openly():
    program, _, _ = KNOWN["two one-sided ops on one buffer"]
    assert explore(program, limit=0).kind == "gave up"
    assert str(explore(program, limit=0)) == "gave up after 0 runs"


def test_threads_that_wait_for_ever_are_seen():
    threads = (Thread(0, "c", 0, "main", (Wait(("never",)),)),)
    outcome = search(threads, {}, Symbols(), limit=10)
    assert (outcome.kind, outcome.stuck) == ("stuck", (0,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: _program(2, _call("use", "local", "x")), "nobody has written"),
        (lambda: _program(2, _call("c", "local", "", "x"), _call("c", "local", "x")), "one name"),
        (lambda: _program(2, _call("c", "sing", "", "x")), "is none of"),
        (lambda: _program(2, _call("c", "wait", of="b")), "not under way"),
        (lambda: _program(2, _call("c", "local", "", "x", asynchronous=True)), "nobody waits"),
        (lambda: _program(2, _call("c", "local", "", "x", group="g")), "no group 'g'"),
        (lambda: TinyProgram(2, (), (_call("c", "local", "", "x"),)), "unknown buffers"),
        (
            lambda: _program(2, _call("c", "local", "", "x"), _call("d", "push", "x", "x")),
            "race for cell",
        ),
        (
            lambda: _program(
                2, _call("c", "local", "", "x"), _call("d", "broadcast", "x", "x", transport="fax")
            ),
            "transport 'fax' is none of",
        ),
    ],
)
def test_programs_that_make_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        explore(change())


def test_shares_nothing_with_what_it_checks():
    folder = HELPERS / "explorer"
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module)
    assert "explorer.machine" in found
    assert not {name for name in found if name.startswith("symmplan")}


def test_the_example_of_a_docstring_runs():
    assert doctest.testmod(importlib.import_module("explorer.program")).failed == 0
