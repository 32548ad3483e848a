"""Happens-before and interference, against brute force over linear extensions."""

from __future__ import annotations

from itertools import combinations, product

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instances import stream_program
from steps import lines_of
from strategies import problems

from examples import examples
from symmplan.errors import ProblemError
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner import graphs
from symmplan.planner.graphs import Paths, conflict_graph_of
from symmplan.planner.items import conflicts_of, count_candidates, items_of
from symmplan.planner.order import order_of
from symmplan.planner.packing import bound
from symmplan.planner.packing.bound import heaviest, heaviest_clique, heaviest_moment
from symmplan.planner.packing.task import task_of
from symmplan.testing import conflicts, happens_before, heaviest_set, linear_extensions

PLAIN = {"remote": False, "pins": False, "groups": ("g",)}


def with_ops(ops, edges=()):
    return Problem([Buffer("b", 1)], ops, [Access(ops[0].name, "b")], edges=edges)


@examples(200, deadline=None)
@given(problems(max_operations=7, max_buffers=1, **PLAIN))
def test_clocks_agree_with_all_linear_extensions(problem):
    before = happens_before(problem)
    extensions = set(linear_extensions(problem))
    assert before == set.intersection(*(set(combinations(e, 2)) for e in extensions))
    order = order_of(problem)
    paths = Paths(problem.graph())
    names = [o.name for o in problem.operations]
    for a in names:
        for b in names:
            assert order.precedes(order.index[a], order.index[b]) == ((a, b) in before)
    pairs = list(product(names, repeat=2))
    found = paths.exist([(paths.number[a], paths.number[b]) for a, b in pairs])
    assert {pair for pair, there in zip(pairs, found, strict=True) if there} == before
    assert order.names in extensions
    assert tuple(o.name for o in paths.operations) in extensions


@examples(200, deadline=None)
@given(problems(max_operations=30, max_buffers=1, **PLAIN))
def test_the_graph_says_what_the_clocks_say(problem):
    graph, order = problem.graph(), order_of(problem)
    assert list(graph) == [o.name for o in problem.operations]
    assert all(graph.nodes[o.name]["operation"] is o for o in problem.operations)
    assert {k for *_, k in graph.edges(data="kind")} <= {"stream", "edge"}
    for name in graph:
        behind = {n for n in graph if order.precedes(order.index[name], order.index[n])}
        assert nx.descendants(graph, name) == behind
    graph.clear()  # the caller's own
    assert len(problem.graph()) == len(problem.operations)


@examples(50, deadline=None)
@given(problems(max_operations=30, max_buffers=1, **PLAIN), st.integers(1, 5))
def test_paths_are_the_same_however_many_are_looked_for_at_a_time(problem, at_a_time):
    paths, before = Paths(problem.graph()), happens_before(problem)
    names = [o.name for o in problem.operations]
    pairs = list(product(names, repeat=2))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(graphs, "PAIRS", at_a_time)
        found = paths.exist([(paths.number[a], paths.number[b]) for a, b in pairs])
    assert {pair for pair, there in zip(pairs, found, strict=True) if there} == before


@examples(200, deadline=None)
@given(problems(max_operations=7, max_buffers=7, constraints=True, **PLAIN))
def test_interference_is_exact(problem):
    items = items_of(problem)
    task = task_of(items, np.arange(len(items)))
    found = conflicts_of(task)
    a, b = found.pairs()
    assert (a < b).all()
    clashes = conflicts(problem)
    assert {
        frozenset((x, y))
        for i, j in zip(task.items[a].tolist(), task.items[b].tolist(), strict=True)
        for x in items.members[i]
        for y in items.members[j]
    } == clashes
    graph = conflict_graph_of(problem)
    assert {frozenset(pair) for pair in graph.edges} == clashes
    assert list(graph) == [b.name for b in problem.buffers]
    assert all(graph.nodes[b.name]["buffer"] is b for b in problem.buffers)
    assert (found.matrix() == found.matrix().T).all()


@examples(200, deadline=None)
@given(problems(max_operations=20, max_buffers=16, constraints=False, aligns=(1,), **PLAIN))
def test_the_heaviest_clique_is_exact(problem):
    items = items_of(problem)
    task = task_of(items, np.arange(len(items)))
    found = conflicts_of(task)
    sizes = {b.name: b.nbytes for b in problem.buffers}
    clashes = conflicts(problem)
    best = heaviest_set(sizes, clashes)
    weight, witness = heaviest_clique(task, found)
    assert weight == best == task.size[witness].sum()
    assert not np.triu(~found.matrix()[np.ix_(witness, witness)], k=1).any()
    assert heaviest_moment(task)[0] <= best
    assert heaviest(task)[0] == best


def test_above_its_limits_a_bound_is_less_than_exact(monkeypatch):
    # y may come at any time; in the order in which instants are looked at it comes last.
    ops = [Operation("a0", "a"), Operation("a1", "a"), Operation("b0", "b"), Operation("b1", "b")]
    touched = [("x", "a1"), ("y", "b0"), ("z", "a0"), ("z", "a1")]
    problem = Problem(
        [Buffer(name, 8, align=1) for name in "xyz"], ops, [Access(o, b) for b, o in touched]
    )
    items = items_of(problem)
    task = task_of(items, np.arange(len(items)))
    pairs = count_candidates(task)
    exact, moment = heaviest_clique(task, conflicts_of(task))[0], heaviest_moment(task)[0]
    assert exact > moment
    for limit, found in ((pairs, exact), (pairs - 1, moment)):
        monkeypatch.setattr(bound, "MAX_PAIRS", limit)
        assert heaviest(task)[0] == found


def test_large_components_grow_their_bound(monkeypatch):
    rows = [("long", 0, 6, 1), *((f"b{i}", i, i + 1, 2) for i in range(6))]
    problem = Problem.from_intervals([*rows, ("x", 6, 8, 5), ("y", 7, 9, 5)])
    items = items_of(problem)
    task = task_of(items, np.arange(len(items)))
    monkeypatch.setattr(bound, "SEEDS", 1)  # that which conflicts with most
    for limit, found in ((len(task), 10), (len(task) - 1, 3)):
        monkeypatch.setattr(bound, "MAX_FLOW_ITEMS", limit)
        weight, witness = heaviest_clique(task, conflicts_of(task))
        assert weight == task.size[witness].sum() == found


def test_a_total_order_over_many_streams_is_one_chain():
    ops = [Operation(f"o{i}", f"s{i % 5}") for i in range(50)]
    order = order_of(with_ops(ops, [(f"o{i}", f"o{i + 1}") for i in range(49)]))
    assert order.chains == 1
    assert order.names == tuple(o.name for o in ops)


def test_a_chain_goes_on_in_its_own_stream_where_it_can():
    ops = [Operation(name, name[0]) for name in ("a1", "b1", "a2", "b2", "c1")]
    order = order_of(with_ops(ops, [("b1", "a2"), ("a2", "c1")]))
    assert order.chains == 2  # a1, a2, c1 and b1, b2


def test_independent_streams_are_one_run_each():
    ops = [Operation(f"o{i}", f"s{i % 5}") for i in range(50)]
    assert order_of(with_ops(ops)).before.shape == (5, 5)


def test_a_cycle_is_named():
    ops = [Operation("a", "x"), Operation("b", "x"), Operation("c", "y")]
    with pytest.raises(ProblemError, match="cycle: ") as e:
        with_ops(ops, [("b", "c"), ("c", "a")])
    assert sorted(e.value.cycle) == ["a", "b", "c"]
    with pytest.raises(ProblemError, match="cycle"):
        with_ops(ops, [("b", "a")])


@pytest.mark.parametrize(("count", "left_out"), [(12, False), (13, True)])
def test_of_a_long_cycle_the_ends_are_shown(count, left_out):
    ops = [Operation(f"o{i}", f"s{i}") for i in range(count)]
    with pytest.raises(ProblemError, match="cycle: ") as e:
        with_ops(ops, [(f"o{i}", f"o{(i + 1) % count}") for i in range(count)])
    assert len(e.value.cycle) == count
    assert ("..." in str(e.value)) == left_out
    assert (str(e.value).count(" -> ") == count) != left_out


def test_an_order_may_be_as_wide_as_can_be_kept(monkeypatch):
    ops = [Operation(f"o{i}", f"s{i}") for i in range(3)]
    monkeypatch.setattr("symmplan.planner.order.MAX_CLOCK_ENTRIES", 9)
    assert order_of(with_ops(ops)).chains == 3
    monkeypatch.setattr("symmplan.planner.order.MAX_CLOCK_ENTRIES", 8)
    with pytest.raises(ProblemError, match="3 chains"):
        with_ops(ops)


def test_too_many_streams_are_an_error_not_a_crash():
    ops = [Operation(f"o{i}", f"s{i}") for i in range(8000)]
    with pytest.raises(ProblemError, match="streams"):
        with_ops(ops)


@pytest.mark.further
def test_the_work_grows_with_the_dag_and_not_with_its_square():
    def conflicts(size):
        items = items_of(stream_program(size))
        task = task_of(items, np.arange(len(items)))
        conflicts_of(task)

    small, large = (lines_of(lambda n=n: conflicts(n)) for n in (5000, 40_000))
    assert 0 < small < large < 16 * small  # its square would be 64
