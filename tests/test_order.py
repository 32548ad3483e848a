"""Happens-before and interference, against brute force over linear extensions."""

from __future__ import annotations

from itertools import combinations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from steps import lines_of
from strategies import problems

from symmplan.bench.parts.instances import stream_program
from symmplan.errors import ProblemError
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner.items import conflicts_of, items_of
from symmplan.planner.order import order_of
from symmplan.planner.packing.bound import heaviest_clique, heaviest_moment
from symmplan.planner.packing.task import task_of
from symmplan.planner.verify.clocks import Clocks
from symmplan.testing import conflicts, happens_before, heaviest_set, linear_extensions

PLAIN = {"remote": False, "pins": False, "groups": ("g",)}


def with_ops(ops, edges=()):
    return Problem([Buffer("b", 1)], ops, [Access(ops[0].name, "b")], edges=edges)


@settings(max_examples=200, deadline=None)
@given(problems(max_operations=7, max_buffers=1, **PLAIN))
def test_clocks_agree_with_all_linear_extensions(problem):
    before = happens_before(problem)
    extensions = set(linear_extensions(problem))
    assert before == set.intersection(*(set(combinations(e, 2)) for e in extensions))
    order = order_of(problem)
    clocks = Clocks(problem.operations, problem.edges)
    names = [o.name for o in problem.operations]
    for a in names:
        for b in names:
            assert order.precedes(order.index[a], order.index[b]) == ((a, b) in before)
            pair = np.asarray([clocks.number[a]]), np.asarray([clocks.number[b]])
            assert bool(clocks.ordered(*pair)[0]) == ((a, b) in before)
    assert order.names in extensions
    assert tuple(o.name for o in clocks.operations) in extensions


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(problems(max_operations=7, max_buffers=7, constraints=True, **PLAIN))
def test_interference_is_exact(problem):
    items = items_of(problem)
    task = task_of(items, np.arange(len(items)))
    found = conflicts_of(task)
    a, b = found.pairs()
    clashes = conflicts(problem)
    assert {
        frozenset((x, y))
        for i, j in zip(task.items[a].tolist(), task.items[b].tolist(), strict=True)
        for x in items.members[i]
        for y in items.members[j]
    } == clashes
    assert (found.matrix() == found.matrix().T).all()


@settings(max_examples=200, deadline=None)
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


def test_a_total_order_over_many_streams_is_one_chain():
    ops = [Operation(f"o{i}", f"s{i % 5}") for i in range(50)]
    order = order_of(with_ops(ops, [(f"o{i}", f"o{i + 1}") for i in range(49)]))
    assert order.chains == 1
    assert order.names == tuple(o.name for o in ops)


def test_independent_streams_are_one_run_each():
    ops = [Operation(f"o{i}", f"s{i % 5}") for i in range(50)]
    assert order_of(with_ops(ops)).before.shape == (5, 5)


def test_a_cycle_is_named():
    ops = [Operation("a", "x"), Operation("b", "x"), Operation("c", "y")]
    with pytest.raises(ProblemError, match="cycle: ") as e:
        with_ops(ops, [("b", "c"), ("c", "a")])
    assert set(e.value.cycle) == {"a", "b", "c"}
    with pytest.raises(ProblemError, match="cycle"):
        with_ops(ops, [("b", "a")])


def test_too_many_streams_are_an_error_not_a_crash():
    ops = [Operation(f"o{i}", f"s{i}") for i in range(8000)]
    with pytest.raises(ProblemError, match="streams"):
        with_ops(ops)


def test_the_work_grows_with_the_dag_and_not_with_its_square():
    def conflicts(size):
        items = items_of(stream_program(size))
        task = task_of(items, np.arange(len(items)))
        conflicts_of(task)

    small, large = (lines_of(lambda n=n: conflicts(n)) for n in (5000, 40_000))
    assert 0 < small < large < 16 * small  # its square would be 64
