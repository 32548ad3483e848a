"""Groups on several hosts: each integration, on hosts that are mount namespaces of this machine.

Programs give what they give without symmplan, however ranks are late; what cannot be served runs in
torch's own way, with the reason; and who fails is named on all ranks of all hosts.
"""

from __future__ import annotations

import signal

import fault_programs
import pytest
import torch
from fsdp_machine import Judge
from fsdp_programs import drawn
from host_programs import PROGRAMS, built
from hosts import HostPool, hosts_pool, needs_hosts
from hypothesis import given as for_all
from hypothesis import strategies as st
from one_sided_programs import one_sided_programs
from test_right_numbers import MANY, PAUSES, SEEDS, _check, _compiled, _eager, _setup

from symmplan.place.algorithms import ONE_HOST

pytestmark = needs_hosts()
F = torch.ops._c10d_functional

_LARGER = [pytest.param(shape, marks=pytest.mark.further) for shape in ((2, 2, 2), (3, 3))]
pool = hosts_pool((2, 2), *_LARGER)
any_hosts = hosts_pool((2, 2), (2, 2, 2), (2, 1), setup=_setup, timeout=180.0)


# ---- hosts --------------------------------------------------------------------------------------


def _left_behind(rank, size):
    """What is in /dev/shm once every rank has left a file there, and this rank's host."""
    from pathlib import Path

    import torch.distributed as dist

    from symmplan.coordination.groups import host

    mine = Path(f"/dev/shm/left-by-{rank}")
    mine.touch()
    dist.barrier()
    found = sorted(p.name for p in mine.parent.iterdir())
    dist.barrier()
    mine.unlink()
    return host(), found


def test_hosts_share_no_memory(pool):
    said = pool.run(_left_behind)
    for host, found in said:
        mine = [f"left-by-{r}" for r, (other, _) in enumerate(said) if other == host]
        assert found == mine
    assert len({host for host, _ in said}) == len(pool.hosts)


# ---- programs -----------------------------------------------------------------------------------


@pytest.mark.all_cases
@pytest.mark.parametrize("integration", PROGRAMS)
def test_programs_run_in_two_levels(pool, integration):
    first, *others = pool.run(PROGRAMS[integration])
    assert all(other == first for other in others)
    assert not first["wrong"]
    assert first["placed"] > 0
    assert first["rendezvous"] == 1
    assert {*first["ran"]} == {("two-level", "two-level")}
    assert all(not host.left() for host in pool.hosts)


def _all(rank, size):
    return [program(rank, size) for program in PROGRAMS.values()]


@pytest.mark.further
@pytest.mark.parametrize(
    ("per_host", "why"),
    [
        ((2, 1), "equally many ranks on each host"),
        ((1, 1, 1), "several ranks on each host"),
        pytest.param((8, 4), "equally many ranks on each host", marks=pytest.mark.further),
    ],
    ids=str,
)
def test_what_two_levels_do_not_serve_is_ordinary(per_host, why):
    with HostPool(per_host, timeout=120.0) as ranks:
        for told in ranks.run(_all):
            for said in told:
                assert not said["wrong"]
                assert (said["placed"], said["rendezvous"]) == (0, 0)
                assert all(
                    "hosts without NVLink between them, farther" in r and why in r
                    for r in said["reasons"]
                )


@pytest.mark.further
def test_ranks_need_not_be_in_the_order_of_hosts():
    with HostPool((2, 2), mixed=True, timeout=120.0) as ranks:
        assert ranks.of == [0, 1, 0, 1]
        for told in ranks.run(_all):
            for said in told:
                assert not said["wrong"]
                assert {*said["ran"]} == {("two-level", "two-level")}


def _mixed(rank, size):
    """A sum of what a broadcast makes, which has no form in two levels."""
    import torch.distributed as dist

    import symmplan

    group = dist.group.WORLD.group_name

    def program(x):
        same = F.wait_tensor(F.broadcast(x, 0, group))
        return F.wait_tensor(F.reduce_scatter_tensor(same, "sum", size, group))

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", choose="placed", timeout=30.0)
    run = torch.compile(program, backend=backend, fullgraph=True)
    whole = [torch.arange(8.0 * size) + 100 * rank + step for step in range(3)]
    right = [
        torch.equal(run(x), size * (torch.arange(8.0) + 8 * rank + step))
        for step, x in enumerate(whole)
    ]
    (plan,) = backend.plans
    backend.release()
    return all(right), len(plan.placements), {u.reason for u in plan.unplanned}


@pytest.mark.long
def test_what_has_no_form_in_two_levels_is_ordinary_beside_what_has(pool):
    for right, placed, reasons in pool.run(_mixed):
        assert right
        assert placed > 0
        assert ONE_HOST in reasons


@pytest.mark.further
@MANY
@for_all(data=st.data())
def test_random_eager_programs(any_hosts, data):
    program = data.draw(one_sided_programs(any_hosts.world_size))
    _check(any_hosts, _eager, program, "auto", data.draw(PAUSES), data.draw(SEEDS))


@pytest.mark.further
@MANY
@for_all(data=st.data())
def test_random_compiled_programs(any_hosts, data):
    program = data.draw(one_sided_programs(any_hosts.world_size, in_place=False))
    _check(any_hosts, _compiled, program, "auto", data.draw(PAUSES), data.draw(SEEDS))


def _fsdp_programs(per_host, count):
    """Of as many ranks, with the seeds that draw them among so many."""
    ranks = sum(per_host)
    if ranks in (2, 3, 4):
        return {seed: drawn(seed) for seed in range(count) if drawn(seed).ranks == ranks}
    return {seed: drawn(seed, ranks) for seed in range(count)}


@pytest.mark.further
@pytest.mark.parametrize(
    ("per_host", "count"),
    [
        ((2, 2), 4),
        pytest.param((2, 2), 300, marks=pytest.mark.further),
        pytest.param((2, 1), 40, marks=pytest.mark.further),
        pytest.param((2, 2, 2), 20, marks=pytest.mark.further),
    ],
    ids=str,
)
@pytest.mark.timeout(900)
def test_random_fsdp_programs(per_host, count):
    with Judge(lambda _, timeout: HostPool(per_host, timeout=timeout)) as judge:
        programs = _fsdp_programs(per_host, count)
        wrong = {seed: said for seed, p in programs.items() if (said := judge(p)[0])}
    assert not wrong


# ---- faults -------------------------------------------------------------------------------------

#: What happens to the last rank, when, in which integration, and the errors of all others.
FAULTS = [
    ("killed", "planned", "FSDP2", "PeerLostError"),
    ("raises", "planned", "compile", "PeerLostError"),
    pytest.param("order", "end", "FSDP2", "RunError", marks=pytest.mark.further),
    pytest.param("size", "planned", "compile", "AgreementError", marks=pytest.mark.further),
    pytest.param("killed", "planned", "eager", "PeerLostError", marks=pytest.mark.further),
    pytest.param("killed", "planned", "experts", "PeerLostError", marks=pytest.mark.further),
    pytest.param("stopped", "planned", "FSDP2", "PeerTimeoutError", marks=pytest.mark.further),
]


@pytest.mark.long
@pytest.mark.all_cases
@pytest.mark.parametrize(("what", "moment", "integration", "kind"), FAULTS)
def test_a_fault_on_one_host_is_named_on_all(what, moment, integration, kind):
    with HostPool((2, 2), timeout=55.0) as ranks:
        ranks.start(fault_programs.run, integration, what, moment, 6.0 if what == "stopped" else 40)
        found = ranks.collect(ranks=range(3))
        if what == "stopped":
            ranks.kill(3, signal.SIGCONT)
        ranks.collect(ranks=[3])
    for outcome in found[:3]:
        assert outcome.error is not None, outcome.describe()
        assert outcome.error.root.kind == kind, outcome.describe()
        assert outcome.seconds < 30


@pytest.mark.further
def test_a_host_without_room_makes_all_do_without():
    with HostPool((2, 2), mib=[64, 1], timeout=120.0) as ranks:
        for wrong, placed, reasons in ranks.run(_large):
            assert not wrong
            assert placed == 0
            assert reasons


def _large(rank, size):
    """A gather for which one host has no room."""
    import torch.distributed as dist

    import symmplan

    group = dist.group.WORLD.group_name
    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", choose="placed", timeout=30.0)

    def program(x):
        return F.wait_tensor(F.all_gather_into_tensor(x + 1, size, group))

    run = torch.compile(program, backend=backend, fullgraph=True)
    x = torch.full((1 << 18,), float(rank))
    got = [run(x + step) for step in range(3)]
    stats, plans = backend.stats, backend.plans
    backend.release()
    want = [
        torch.cat([torch.full_like(x, r + step + 1.0) for r in range(size)]) for step in range(3)
    ]
    wrong = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(a, b)]
    return wrong, stats.placed, [u.reason for plan in plans for u in plan.unplanned]


# ---- simulated ----------------------------------------------------------------------------------


def _trained():
    """What a training script does."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import symmplan

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = built()
    for block in model:
        fully_shard(block, mesh=mesh)
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=30.0)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
    return handle


def _planned(rank, size):
    handle = _trained()
    found = handle.plan.fingerprint, handle.plan.peak_bytes
    handle.remove()
    return found


@pytest.mark.further
@pytest.mark.parametrize("per_host", [(2, 2), (2, 1)], ids=str)
def test_a_simulation_chooses_as_hosts_do(per_host):
    import symmplan

    with HostPool(per_host, timeout=120.0) as ranks:
        (real, *_) = ranks.run(_planned)
    report = symmplan.simulate(_trained, ranks=sum(per_host), ranks_per_host=2, memory="shm")
    assert (report.plans[0].fingerprint, report.peak_bytes) == real
    ran = {c.algorithm for c in report.collectives if c.op in ("all_gather", "reduce_scatter")}
    assert ran == ({"two-level"} if per_host == (2, 2) else {"ordinary"})
