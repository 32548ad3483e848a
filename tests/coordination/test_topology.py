"""What a group is, agreed by its ranks before anything is registered, and what follows from it."""

from __future__ import annotations

import json

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool

from symmplan.memory.backends import BACKENDS, REACHES
from symmplan.memory.meeting.topology import Topology, facts_of, topology_of
from symmplan.process import PROCESS

F = torch.ops._c10d_functional


# ---- what ranks are together --------------------------------------------------------------------


def _facts(host, gpu=0, *, fabric="", blocked=(), **more):
    facts = {"host": host, "device": "cuda", "uuid": f"{host}{gpu}", "fabric": fabric}
    facts |= {"blocked": list(blocked), "multicast": True, "copy_engines": True}
    return {**facts, "nccl": [2, 28, 9], **more}


def test_one_host():
    found = topology_of([_facts("a", 0), _facts("a", 1)])
    assert found == Topology(
        ranks=2, device="cuda", multicast=True, copy_engines=True, nccl=(2, 28, 9)
    )
    assert found.reach == "host"
    assert found.text == "2 ranks on one host"
    assert not any(found.why_not(memory) for memory in ("shm", "nccl", "cuda", "nvshmem"))


def test_two_hosts():
    apart = topology_of([_facts("a"), _facts("b")])
    assert (apart.hosts, apart.reach) == (2, "network")
    assert "2 hosts without NVLink" in apart.why_not("nccl")
    assert apart.why_not("nvshmem") == ""


def test_two_hosts_with_nvlink_between_them():
    joined = topology_of([_facts("a", fabric="x/1"), _facts("b", fabric="x/1")])
    assert joined.reach == "nvlink"
    assert joined.why_not("nccl") == joined.why_not("cuda") == ""
    assert "2 hosts with NVLink" in joined.why_not("shm")
    cliques = topology_of([_facts("a", fabric="x/1"), _facts("b", fabric="x/2")])
    assert cliques.reach == "network"


def test_devices_without_peer_access():
    found = topology_of([_facts("a", 0, blocked=["a1"]), _facts("a", 1, blocked=["a0"])])
    assert not found.peer_access
    assert "no peer access" in found.why_not("nccl")
    elsewhere = [_facts("a", 0, blocked=["a7"]), _facts("a", 1)]
    assert topology_of(elsewhere).peer_access


def test_the_oldest_nccl_and_the_least_device_count():
    old = _facts("a", 1, nccl=[2, 26, 5], multicast=False, copy_engines=False)
    found = topology_of([_facts("a"), old])
    assert found.nccl == (2, 26, 5)
    assert not found.multicast
    assert not found.copy_engines
    assert found.why_not("nccl") == "memory='nccl' needs NCCL 2.27, and this is 2.26.5"


@given(
    ranks=st.integers(2, 9),
    hosts=st.integers(1, 9),
    device=st.sampled_from(["cpu", "cuda"]),
    nvlink=st.booleans(),
    peer_access=st.booleans(),
)
def test_what_reaches_farther_serves_no_less(**values):
    topology = Topology(**values)
    reasons = [topology.why_not(m) for m in sorted(_REACHING, key=_reach_of)]
    served = [not why for why in reasons]
    assert served == sorted(served)
    assert served[-1]  # of a network
    assert served[0] is (topology.ranks == 1)


_REACHING = [name for name in BACKENDS if name != "auto"]


def _reach_of(memory):
    return REACHES.index(BACKENDS[memory].reach)


def test_a_host_is_what_nccl_takes_for_one(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    mine = facts_of(cpu)
    assert mine == facts_of(cpu)
    monkeypatch.setenv("NCCL_HOSTID", "rack 7")
    assert facts_of(cpu) == {**mine, "host": "rack 7"} != mine


# ---- groups of real ranks -----------------------------------------------------------------------

pytest_ranks = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=120.0) as started:
        yield started


def _surveyed(rank, size):
    """What a group is found to be, how often ranks are asked, and what a second one is."""
    import os

    import torch.distributed as dist

    from symmplan.memory.meeting import topology

    cpu, world = torch.device("cpu"), dist.group.WORLD
    asked = []
    tell = topology.all_gather_json
    topology.all_gather_json = lambda what, mine, groups, timeout: (
        asked.append((what, *mine)) or tell(what, mine, groups, timeout)
    )
    try:
        found = [topology.survey({"g": world}, cpu, 30.0)["g"] for _ in range(3)]
        os.environ["NCCL_HOSTID"] = str(rank)
        pair = dist.new_group([0, 1])
        found.append(topology.survey({"g": world, "h": pair, "none": None}, cpu, 30.0))
    finally:
        topology.all_gather_json = tell
        del os.environ["NCCL_HOSTID"]
    return found, asked


@pytest_ranks
def test_ranks_agree_and_ask_once(pool):
    first, second = pool.run(_surveyed)
    assert first == second
    (*same, last), asked = first
    assert same == [Topology(ranks=2)] * 3
    assert last == {
        "g": Topology(ranks=2),
        "h": Topology(ranks=2, hosts=2),
        "none": Topology(ranks=1),
    }
    assert asked == [("topology", "g"), ("topology", "h")]


def _fake(rank, kind):
    """Ranks that are on two hosts, and a backend that reaches as far as told."""
    import contextlib
    from unittest import mock

    from symmplan.memory.meeting import topology

    host = f"host {rank}" if kind != "one host" else "host"
    facts = {"host": host, "device": "cpu", "fabric": "x/1" if kind == "nvlink" else ""}
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(topology, "facts_of", return_value=facts))
    reach = "nvlink" if kind == "nvlink" else BACKENDS["shm"].reach
    backends = {**BACKENDS, "shm": evolve(BACKENDS["shm"], reach=reach)}
    stack.enter_context(mock.patch.object(topology, "BACKENDS", backends))
    stack.callback(PROCESS.topologies.clear)
    PROCESS.topologies.clear()
    return stack


def _program(x, group):
    whole = F.wait_tensor(F.all_gather_into_tensor(x + 1, 2, group))
    return F.wait_tensor(F.all_reduce(whole * 2, "sum", group))


def _trained(rank, apply):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    mesh = dist.init_device_mesh("cpu", (2,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    handle = apply(model) if apply else None
    found = []
    for turn in range(4):
        loss = model(torch.full((2, 8), 1.0 + turn + rank)).square().mean()
        loss.backward()
        found += [loss.item(), *(p.grad.to_local().clone() for p in model.parameters())]
        model.zero_grad()
    return found, handle


def _served(rank, size, kind, integration):
    """Whether all is as without symmplan, what was placed, and why the rest was not."""
    import torch.distributed as dist

    import symmplan

    group = dist.group.WORLD.group_name
    given = [torch.full((4, 4), float(turn + rank)) for turn in range(3)]
    with _fake(rank, kind):
        if integration == "fsdp":
            plain, _ = _trained(rank, None)
            found, handle = _trained(rank, lambda m: symmplan.fsdp.apply(m, timeout=30.0))
            plans, stats = [handle.plan], handle.stats
            handle.remove()
        elif integration == "eager":
            plain = [_program(x, group) for x in given]
            with symmplan.eager(timeout=30.0) as session:
                found = []
                for x in given:
                    found.append(_program(x, group).clone())
                    session.step()
                plans, stats = [session.plan], session.stats
        else:
            plain = [_program(x, group) for x in given]
            backend = symmplan.backend(inner="eager", timeout=30.0)
            compiled = torch.compile(_program, backend=backend, fullgraph=True)
            found = [compiled(x, group).clone() for x in given]
            plans, stats = list(backend.plans), backend.stats
            backend.release()
            torch._dynamo.reset()
    same = all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(plain, found, strict=True)
    )
    reasons = {u.reason for plan in plans for u in plan.unplanned}
    return same, stats.placed, stats.unplanned, stats.rendezvous, sorted(reasons), stats.reasons


def _all_served(rank, size, kind):
    return {name: _served(rank, size, kind, name) for name in ("compile", "eager", "fsdp")}


@pytest_ranks
@pytest.mark.parametrize("kind", ["two hosts", "one host", "nvlink"])
def test_what_no_memory_reaches_is_ordinary(pool, kind):
    first, second = pool.run(_all_served, kind)
    assert first == second
    for integration, said in first.items():
        same, placed, unplanned, rendezvous, reasons, counted = said
        assert same
        if kind == "two hosts":
            assert (placed, rendezvous) == (0, 0)
            assert unplanned > 0
            (why,) = reasons
            assert "2 hosts without NVLink" in why
            assert integration != "fsdp" or dict(counted)[why] > 0
        else:
            assert placed > 0
            assert rendezvous == 1
            assert not any("hosts" in reason for reason in reasons)


def _mixed(rank, size):
    """A graph over two groups, of which one spans two hosts."""
    import torch.distributed as dist

    import symmplan

    near, far = dist.group.WORLD, dist.new_group([0, 1])

    def program(x, near, far):
        a = F.wait_tensor(F.all_gather_into_tensor(x + 1, 2, near))
        return F.wait_tensor(F.all_gather_into_tensor(a + 1, 2, far))

    with _fake(rank, "two hosts"):
        PROCESS.topologies[near] = {"cpu": Topology(ranks=2)}
        backend = symmplan.backend(inner="eager", timeout=30.0)
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        x = torch.full((4,), float(rank))
        found = compiled(x, near.group_name, far.group_name).tolist()
        want = program(x, near.group_name, far.group_name).tolist()
        (plan,) = backend.plans
        apart = [u.name for u in plan.unplanned if "hosts" in u.reason]
        placed = backend.stats.placed
        backend.release()
    torch._dynamo.reset()
    return found == want, apart, placed


@pytest_ranks
def test_one_group_is_served_beside_one_that_is_not(pool):
    for same, apart, placed in pool.run(_mixed):
        assert same
        assert apart
        assert placed > 0


# ---- a doctor of a group ------------------------------------------------------------------------


def test_a_doctor_of_a_group_wants_a_launcher(monkeypatch, capsys):
    from symmplan.cli import main

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["doctor", "--group"]) == 1
    assert "torchrun --nproc-per-node 2 -m symmplan doctor --group" in capsys.readouterr().err


def _doctored(rank, size, port, apart, *argv):
    """What the command prints on this rank, and its exit code."""
    import contextlib
    import io
    import os

    from symmplan.cli import main

    env = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in env.items()})
    if apart:
        os.environ["NCCL_HOSTID"] = f"host {rank}"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = main(["doctor", "--group", *argv])
    return code, shown.getvalue()


def _port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest_ranks
def test_a_doctor_says_what_runs_between_ranks():
    with RankPool(2, init=None, timeout=120.0) as ranks:
        (code, text), other = ranks.run(_doctored, _port(), False, "--json")
        assert other == (0, "")
        found = json.loads(text)
        assert (code, found["ok"], found["memory"]) == (0, True, "shm")
        assert found["topology"]["text"] == "2 ranks on one host"
        collectives = {row["collective"]: row for row in found["collectives"]}
        assert collectives["all-gather"]["algorithms"] == ["ordinary", "symmetric"]
        assert {row["tried"]["symmetric"] for row in collectives.values()} == {"symmetric"}
        (code, text), other = ranks.run(_doctored, _port(), True)
        assert (code, other) == (0, (0, ""))
        words = " ".join(text.split())
        assert "2 ranks on 2 hosts without NVLink between them, cpu" in words
        why = "its ranks are on 2 hosts without NVLink between them, farther than memory='shm'"
        assert f"all-reduce ordinary - {why} reaches" in words
