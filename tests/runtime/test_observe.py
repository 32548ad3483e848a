"""What was planned is what ran: a checked step of a graph, a session and an FSDP2 model."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from ranks import RankPool

from symmplan.errors import RunError
from symmplan.memory.meeting.topology import Topology
from symmplan.place.collectives import NCCL, verdicts
from symmplan.place.expected import Expected
from symmplan.runtime import observe
from symmplan.runtime.observe import Checked, DeviceEvent, Profile, Seen, kind_of

F = torch.ops._c10d_functional

_GATHER = Expected(
    name="gather",
    op="_c10d_functional::all_gather_into_tensor.default",
    group="g",
    memory="nccl",
    nbytes=1024,
    dtype="bfloat16",
    algorithm="symmetric",
)
_SUM = evolve(_GATHER, name="sum", op="c10d::_reduce_scatter_base_")
_GROUP = Topology(ranks=2, device="cuda", copy_engines=True, nccl=(2, 28, 9))

_SYMMETRIC = "ncclSymkDevKernel_AllGather_ST(ncclSymkDevWorkArgs)"
_RING = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_ENGINE = "Memcpy PtoP (Device -> Device)"


# ---- kernels and algorithms
# ---------------------------------------------------------------------------


def _seen(expected, *kernels, topology=_GROUP):
    """What is said of a collective that launched these kernels, between others."""
    events = [DeviceEvent(name, 0, 1, launched=15) for name in kernels]
    events += [DeviceEvent(_RING, 0, 1, launched=at) for at in (9, 21, None)]
    profile = Profile(tuple(events), (("aten::copy_", 15, 16),))
    return observe._seen(expected, profile, [(10, 20)], topology, None)


@pytest.mark.parametrize(
    ("algorithm", "kernels"),
    [
        ("symmetric", [_SYMMETRIC]),
        ("copy engine", [_ENGINE, _ENGINE, "Memcpy DtoD (Device -> Device)"]),
        ("ordinary", [_RING]),
    ],
)
def test_each_algorithm_shows(algorithm, kernels):
    seen = _seen(evolve(_GATHER, algorithm=algorithm), *kernels)
    assert (seen.algorithm, seen.engaged, seen.reason) == (algorithm, True, "")
    for other in {"symmetric", "copy engine", "ordinary"} - {algorithm}:
        seen = _seen(evolve(_GATHER, algorithm=other), *kernels)
        assert (seen.algorithm, seen.engaged) == (algorithm, False)
        assert seen.reason


def test_a_push_is_copies_and_a_meeting():
    pushed = evolve(_SUM, algorithm="push")
    assert _seen(pushed, _ENGINE, "ncclDevKernel_AllReduce_Sum_i32_RING_LL(x)").engaged
    assert not _seen(pushed, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)").engaged


def test_what_no_kernel_shows_of_is_not_taken_for_engaged():
    seen = _seen(_GATHER)
    assert (seen.algorithm, seen.engaged) == (None, False)
    assert "nothing was seen of it" in seen.reason


@pytest.mark.parametrize(
    ("change", "topology", "reason"),
    [
        ({"dtype": "float64"}, {}, "dtype: NCCL's symmetric kernels do not reduce float64"),
        ({"reduction": "avg"}, {}, "operation: NCCL's symmetric kernels have avg from 2.30 on"),
        ({"reduction": "max"}, {}, "operation: NCCL's symmetric kernels have no max"),
        ({}, {"hosts": 2}, "topology: its ranks are on 2 hosts without NVLink"),
        ({}, {"nccl": (2, 26)}, "topology: memory='nccl' needs NCCL 2.27, and this is 2.26"),
        ({"op": "c10d::broadcast_"}, {}, "NCCL has no symmetric kernel for it"),
        ({"memory": "cuda"}, {}, "operation: the process group does not know"),
        ({}, {}, "size or alignment: NCCL chose another kernel for 1024 bytes"),
        (
            {"algorithm": "copy engine"},
            {"copy_engines": False},
            "topology: NCCL cannot be asked for",
        ),
        ({"algorithm": "copy engine"}, {}, "size: NCCL did not give 1024 bytes to copy engines"),
    ],
)
def test_reasons(change, topology, reason):
    seen = _seen(evolve(_SUM, **change), _RING, topology=evolve(_GROUP, **topology))
    assert seen.reason.startswith(reason)


def test_a_check_side_by_side():
    calls = (Seen(_GATHER, "symmetric", {"ncclSymk": 1}), Seen(_SUM, "ordinary", {"r": 1}, "why"))
    checked = Checked(calls)
    assert not checked.ok
    assert Checked(calls[:1]).ok
    assert checked.missed == (("sum (c10d::_reduce_scatter_base_)", "why"),)
    text = str(checked)
    assert "all-gather, 1024 bytes of bfloat16: symmetric -> symmetric: ncclSymk" in text
    assert "reduce-scatter, 1024 bytes of bfloat16: symmetric -> ordinary: r" in text
    assert text.endswith("sum (c10d::_reduce_scatter_base_): why")


def test_kinds():
    assert kind_of(_SYMMETRIC) == "symmetric kernels"
    assert kind_of(_RING) == "NCCL kernels"
    assert kind_of(_ENGINE) == "copy engines"


# ---- verdicts -----------------------------------------------------------------------------------


def test_verdicts_of_devices_with_and_without_what_algorithms_need():
    found = {v.collective: v for v in verdicts(_GROUP, "nccl")}
    assert list(found) == list(NCCL)
    assert found["all-gather"].algorithms == ("ordinary", "symmetric", "copy engine")
    assert found["reduce-scatter"].algorithms == ("ordinary", "symmetric", "push")
    assert found["all-reduce"].algorithms == ("ordinary", "symmetric")
    assert found["all-to-all"].algorithms == ("ordinary", "copy engine")
    assert found["broadcast"].algorithms == ("ordinary",)
    for verdict in verdicts(evolve(_GROUP, copy_engines=False), "nccl"):
        assert "copy engine" not in verdict.algorithms
    for verdict in verdicts(evolve(_GROUP, hosts=2), "nccl"):
        assert verdict.algorithms == ("ordinary",)
        assert "2 hosts" in verdict.why
    for verdict in verdicts(Topology(ranks=2), "shm"):
        assert verdict.algorithms[1] == "symmetric"
    for memory, device in (("shm", "cpu"), ("cuda", "cuda")):
        (rows,) = verdicts(Topology(ranks=4, hosts=2, device=device), memory)[3:4]
        assert rows.collective == "all-to-all"
        assert rows.algorithms == ("ordinary",)
        assert "rows of symmplan.expert_parallel" in rows.why


# ---- real ranks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=120.0) as started:
        yield started


def _program(x, group):
    whole = F.wait_tensor(F.all_gather_into_tensor(x + 1, 2, group))
    return F.wait_tensor(F.all_reduce(whole * 2, "sum", group))


def _broken(choose):
    """Shared memory whose collectives are the process group's: nothing is as planned."""
    return {"collectives": "process group"} if choose == "broken" else {}


def _checked(rank, size, integration, choose):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import symmplan

    group = dist.group.WORLD.group_name
    x = torch.full((4, 4), float(rank))
    want = _program(x, group)
    options = {"timeout": 30.0, **_broken(choose)}
    results = []
    if integration == "fsdp":
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        for module in (*model, model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (size,)))
        handle = symmplan.fsdp.apply(model, choose=choose, timeout=30.0)

        def step():
            model(torch.ones(2, 8)).sum().backward()

        with pytest.raises(RunError, match="before there is a plan"):
            handle.check(step)
        for _ in range(2):
            step()
        checked, stats = handle.check(step), handle.stats
        step()
        handle.remove()
    elif integration == "session":
        with symmplan.eager(**options) as session:

            def iteration():
                results.append(_program(x, group).clone())
                session.step()

            with pytest.raises(RunError, match="before there is a plan"):
                session.check(iteration)
            iteration()
            checked = session.check(iteration)
            iteration()
            stats = session.stats
    else:
        inner = "inductor" if integration == "inductor" else "eager"
        backend = symmplan.backend(inner=inner, **options)
        compiled = torch.compile(_program, backend=backend, fullgraph=True)
        with pytest.raises(RunError, match="before there is a plan"):
            backend.check(lambda: None)
        results += [compiled(x, group).clone()]
        checked = backend.check(lambda: results.append(compiled(x, group).clone()))
        results += [compiled(x, group).clone()]
        stats = backend.stats
        backend.release()
        torch._dynamo.reset()
    assert all(torch.equal(result, want) for result in results)
    calls = [
        (s.planned.op, s.planned.algorithm, s.algorithm, dict(s.kernels)) for s in checked.calls
    ]
    return calls, checked.ok, stats.disengaged, str(checked)


_CASES = [
    *[("fsdp", "auto"), ("fsdp", "push"), ("fsdp", "ordinary")],
    *[("session", "auto"), ("graph", "auto")],
]


def _all_checked(rank, size, cases):
    return [_checked(rank, size, *case) for case in cases]


@pytest.mark.ranks
def test_what_was_planned_ran(pool):
    for found in pool.run(_all_checked, _CASES):
        for (integration, choose), (calls, ok, disengaged, text) in zip(_CASES, found, strict=True):
            assert ok, text
            assert disengaged == ()
            count = 6 if integration == "fsdp" else 2
            assert len(calls) == count, text
            if choose == "auto":
                assert {ran for *_, ran, _ in calls} == {"symmetric"}
                assert all(any(k.startswith("symmplan::") for k in seen) for *_, seen in calls)
            elif choose == "push":
                assert {ran for op, _, ran, _ in calls if "reduce" in op} == {"push"}


@pytest.mark.ranks
@pytest.mark.parametrize("integration", ["graph", "session"])
def test_what_did_not_run_as_planned_is_named(pool, integration):
    for (found,) in pool.run(_all_checked, [(integration, "broken")]):
        calls, ok, disengaged, text = found
        assert not ok
        assert [(planned, ran) for _, planned, ran, _ in calls] == [("symmetric", "ordinary")] * 2
        gather, reduction = disengaged
        assert "all_gather_into_tensor" in gather[0]
        assert "all_reduce" in reduction[0]
        why = "operation: the process group does not know that memory='shm' is symmetric"
        assert {reason for _, reason in disengaged} == {why}
        assert why in text


@pytest.mark.ranks
@pytest.mark.further
def test_a_graph_that_inductor_compiled(pool):
    for ((calls, ok, _, text),) in pool.run(_all_checked, [("inductor", "auto")]):
        assert ok, text
        assert len(calls) == 2
