"""Collectives that may run while another group's do: who they are, and that they are timed so."""

from __future__ import annotations

from types import SimpleNamespace

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import pool_of

import symmplan
from symmplan.capture.sites import Step
from symmplan.model import Operation, Problem
from symmplan.runtime.choice import Choice
from symmplan.runtime.concurrent import concurrent_with

F = torch.ops._c10d_functional


# Who runs beside whom.


@st.composite
def programs(draw):
    """Calls of some groups on some streams; of each whether it ends at once or where it is."""
    streams = draw(st.integers(1, 3))
    operations, pending, calls = [], [], {}
    for i in range(draw(st.integers(1, 10))):
        stream = f"s{draw(st.integers(1, streams))}"
        if pending and draw(st.booleans()):
            ended = pending.pop(draw(st.integers(0, len(pending) - 1)))
            operations.append(Operation(f"wait{i}", stream=stream, ends=(ended,)))
            continue
        calls[f"call{i}"] = draw(st.sampled_from("ab"))
        operations.append(Operation(f"call{i}", stream=stream, group=calls[f"call{i}"]))
        pending += [f"call{i}"] if draw(st.booleans()) else []
    names = [o.name for o in operations]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True)) if pairs else []
    # A wait is behind what it waits for, on whatever stream.
    edges += [(call, o.name) for o in operations for call in o.ends]
    return Problem((), operations, (), edges=tuple(dict.fromkeys(edges))), calls


@given(programs())
def test_concurrent_is_what_nothing_orders(program):
    problem, calls = program
    steps = {name: Step("launch", name) for name in calls}
    captured = SimpleNamespace(problem=problem, steps=steps)
    ends = {call: o.name for o in problem.operations for call in o.ends}
    paths = nx.transitive_closure_dag(problem.graph())

    def over(first, second):
        return paths.has_edge(ends.get(first, first), second)

    # Each call is of a kind of its own, the later the larger.
    kinds = {name: (name, 1 << i) for i, name in enumerate(calls)}
    found = concurrent_with(captured, calls, kinds)
    for call, group in calls.items():
        beside = [c for c in calls if calls[c] != group and not (over(c, call) or over(call, c))]
        assert (call in found) == bool(beside)
        if beside:
            assert found[call][0] in beside
            assert 0 < found[call][1] <= 1


def test_a_long_gather_has_the_concurrent_of_all_that_run_meanwhile():
    order = ["gather", "sum 0", "/sum 0", "sum 1", "/sum 1", "/gather", "sum 2", "/sum 2"]
    groups = {n: "dp" if n == "gather" else "tp" for n in order if n[0] != "/"}
    operations = [
        Operation(n, ends=(n[1:],)) if n[0] == "/" else Operation(n, group=groups[n]) for n in order
    ]
    steps = {name: Step("launch", name) for name in groups}
    captured = SimpleNamespace(problem=Problem((), operations, ()), steps=steps)
    kinds = {n: (g, 8) for n, g in groups.items()}
    assert concurrent_with(captured, groups, kinds) == {
        "gather": ("sum 0", 2.0),
        "sum 0": ("gather", 0.5),
        "sum 1": ("gather", 0.5),
    }


def test_what_is_left_out_in_concurrent_says_so():
    seconds = {"ordinary": 2e-6, "symmetric": 6e-6}
    choice = Choice(
        "x", 8, "float32", "g", 2, seconds, "ordinary", concurrent="y with 4 bytes, push"
    )
    assert choice.reason == (
        "symmetric memory was not clearly faster: 6 us, beside y with 4 bytes, push, against 2 us "
        "in torch's own way"
    )


# On ranks.


def _setup(rank, size):
    import torch.distributed as dist

    dist.new_group(range(size))


pair = pool_of(2, setup=_setup, timeout=120.0)


def _groups():
    """The world, and another group of the same ranks."""
    import torch.distributed as dist

    other = next(g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD)
    return dist.group.WORLD.group_name, other.group_name


def _overlapped(x, w, data, tensor):
    """A sharded gather beside a tensor-parallel sum; then both again, one after the other."""
    gathered = F.all_gather_into_tensor(w.sin(), 2, data)
    summed = F.wait_tensor(F.all_reduce(x @ x, "sum", tensor))
    whole = F.wait_tensor(gathered)
    return F.wait_tensor(F.all_reduce(summed @ whole[:16], "sum", tensor))


def _apart(x, w, data, tensor):
    """The same without concurrent collectives."""
    whole = F.wait_tensor(F.all_gather_into_tensor(w.sin(), 2, data))
    summed = F.wait_tensor(F.all_reduce(x @ x, "sum", tensor))
    return F.wait_tensor(F.all_reduce(summed @ whole[:16], "sum", tensor))


#: Seconds of a gather and of a sum, alone and concurrent; and of a sum beside a gather by its
#: algorithm.
_TABLE = {
    ("gather", False): {"ordinary": 10.0, "symmetric": 8.0},
    ("gather", True): {"ordinary": 10.0, "symmetric": 12.0},
    ("reduce", False): {"ordinary": 10.0, "symmetric": 12.0},
    ("reduce", True): {"ordinary": 10.0, "symmetric": 8.0},
}


def _timed(asked):
    """What takes the place of the timer: all runs, with what is concurrent; what is said."""
    from symmplan.runtime import trials

    def seconds_of(clock, acts, group, nbytes, *, beside, enough, concurrent=None):
        kind = "reduce" if asked["reduces"](nbytes) else "gather"
        asked["seen"].append((kind, concurrent is not None))
        for act in acts.values():
            clock.span(act, 2, 1, group, concurrent)
        row = _TABLE[kind, concurrent is not None]
        rank = torch.distributed.get_rank()
        # One rank is faster: the slowest counts.
        return {algorithm: seconds / (1 + 3 * (rank == 0)) for algorithm, seconds in row.items()}

    trials.seconds_of = seconds_of


def _chosen(rank, size, name, inner):
    """What was timed beside whom, what was chosen, and whether results are right."""
    from symmplan.runtime import trials

    torch._dynamo.reset()
    trials.forget()
    original = trials.seconds_of
    asked = {"seen": [], "reduces": lambda nbytes: nbytes == 16 * 16 * 4}
    program, groups = {"overlapped": _overlapped, "apart": _apart}[name], _groups()
    backend = symmplan.backend(
        inner=inner, timeout=20.0, choose="measure", collectives="process group", debug=True
    )
    _timed(asked)
    try:
        for turn in range(3):
            torch.manual_seed(100 * turn + rank)
            x, w = torch.randn(16, 16), torch.randn(16, 16)
            want = program(x, w, *groups)
            got = torch.compile(program, backend=backend, fullgraph=True)(x, w, *groups)
            torch.testing.assert_close(got, want)
        choices = [
            (c.op.split("::")[1].split(".")[0].rstrip("_"), c.algorithm, c.concurrent)
            for c in backend.choices
        ]
        return asked["seen"], choices, backend.stats.placed
    finally:
        trials.seconds_of = original
        backend.release()


@pytest.mark.ranks
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_algorithm_that_loses_only_in_concurrent_is_not_chosen_there(pair, inner):
    first, second = pair.run(_chosen, "overlapped", inner)
    assert first == second
    seen, choices, placed = first
    # Both alone (the sums with and without products), then each beside the other, twice.
    alone, beside = seen[: seen.index(("gather", True))], seen[seen.index(("gather", True)) :]
    assert ("gather", False) in alone
    assert not any(concurrent for _, concurrent in alone)
    assert beside == [("gather", True), ("reduce", True)] * 2
    assert choices[0][:2] == ("all_gather_into_tensor", "ordinary")
    assert choices[0][2].endswith("all_reduce.default with 1,024 bytes, symmetric") or (
        choices[0][2].endswith("all_reduce_.default with 1,024 bytes, symmetric")
    )
    assert choices[1][:2] == ("all_reduce", "symmetric")
    assert choices[1][2].endswith("_into_tensor.default with 1,024 bytes, ordinary") or choices[1][
        2
    ].endswith("_into_tensor_out.default with 1,024 bytes, ordinary")
    assert choices[2] == ("all_reduce", "ordinary", "")
    assert placed > 0


@pytest.mark.ranks
def test_the_same_algorithm_is_chosen_where_there_is_no_concurrent(pair):
    first, second = pair.run(_chosen, "apart", "eager")
    assert first == second
    seen, choices, _ = first
    assert not any(concurrent for _, concurrent in seen)
    assert [c[1:] for c in choices] == [("symmetric", ""), ("ordinary", ""), ("ordinary", "")]


def _unlike(algorithm, seconds_on):
    """A timer that runs all, and says of an algorithm what ``seconds_on(turn)`` does."""
    turn = [0]

    def seconds_of(clock, acts, group, nbytes, *, beside, enough, concurrent=None):
        turn[0] += 1
        for act in acts.values():
            clock.span(act, 1, 0, group, concurrent)
        return {name: seconds_on(turn[0]) if name == algorithm else 5.0 for name in acts}

    return seconds_of


def _mesh(rank, size, program, seconds_on):
    """What was chosen over rows and columns of a mesh."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from symmplan.runtime import trials

    trials.forget()
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    groups = [mesh.get_group(n).group_name for n in ("data", "tensor")]
    original = trials.seconds_of
    trials.seconds_of = _unlike("symmetric", seconds_on)
    backend = symmplan.backend("eager", timeout=20.0, choose="measure", collectives="process group")
    try:
        x, w = torch.randn(16, 16), torch.randn(16, 16)
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, w, *groups), program(x, w, *groups))
        return [(c.op, c.algorithm, dict(c.seconds), c.concurrent != "") for c in backend.choices]
    finally:
        trials.seconds_of = original
        backend.release()
        for name in groups:
            dist.barrier(dist.distributed_c10d._resolve_process_group(name))


def _mesh_in_turn(rank, size):
    """Each rank is the slowest at something else."""
    return _mesh(rank, size, _overlapped, lambda turn: 9.0 if turn % size == rank else 5.0)


def _mesh_by_rows(rank, size):
    """Tensor-parallel sums are slow in one row, and what is sharded in one column."""

    def seconds_on(turn):
        return 9.0 if rank in ((0, 2) if turn == 1 else (2, 3)) else 4.0

    return _mesh(rank, size, _apart, seconds_on)


four = pool_of(4, timeout=120.0)


@pytest.mark.ranks
@pytest.mark.further
def test_all_ranks_of_a_mesh_choose_alike_in_concurrent(four):
    first, *others = four.run(_mesh_in_turn)
    assert any(concurrent for *_, concurrent in first)
    assert all(other == first for other in others)


@pytest.mark.ranks
@pytest.mark.all_cases
def test_all_ranks_of_a_mesh_choose_alike(four):
    first, *others = four.run(_mesh_by_rows)
    assert {algorithm for _, algorithm, *_ in first} == {"ordinary"}
    assert all(other == first for other in others)


def _inner_groups(rank, size):
    """What a model with inner groups chose, when its outer group is known, and those differ."""
    from torch.distributed.fsdp import fully_shard

    from symmplan.runtime import trials

    trials.forget()
    original = trials.seconds_of
    choices = []
    for after in (True, 2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
        for block in model:
            fully_shard(block, reshard_after_forward=after)
        slow = 9.0 if after == 2 and rank >= 2 else 4.0
        trials.seconds_of = _unlike("symmetric", lambda _, slow=slow: slow)
        handle = symmplan.fsdp.apply(model, choose="measure", timeout=20.0)
        try:
            for _ in range(3):
                model(torch.ones(4, 8)).sum().backward()
            choices.append([(c.op, c.ranks, c.algorithm) for c in handle.choices])
        finally:
            trials.seconds_of = original
            handle.remove()
    return choices


@pytest.mark.ranks
@pytest.mark.all_cases
def test_inner_groups_of_a_plan_choose_alike_when_only_theirs_is_new(four):
    first, *others = four.run(_inner_groups)
    outer, inner = first
    assert {algorithm for *_, algorithm in outer} == {"symmetric"}
    assert ("all_gather", 2, "ordinary") in inner
    assert all(other == first for other in others)
