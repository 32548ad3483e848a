"""Copy engines on CUDA devices: compiled graphs and sessions, on communicators of their own."""

from __future__ import annotations

import pytest
import torch
from devices import needs_devices, pool_on

pytestmark = needs_devices()

COUNT = 4


pool = pool_on(2, timeout=280.0)


def _functional(shards, x, w, group):
    """Gathers under products, and what is no gather."""
    ops = torch.ops._c10d_functional
    started = [ops.all_gather_into_tensor(s.sin(), 2, group) for s in shards]
    for _ in range(4):
        x = x @ w
    total = ops.wait_tensor(ops.all_reduce(x.relu(), "sum", group))
    return total, torch.stack([ops.wait_tensor(s)[::977] for s in started])


def _dist(shards, x, w, _group):
    import torch.distributed as dist

    outs = [s.new_empty(2 * s.numel()) for s in shards]
    pairs = list(zip(outs, [s.sin() for s in shards], strict=True))
    works = [dist.all_gather_into_tensor(o, s, async_op=True) for o, s in pairs[:-1]]
    for _ in range(4):
        x = x @ w
    dist.all_gather_into_tensor(*pairs[-1])
    for work in works:
        work.wait()
    x = x.relu()
    dist.all_reduce(x)
    return x, torch.stack([out[::977] for out in outs])


def _exchanges(shards, x, w, group):
    """All-to-alls of equal parts under products."""
    ops = torch.ops._c10d_functional
    half = [shards[0].numel() // 2] * 2
    started = [ops.all_to_all_single(s.sin(), half, half, group) for s in shards]
    for _ in range(4):
        x = x @ w
    return x.relu(), torch.stack([ops.wait_tensor(s)[::977] for s in started])


def _run(rank, world_size, how, run, choose):
    """Results in each of some turns with other inputs, and what ran in the last."""
    import torch.distributed as dist

    import symmplan

    torch.cuda.set_device(rank)
    torch._dynamo.reset()
    device, group = torch.device("cuda", rank), dist.group.WORLD.group_name
    torch.manual_seed(rank)
    w = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) / 2048**0.5
    x = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    shards = [torch.randn(4 << 20, device=device) for _ in range(COUNT)]

    def turn(function, at):
        return function([s + at for s in shards], x + at, w, group)

    def check(function, at):
        for got, want in zip(turn(function, at), turn(run, at), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)

    def seen(function):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            turn(function, 0)
            torch.cuda.synchronize()
        names = [e.name for e in profile.events()]
        return {
            "copies": sum("PtoP" in n for n in names),
            "gathers": sum("nccl" in n and "Gather" in n for n in names),
            "kernels": sum("ncclDevKernel" in n or "ncclSymk" in n for n in names),
        }

    if how == "session":
        expected = [turn(run, at) for at in range(4)]
        with symmplan.eager(memory="nccl", timeout=60.0, choose=choose) as session:
            for at in range(4):
                for got, want in zip(turn(run, at), expected[at], strict=True):
                    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
                session.step()
            found = seen(run)
            session.step()
            stats, choices = session.stats, session.choices
    else:
        backend = symmplan.backend(
            "eager" if how == "op by op" else how, memory="nccl", timeout=60.0, choose=choose
        )
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        for at in range(4):
            check(compiled, at)
        found = seen(compiled)
        stats, choices = backend.stats, backend.choices
        torch.cuda.synchronize()
        dist.barrier()
        backend.release()
    return found, stats, choices


ALGORITHMS = [
    ("op by op", _functional),
    pytest.param("inductor", _functional, marks=pytest.mark.first),
    pytest.param("session", _functional, marks=pytest.mark.first),
]
every_algorithm = pytest.mark.parametrize(("how", "run"), [*ALGORITHMS, ("session", _dist)])


@every_algorithm
def test_copy_engines_run_gathers(pool, how, run):
    first, second = pool.run(_run, how, run, "copy engine")
    print(first)
    assert first[1:] == second[1:]
    found, stats, _ = first
    assert found["gathers"] == 0
    assert found["copies"] >= COUNT
    # At most one segment is new, and meets the group and communicators once each.
    assert stats.rendezvous <= 3


@every_algorithm
def test_what_was_chosen_runs(pool, how, run):
    first, second = pool.run(_run, how, run, "measure")
    print(first)
    assert first[1:] == second[1:]
    found, _, choices = first
    gathers = [c for c in choices if "gather" in c.op]
    assert all(set(c.seconds) == {"ordinary", "symmetric", "copy engine"} for c in gathers)
    if {c.algorithm for c in gathers} == {"copy engine"}:
        assert found["gathers"] == 0
    if {c.algorithm for c in gathers} == {"ordinary"}:
        assert found["copies"] == 0


@pytest.mark.parametrize("how", ["op by op", "inductor", "session"])
def test_copy_engines_run_all_to_alls(pool, how):
    first, second = pool.run(_run, how, _exchanges, "copy engine")
    print(first)
    assert first[1:] == second[1:]
    found, stats, _ = first
    assert stats.placed == 2 * COUNT
    assert found["kernels"] == 0
    assert found["copies"] >= COUNT


@pytest.mark.parametrize("how", ["op by op", "inductor", "session"])
def test_all_to_alls_are_measured(pool, how):
    first, second = pool.run(_run, how, _exchanges, "measure")
    print(first)
    assert first[1:] == second[1:]
    _, _, choices = first
    assert {frozenset(c.seconds) for c in choices} == {
        frozenset(("ordinary", "symmetric", "copy engine"))
    }


def _late_host(rank, world_size):
    import time

    import torch.distributed as dist

    from symmplan.choose.clock import clock_of, seconds_of

    def late(beside):
        time.sleep(0.01)
        beside()

    clock = clock_of(torch.device("cuda", rank), 30.0)
    acts = {"ordinary": lambda beside: beside(), "late": late}
    return seconds_of(clock, acts, dist.group.WORLD, 1, beside=0.0, enough=1)


def test_what_the_host_takes_to_queue_is_not_in_what_is_timed(pool):
    for seconds in pool.run(_late_host):
        assert seconds["late"] < 0.005
