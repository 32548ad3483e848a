"""What was planned is what ran, by the profiler; and groups that NCCL takes for two hosts.

    python -m pytest tests/gpu/test_engaged_gpu.py -m gpu

Two devices of one host.
"""

from __future__ import annotations

import os

import pytest
import torch
from devices import finish, needs_devices, pool_on
from ranks import RankPool

pytestmark = needs_devices()

DIM = 2048
LAYERS = 3
F = torch.ops._c10d_functional


pool = pool_on(2, timeout=300)


@pytest.fixture(scope="module")
def apart():
    """Ranks of one machine that NCCL takes for two hosts."""
    with RankPool(2, init=None, timeout=300) as started:
        started.run(start_apart, os.getpid())
        yield started
        started.outcomes(finish)


# Rank side.


def start_apart(rank, world, number):
    import torch.distributed as dist

    os.environ["NCCL_HOSTID"] = f"host {rank}"
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file:///tmp/symmplan-{number}", rank=rank, world_size=world
    )
    dist.barrier()


def model_of(dtype):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    layers = [torch.nn.Linear(DIM, DIM, bias=False, dtype=dtype) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).cuda()
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def trained(rank, dtype, choose, steps=4):
    """What a step's collectives were planned to run as, and did; and losses."""
    import symmplan

    model = model_of(dtype)
    handle = None
    if choose is not None:
        handle = symmplan.fsdp.apply(model, choose=choose, timeout=60)
    losses = []

    def step():
        x = torch.full((64, DIM), 1.0 + rank + len(losses), device="cuda", dtype=dtype)
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        model.zero_grad()

    for _ in range(steps - 1):
        step()
    if handle is None:
        step()
        return {"losses": losses}
    checked = handle.check(step)
    found = {
        "losses": losses,
        "calls": [
            (s.planned.op, s.planned.algorithm, s.algorithm, s.reason) for s in checked.calls
        ],
        "disengaged": handle.stats.disengaged,
        "unplanned": [(u.op, u.reason) for u in handle.plan.unplanned],
        "rendezvous": handle.stats.rendezvous,
        "text": str(checked),
    }
    handle.remove()
    return found


def trained_all(rank, world, dtype, choices):
    return [trained(rank, getattr(torch, dtype), choose) for choose in choices]


def graph_and_session(rank, world):
    """A graph and a session over the world: results as without, stats, and the check."""
    import torch.distributed as dist

    import symmplan

    group = dist.group.WORLD.group_name

    def program(x, group):
        whole = F.wait_tensor(F.all_gather_into_tensor(x + 1, 2, group))
        return F.wait_tensor(F.all_reduce(whole * 2, "sum", group))

    x = torch.full((1 << 20,), 1.0 + rank, device="cuda")
    want = program(x, group)
    backend = symmplan.backend(inner="eager", timeout=60, choose="placed")
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    same = [torch.equal(compiled(x, group), want)]
    graph = None if backend.stats.placed == 0 else backend.check(lambda: compiled(x, group))
    plans = list(backend.plans)
    backend.release()
    torch._dynamo.reset()
    with symmplan.eager(timeout=60, choose="placed") as session:

        def iteration():
            same.append(torch.equal(program(x, group), want))
            session.step()

        iteration()
        checked = session.check(iteration)
        plans.append(session.plan)
        placed = session.stats.placed
    reasons = {u.reason for plan in plans for u in plan.unplanned}
    calls = [
        [(s.planned.op, s.planned.algorithm, s.algorithm, s.reason) for s in c.calls]
        for c in (graph, checked)
        if c is not None
    ]
    return same, placed, sorted(reasons), calls


def _two_sums(x, group):
    total = F.wait_tensor(F.all_reduce(x * 2, "sum", group))
    return total + F.wait_tensor(F.all_reduce(total.sin(), "sum", group))


def kernel_sums(rank, world):
    """All-reduces over CUDA's mappings, one rank late: what is wrong, and what ran."""
    import torch.distributed as dist

    import symmplan

    group, wrong, ran = dist.group.WORLD.group_name, [], set()
    given = {"memory": "cuda", "choose": "placed", "timeout": 60.0}
    for dtype in (torch.float32, torch.bfloat16):
        for count in (2, 1000, 1 << 14, (1 << 20) + 6):
            x = torch.randn(count, device="cuda", dtype=dtype)
            want = _two_sums(x, group)
            torch._dynamo.reset()
            backend = symmplan.backend(inner="eager", **given)
            compiled = torch.compile(_two_sums, backend=backend, fullgraph=True)
            for turn in range(6):
                if turn % 2 == rank:
                    torch.cuda._sleep(2_000_000)
                if not torch.equal(compiled(x, group), want):
                    wrong.append(("graph", dtype, count))
            checked = [backend.check(lambda c=compiled, x=x, g=group: c(x, g))]
            backend.release()
            with symmplan.eager(**given) as session:

                def iteration(x=x, want=want, session=session):
                    if not torch.equal(_two_sums(x, group), want):
                        wrong.append(("session", x.dtype, x.numel()))
                    session.step()

                for _ in range(4):
                    iteration()
                checked.append(session.check(iteration))
            ran |= {
                (s.planned.algorithm, s.algorithm, *s.kernels) for c in checked for s in c.calls
            }
    return wrong, ran


def told(rank, world):
    import torch.distributed as dist

    from symmplan.memory.meeting.topology import survey

    device = torch.device("cuda", torch.cuda.current_device())
    return survey({"g": dist.group.WORLD}, device, 60.0)["g"]


# Parent side.


def test_the_topology_of_two_devices(pool):
    first, second = pool.run(told)
    print(first)
    assert first == second
    assert (first.ranks, first.hosts, first.device) == (2, 1, "cuda")
    assert first.nccl >= (2, 27)
    assert first.why_not("nccl") == "" or not first.peer_access


@pytest.mark.first
@pytest.mark.parametrize("choose", ["symmetric", "copy engine", "push", "ordinary"])
def test_each_algorithm_engages(pool, choose):
    for (found,) in pool.run(trained_all, "bfloat16", [choose]):
        print(found["text"])
        assert found["disengaged"] == ()
        gathers = {ran for op, _, ran, _ in found["calls"] if "gather" in op}
        sums = {ran for op, _, ran, _ in found["calls"] if "reduce" in op}
        assert sums == {"symmetric" if choose == "copy engine" else choose}
        assert gathers == {"copy engine" if choose == "push" else choose}


def test_a_type_that_symmetric_kernels_do_not_reduce_is_named(pool):
    for (found,) in pool.run(trained_all, "float64", ["symmetric"]):
        print(found["text"])
        sums = [call for call in found["calls"] if "reduce" in call[0]]
        assert sums
        for _, planned, ran, reason in sums:
            assert (planned, ran) == ("symmetric", "ordinary")
            assert reason == "dtype: NCCL's symmetric kernels do not reduce float64"
        assert len(found["disengaged"]) == len(sums)
        assert all(ran == "symmetric" for op, _, ran, _ in found["calls"] if "gather" in op)


@pytest.mark.first
def test_graphs_and_sessions_are_checked(pool):
    for same, placed, _, calls in pool.run(graph_and_session):
        print(calls)
        assert all(same)
        assert placed > 0
        for checked in calls:
            assert [ran for *_, ran, _ in checked] == ["symmetric", "symmetric"]


@pytest.mark.first
def test_a_kernel_adds_up_over_mappings(pool):
    for wrong, ran in pool.run(kernel_sums):
        print(ran)
        assert not wrong
        kernels = {"lamport_all_reduce", "two_shot_all_reduce_kernel_inplace"}  # small and large
        assert ran == {("symmetric", "symmetric", kernel) for kernel in kernels}


@pytest.mark.parametrize("choose", ["measure", "symmetric", "copy engine", "push"])
def test_two_hosts_train_in_torchs_own_algorithm(apart, choose):
    for plain, found in apart.run(trained_all, "bfloat16", [None, choose]):
        print(found["text"])
        assert found["losses"] == plain["losses"]
        assert found["rendezvous"] == 0
        assert {ran for *_, ran, _ in found["calls"]} == {"ordinary"}
        assert found["unplanned"]
        assert all("2 hosts without NVLink" in reason for _, reason in found["unplanned"])


def test_graphs_and_sessions_of_two_hosts_are_ordinary(apart):
    for same, placed, reasons, _ in apart.run(graph_and_session):
        assert all(same)
        assert placed == 0
        assert reasons
        assert all("2 hosts" in reason for reason in reasons)
