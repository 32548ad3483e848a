"""Rewritten graphs before the explorer: what capture, plan and rewriting make of programs."""

from __future__ import annotations

import attrs
import pytest
from explorer_counts import count_graphs
from explorer_graphs import ALGORITHMS, Steps, fx_programs, judge, world
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st

RANKS = 3


@pytest.fixture(scope="module", autouse=True)
def groups():
    with world(RANKS) as names:
        yield names


@pytest.mark.further
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rewritten_graphs_are_right(groups, algorithm):
    counts = count_graphs(40, algorithm, groups, barriers=False)
    assert counts.programs > 20
    assert counts.sharing > counts.programs / 4
    assert counts.unknown == 0


def _without(problem, drop):
    kept = [a for a in problem.accesses if not drop(a)]
    names = {a.buffer for a in kept}
    buffers = [b for b in problem.buffers if b.name in names]
    return (
        attrs.evolve(problem, accesses=kept, buffers=buffers)
        if len(buffers) == len(problem.buffers)
        else problem
    )


def _copies(problem):
    return {o.name for o in problem.operations if o.op == "aten::copy_"}


def _unread(problem):
    names = _copies(problem)
    return _without(problem, lambda a: a.operation in names and not a.write)


def _unheld(problem):
    ends = {o.name for o in problem.operations if o.ends}
    problem = attrs.evolve(
        problem, operations=[attrs.evolve(o, ends=()) for o in problem.operations]
    )
    return _without(problem, lambda a: a.operation in ends)


def _all(problem, **facts):
    operations = [
        attrs.evolve(o, **facts) if o.group is not None else o for o in problem.operations
    ]
    return attrs.evolve(problem, operations=operations)


def _remote(problem, **facts):
    accesses = [attrs.evolve(a, **facts) if a.remote else a for a in problem.accesses]
    return attrs.evolve(problem, accesses=accesses)


#: ``{what is wrong: (algorithm, how it is made so)}``
FAULTS = {
    "no barriers": ("shm", {"kept": lambda _: []}),
    "no barriers beside the process group": ("process group", {"kept": lambda _: []}),
    "copies read nothing": ("shm", {"told": _unread}),
    "asynchronous work is over at once": ("process group", {"told": _unheld}),
    "everything handshakes": ("process group", {"told": lambda p: _all(p, handshake=True)}),
    "everything releases": ("process group", {"told": lambda p: _all(p, release=True)}),
    "broadcasts meet": ("process group", {"told": lambda p: _all(p, synchronizes=True)}),
    "everything enters": ("shm", {"told": lambda p: _remote(p, enters=True)}),
    "everything is released": ("shm", {"told": lambda p: _remote(p, releases=True)}),
    "nothing is remote": (
        "shm",
        {"told": lambda p: _remote(p, remote=False, enters=False, releases=False)},
    ),
}


#: Where few programs can show it: steps of which more do.
_SHOWN_BY = {
    "asynchronous work is over at once": ("reduce", "gather", "push11", "relu"),
    "broadcasts meet": ("broadcast", "push00", "push01", "read01", "relu"),
}


@pytest.mark.further
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(groups, fault):
    algorithm, changes = FAULTS[fault]

    def seen(case) -> bool:
        program, transport = case
        judged = judge(program, algorithm, groups, transport=transport, **changes)
        return judged is not None and judged.verdict.kind in ("wrong", "other results")

    calm = settings(
        max_examples=500,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    transports = st.sampled_from(["wire", "push", "pull"])
    programs = fx_programs(ranks=RANKS, kinds=_SHOWN_BY.get(fault, ()))
    find(st.tuples(programs, transports), seen, settings=calm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_was_reduced_in_place_is_read_by_its_old_name(groups, algorithm):
    """The reduced tensor leaves the graph, and its placement is used again behind the wait."""
    steps = (("relu", 0, 0), ("reduce_", 2, 0), ("relu", 0, 0), ("gather_out", 1, 0))
    judged = judge(Steps(((1, 2), (1, 2)), steps, (2,)), algorithm, groups)
    assert judged.verdict.kind == "right", judged
