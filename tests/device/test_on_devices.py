"""Each integration with each algorithm over memory="nccl" and "cuda", on the doubles of a device.

Bit for bit beside the program without symmplan, with other inputs in each iteration.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from doubles import installed, on_devices, state
from fsdp_models import Net, batch, both, shard
from fsdp_models import mesh as mesh_of
from paths import TESTS
from ranks import pool_of

import symmplan

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional

GATHERS = {"nccl": ["placed", "copy engine", "ordinary"], "cuda": ["placed", "ordinary"]}
SUMS = {memory: [*of, "push", "shared push"] for memory, of in GATHERS.items()}

pair = pool_of(2, timeout=100.0)
fresh = pool_of(2, timeout=100.0)


def _on_hosts(rank, world):
    """Two ranks on each host."""
    os.environ["NCCL_HOSTID"] = f"host {rank // 2}"


four = pool_of(4, setup=_on_hosts, timeout=100.0)


def _ran():
    """What has run, in the words of a profile, and what was refused."""
    kinds = {"Memcpy PtoP": "copies", "ncclSymk": "symmetric", "ncclDevKernel": "kernels"}
    kinds["two_shot_all_reduce"] = "symmetric"
    names = {kind for name in state().kernels for text, kind in kinds.items() if text in name}
    return sorted(names), state().refused


# FSDP2.


def _train(model, trace, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(4):
        loss = model(batch(step, rank)).pow(2).mean()
        loss.backward()
        trace.add(f"{step}.loss", loss)
        trace.grads(model, step)
        optimizer.step()
        optimizer.zero_grad()
    trace.parameters(model)


def _fsdp(rank, world, memory, choose, close=0.0):
    def look(handle):
        x = batch(9, rank)
        checked = handle.check(lambda: model[0](x).sum().backward())
        return [(c.planned.algorithm, c.algorithm) for c in checked.calls]

    model = []

    def build():
        model[:] = [shard(Net(2), mesh=mesh_of(world))]
        return model[0]

    given = {"memory": memory, "choose": choose, "look": look if close == 0.0 else None}
    found = both(build, _train, rank, close=close, **given)
    return found["differences"], found["stats"]["placed"], found["looked"], *_ran()


def _without_races(rank, world, work, *given):
    with installed(races=True):
        found = work(rank, world, *given)
        assert state().races == []
    return found


@pytest.mark.parametrize("memory", ["nccl", "cuda"])
def test_fsdp_by_each_algorithm(pair, memory):
    for choose in SUMS[memory]:
        first, second = pair.run(_without_races, _fsdp, memory, choose)
        assert first == second
        differences, placed, calls, kinds, refused = first
        assert (differences, refused) == ([], [])
        assert (placed > 0) == (choose != "ordinary")
        if memory == "nccl":  # the process group does not know CUDA's mappings
            assert {ran for _, ran in calls} <= {planned for planned, _ in calls}
        assert ("copies" in kinds) == (choose in ("copy engine", "push", "shared push"))
        kernels = memory == "nccl" and choose in ("placed", "copy engine")  # which reduce
        assert ("symmetric" in kinds) == kernels


# Compiled graphs and sessions.


def _program(x, group):
    whole = F.wait_tensor(F.all_gather_into_tensor(x.sin(), 2, group))
    part = F.wait_tensor(F.reduce_scatter_tensor(whole * 2, "sum", 2, group))
    pending = F.all_gather_into_tensor_coalesced([part.cos(), part + 1], 2, group)
    total = F.wait_tensor(F.all_reduce(part, "sum", group))
    parts = F.wait_tensor(F.all_to_all_single(total * 2, [2, 2], [2, 2], group))
    a, b = map(F.wait_tensor, pending)
    return a + b, parts


def _turns(rank, count=5, by=None):
    """Inputs that change, and the results of the program without symmplan, ``by`` what runs it."""
    import torch.distributed as dist

    group = dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(4, 8, generator=generator) for _ in range(count)]
    return group, [(x, (by or _program)(x, group)) for x in inputs]


def _graph(rank, world, memory, inner, choose):
    torch._dynamo.reset()
    plain = torch.compile(_program, backend=inner, fullgraph=True)  # whose sines may be its own
    group, turns = _turns(rank, by=plain)
    torch._dynamo.reset()
    before = len(state().kernels)
    backend = symmplan.backend(inner=inner, memory=memory, choose=choose, timeout=30.0)
    compiled = torch.compile(_program, backend=backend, fullgraph=True)
    wrong = [i for i, (x, want) in enumerate(turns) if not _same(compiled(x, group), want)]
    del state().network.kernels[:before]
    placed = backend.stats.placed
    backend.release()
    return wrong, placed, *_ran()


def _session(rank, world, memory, choose):
    group, turns = _turns(rank)
    before = len(state().kernels)
    with symmplan.eager(memory=memory, choose=choose, timeout=30.0) as session:
        wrong = []
        for i, (x, want) in enumerate(turns):
            if not _same(_program(x, group), want):
                wrong.append(i)
            session.step()
        placed = session.stats.placed
    del state().network.kernels[:before]
    return wrong, placed, *_ran()


def _same(got, want):
    return all(map(torch.equal, got, want))


def _judge(found, choose):
    first, second = found
    assert first == second
    wrong, placed, kinds, refused = first
    assert (wrong, refused) == ([], [])
    assert (placed > 0) == (choose != "ordinary")
    assert ("copies" in kinds) == (choose == "copy engine")
    assert ("symmetric" in kinds) == (choose != "ordinary")


@pytest.mark.parametrize("memory", ["nccl", "cuda"])
def test_sessions_by_each_algorithm(pair, memory):
    for choose in GATHERS[memory]:
        _judge(pair.run(_without_races, _session, memory, choose), choose)


def _one_after_the_other(rank, world, holds):
    """Three sessions; of the first a tensor is held or not."""
    import torch.distributed as dist

    rendezvous, held, wrong = [], [], 0
    for number in range(3):
        with symmplan.eager(memory="nccl", choose="placed", timeout=30.0) as session:
            for turn in range(3):
                x = symmplan.placed.out(torch.mul, torch.full((64,), number + turn + 1.0), rank + 1)
                dist.all_reduce(x, group=dist.group.WORLD)
                wrong += not bool((x == 3 * (number + turn + 1)).all())
                last = turn == 2 and not number
                held += [x] if holds and last else []
                del x
                if not (held and last):
                    session.step()
        rendezvous.append(session.stats.rendezvous)
    wrong += sum(not bool((x == 9).all()) for x in held)
    return rendezvous, wrong, [s.users for s in symmplan.segments()]


@pytest.mark.further
@pytest.mark.parametrize("holds", [False, True])
def test_a_session_takes_the_segment_of_one_that_is_over(fresh, holds):
    for rendezvous, wrong, users in fresh.run(on_devices, _one_after_the_other, holds):
        assert rendezvous == [1, int(holds), 0]
        assert not wrong
        assert users.count(()) == 1


@pytest.mark.parametrize("memory", ["nccl", "cuda"])
def test_graphs_by_each_algorithm(pair, memory):
    for choose in GATHERS[memory]:
        _judge(pair.run(on_devices, _graph, memory, "eager", choose), choose)


@pytest.mark.further
@pytest.mark.parametrize("memory", ["nccl", "cuda"])
def test_inductor_s_graphs_by_each_algorithm(pair, memory):
    for choose in GATHERS[memory]:
        _judge(pair.run(on_devices, _graph, memory, "inductor", choose), choose)


class _Weights(torch.nn.Module):
    """Two sharded weights, which a graph gathers as they are."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.ours = torch.nn.ParameterList(torch.randn(2, 4) for _ in range(2))

    def forward(self, x, group):
        for weight in self.ours:
            x = (x @ F.wait_tensor(F.all_gather_into_tensor(weight, 2, group))).sin()
        return x


def _bound(rank, world, choose):
    """A graph whose inputs live in a segment of their own, and another one afterwards."""
    import torch.distributed as dist

    torch._dynamo.reset()
    group = dist.group.WORLD.group_name
    model = _Weights(rank)
    before = len(state().kernels)
    wrong = 0
    given = {"memory": "nccl", "choose": choose, "bind": True, "timeout": 30.0}
    for _ in range(2):
        backend = symmplan.backend(inner="eager", **given)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for step in range(4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            want = model(x, group)
            wrong += not torch.equal(compiled(x, group), want)
            with torch.no_grad():
                for weight in model.ours:
                    weight.add_(0.25)
        kept = backend.stats.kept
        backend.release()
        torch._dynamo.reset()
    del state().network.kernels[:before]
    return wrong, kept, *_ran()


@pytest.mark.further
@pytest.mark.all_cases
@pytest.mark.parametrize("choose", GATHERS["nccl"][:2])
def test_bound_weights_are_gathered_where_they_lie(pair, choose):
    first, second = pair.run(on_devices, _bound, choose)
    assert first == second
    wrong, kept, kinds, refused = first
    assert (wrong, refused) == (0, [])
    assert kept == 2
    assert ("copies" in kinds) == (choose == "copy engine")


def _measured(rank, world, memory):
    """Which algorithms are timed, in a graph."""
    torch._dynamo.reset()
    group, turns = _turns(rank, 2)
    backend = symmplan.backend(inner="eager", memory=memory, choose="measure", timeout=30.0)
    compiled = torch.compile(_program, backend=backend, fullgraph=True)
    wrong = [i for i, (x, want) in enumerate(turns) if not _same(compiled(x, group), want)]
    timed = sorted({(c.op.partition("::")[2], *sorted(c.seconds)) for c in backend.choices})
    chosen = [c.algorithm for c in backend.choices]
    backend.release()
    return wrong, timed, chosen, state().refused


@pytest.mark.long
@pytest.mark.parametrize("memory", ["nccl", "cuda"])
def test_each_algorithm_is_measured(pair, memory):
    first, second = pair.run(on_devices, _measured, memory)
    assert first == second
    wrong, timed, _, refused = first
    assert (wrong, refused) == ([], [])
    engines = ("copy engine",) * (memory == "nccl")
    by_op = {op.removesuffix(".default"): algorithms for op, *algorithms in timed}
    assert by_op["all_gather_into_tensor"] == [*engines, "ordinary", "symmetric"]
    assert by_op["reduce_scatter_tensor"] == ["ordinary", "symmetric"]
    assert by_op["all_reduce"] == ["ordinary", "symmetric"]


# Experts.


def _experts(rank, world, seeds, choose):
    sys.path.append(str(TESTS / "integrate/moe"))
    from test_moe import random_calls

    return random_calls(rank, world, seeds, choose), state().refused


@pytest.mark.all_cases
@pytest.mark.parametrize("choose", ["push", "ordinary"])
def test_rows_of_experts(fresh, choose):
    first, second = fresh.run(on_devices, _experts, range(3), choose)
    assert first == second
    assert first[1] == []


# Two levels.


def _levels(rank, world):
    """FSDP2, a graph and a session over two hosts: what differs, and the algorithms."""
    found = both(
        lambda: shard(Net(2), mesh=mesh_of(world)),
        _train,
        rank,
        look=lambda handle: sorted({c.algorithm for c in handle.choices}),
        memory="cuda",
        choose="two-level",
        close=1e-5,
    )
    return found["differences"], found["stats"]["placed"] > 0, state().refused


@pytest.mark.further
def test_fsdp_in_two_levels(four):
    assert four.run(on_devices, _levels) == [([], True, [])] * 4
