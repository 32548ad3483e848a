"""Collectives that may run while another group's do: who they are, and that they are timed so."""

from __future__ import annotations

from types import SimpleNamespace

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool, pool_of

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


def _mesh(rank, size):
    """Rows and columns of a mesh; each rank is the slowest at something else."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from symmplan.runtime import trials

    trials.forget()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    groups = [mesh.get_group(n).group_name for n in ("data", "tensor")]
    original, turn = trials.seconds_of, [0]

    def seconds_of(clock, acts, group, nbytes, *, beside, enough, concurrent=None):
        turn[0] += 1
        for act in acts.values():
            clock.span(act, 1, 0, group, concurrent)
        slow = turn[0] % size == rank
        return {algorithm: 9.0 if slow and algorithm == "symmetric" else 5.0 for algorithm in acts}

    trials.seconds_of = seconds_of
    backend = symmplan.backend("eager", timeout=20.0, choose="measure", collectives="process group")
    try:
        x, w = torch.randn(16, 16), torch.randn(16, 16)
        compiled = torch.compile(_overlapped, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, w, *groups), _overlapped(x, w, *groups))
        return [(c.op, c.algorithm, dict(c.seconds)) for c in backend.choices if c.concurrent]
    finally:
        trials.seconds_of = original
        backend.release()
        for name in groups:
            dist.barrier(dist.distributed_c10d._resolve_process_group(name))


@pytest.mark.ranks
@pytest.mark.further
def test_all_ranks_of_a_mesh_choose_alike_in_concurrent():
    with RankPool(4, timeout=120.0) as four:
        first, *others = four.run(_mesh)
    assert first
    assert all(other == first for other in others)
    assert all(seconds["symmetric"] == 9.0 for _, _, seconds in first)


@pytest.mark.ranks
@pytest.mark.further
def test_the_benchmark_compares_the_choice_with_forced_algorithms(capsys):
    import json

    from symmplan.cli import main

    words = "bench concurrent --json --ranks 2 --layers 3 --width 32 --tokens 8 --rounds 2"
    assert main(words.split()) == 0
    result = json.loads(capsys.readouterr().out)
    compiled, fsdp = result["results"]
    assert (compiled["program"], fsdp["program"]) == ("compiled", "FSDP2")
    for row in (compiled, fsdp):
        forced = {"placed", "copy engine", "ordinary", *(["push"] if row is fsdp else [])}
        assert set(row["ms"]) == {"plain", "measure", *forced}
        assert row["best"] in forced
        assert row["equal"]
        assert any(choice["concurrent"] for choice in row["choices"])
