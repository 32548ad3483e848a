"""FSDP2 in placements of torch's symmetric memory, on real devices and through NCCL.

    python -m pytest tests/gpu/test_fsdp_gpu.py -m gpu

Two devices of one host. The model is large enough for the streams of FSDP2 to run apart.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from devices import needs_devices, pool_on

pytestmark = needs_devices()

DIM = 512
BLOCKS = 6


pool = pool_on(2, timeout=120)


#: Ranks whose NCCL gathers with copy engines instead of kernels.
zero_cta = pool_on(2, timeout=120, env={"NCCL_CTA_POLICY": "2"})


# Rank side.


def build(world, dim=DIM, **options):
    from fsdp_models import Net, mesh, shard

    model = Net(blocks=BLOCKS, dim=dim).cuda()
    return shard(model, mesh=mesh(world, device="cuda"), **options)


def program(model, trace, rank, steps=20, dim=DIM):
    from fsdp_models import batch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss = model(batch(step, rank, dim=dim, device="cuda")).float().pow(2).mean()
        loss.backward()
        trace.add(f"{step}.loss", loss)
        trace.grads(model, step)
        optimizer.step()
        optimizer.zero_grad()
    trace.parameters(model)


def parity(rank, world, bf16, choose, after_forward):
    from fsdp_models import both
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options = {"reshard_after_forward": after_forward}
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def look(handle):
        return [(c.op, c.nbytes, c.algorithm, dict(c.seconds)) for c in handle.choices]

    return both(lambda: build(world, **options), program, rank, look, choose=choose)


def delayed(rank, world, where, waits, choose="placed", flat=False):
    """Sleep kernels hold up one kind of stream; with ``waits`` off, reuse is not ordered."""
    from fsdp_conditions import flat as in_flat_buffers
    from fsdp_models import both

    from symmplan.integrate.fsdp.comms import PlannedAllGather, PlannedReduceScatter
    from symmplan.integrate.fsdp.parameter_storage import ParameterStorage
    from symmplan.runtime.leases import Lease

    cycles = 2_000_000
    undo = []

    def slow(holder, name, when):
        original = getattr(holder, name)

        def slowed(*args, **kwargs):
            if when == "before":
                torch.cuda._sleep(cycles)
            result = original(*args, **kwargs)
            if when == "after":
                torch.cuda._sleep(cycles)
            return result

        undo.append((holder, name, original))
        setattr(holder, name, slowed)

    def compute(model, trace, rank):
        if where == "compute":
            # Before a block's kernels: while they are late its parameters must stay.
            for block in model.blocks:
                block.up.register_forward_pre_hook(lambda *_: torch.cuda._sleep(cycles))
                block.down.register_full_backward_pre_hook(lambda *_: torch.cuda._sleep(cycles))
        program(model, trace, rank, steps=6)

    if where == "copy-in":
        slow(ParameterStorage, "fill", "before")
        slow(PlannedAllGather, "allocate", "after")
    elif where == "all-gather":
        slow(ParameterStorage, "gather", "before")
        slow(PlannedAllGather, "__call__", "before")
    elif where == "gradient copy-in":
        slow(PlannedReduceScatter, "allocate", "after")
    elif where == "reduce-scatter":
        slow(PlannedReduceScatter, "__call__", "before")
    if not waits:
        undo.append((Lease, "wait", Lease.wait))
        Lease.wait = lambda self: None
    try:
        with contextlib.ExitStack() as stack:
            if flat:
                stack.enter_context(in_flat_buffers())
            return both(lambda: build(world), compute, rank, choose=choose)
    finally:
        for holder, name, original in undo:
            setattr(holder, name, original)


def overlaps(rank, world):
    """How many gathers of a forward pass ran beside matrix products, and how many there were."""
    from fsdp_models import mesh
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.profiler import ProfilerActivity, profile

    import symmplan

    torch.manual_seed(7)
    width, children = 4096, 6
    block = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    with torch.device("cuda"):
        model = nn.Sequential(*(copy.deepcopy(block) for _ in range(children)))
    for child in model:
        fully_shard(
            child, mesh=mesh(world, device="cuda"), mp_policy=MixedPrecisionPolicy(torch.bfloat16)
        )
    fully_shard(model, mesh=mesh(world, device="cuda"))
    handle = symmplan.fsdp.apply(model, choose="copy engine", timeout=60)
    tokens = torch.randn(8192, width, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        model(tokens).float().pow(2).mean().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        # The host is ahead, as in a long program: gathers wait for nothing but what they must.
        torch.cuda._sleep(100_000_000)
        loss = model(tokens).float().pow(2).mean()
        torch.cuda.synchronize()
    loss.backward()
    events = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in profiler.events()
        if e.device_type.name == "CUDA"
    ]
    copies = sorted((b, e) for name, b, e in events if "Memcpy PtoP" in name)
    products = [(b, e) for name, b, e in events if "gemm" in name.lower() or "nvjet" in name]
    each = len(copies) // children
    gathers = [
        (copies[i][0], max(e for _, e in copies[i : i + each]))
        for i in range(0, len(copies), max(each, 1))
    ]
    beside = sum(any(b < end and begin < e for b, e in products) for begin, end in gathers)
    peak, bound = handle.plan.peak_bytes, handle.plan.lower_bound_bytes
    handle.remove()
    return {
        "copies": len(copies),
        "gathers": len(gathers),
        "beside": beside,
        "children": children,
        "peak": peak,
        "bound": bound,
        "layer": 2 * width * width * 2,
    }


def kernels(rank, world, planned):
    """Names of the communication kernels of one step after the first two."""
    from fsdp_models import Trace
    from torch.profiler import ProfilerActivity, profile

    import symmplan

    torch.manual_seed(7)
    model = build(world, dim=2048)
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=60) if planned else None
    program(model, Trace(), rank, steps=2, dim=2048)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        program(model, Trace(), rank, steps=1, dim=2048)
        torch.cuda.synchronize()
    found: dict[str, int] = {}
    for event in profiler.events():
        if "nccl" in event.name.lower() or "Memcpy PtoP" in event.name:
            found[event.name] = found.get(event.name, 0) + 1
    if handle is not None:
        handle.remove()
    return found


def memory_and_time(rank, world, planned):
    """Peak bytes, and milliseconds of a step, over some steps."""
    import time

    from fsdp_models import Trace

    import symmplan

    torch.manual_seed(7)
    torch.cuda.empty_cache()
    model = build(world, dim=1024)
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=60) if planned else None
    program(model, Trace(), rank, steps=3, dim=1024)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    program(model, Trace(), rank, steps=10, dim=1024)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / 10
    told = {
        "step_ms": seconds * 1e3,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "segment": 0 if handle is None else handle.stats.segment_bytes,
        "bound": 0 if handle is None else handle.stats.lower_bound_bytes,
    }
    if handle is not None:
        handle.remove()
    return told


# Parent side.


@pytest.mark.parametrize("after_forward", [True, False])
@pytest.mark.parametrize("bf16", [False, True])
def test_twenty_steps_have_the_same_bits(pool, bf16, after_forward):
    for result in pool.run(parity, bf16, "placed", after_forward):
        assert result["differences"] == []
        stats = result["stats"]
        assert stats["plain"] == stats["copies"] == stats["reordered"] == 0
        assert stats["rendezvous"] <= 1  # none if an earlier model left a segment
        assert stats["segment_bytes"] >= stats["lower_bound_bytes"]


def test_models_that_come_and_go_share_segments(pool):
    """A segment is never freed: NCCL would go on to think that its addresses are symmetric."""
    for _ in range(3):
        for result in pool.run(parity, False, "placed", True):
            assert result["differences"] == []


def test_what_loses_the_measurement_stays_out_on_both_ranks(pool):
    results = pool.run(parity, True, "measure", True)
    assert results[0]["looked"] == results[1]["looked"]
    print(results[0]["looked"], results[0]["stats"])
    for result in results:
        assert result["differences"] == []
        assert result["stats"]["copies"] == 0


@pytest.mark.parametrize("choose", ["placed", "copy engine"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "where", ["copy-in", "all-gather", "gradient copy-in", "reduce-scatter", "compute"]
)
def test_reuse_is_ordered_whatever_stream_is_late(pool, where, flat, choose):
    for result in pool.run(delayed, where, True, choose, flat):
        assert result["differences"] == []
        assert result["stats"]["copies"] == result["stats"]["plain"] == 0


def test_without_the_waits_late_kernels_read_the_next_modules_parameters(pool):
    """The delays are long enough to see what the waits prevent."""
    seen = pool.run(delayed, "compute", False)
    assert any(result["differences"] for result in seen)


def test_copy_engines_on_communicators_of_our_own_give_the_same_bits(pool):
    for bf16 in (False, True):
        for result in pool.run(parity, bf16, "copy engine", True):
            # Two ranks: one sum of two numbers, rounded once whoever adds them.
            assert result["differences"] == []
            assert result["stats"]["copies"] == result["stats"]["plain"] == 0


def test_gathers_of_all_children_but_the_first_run_beside_products(pool):
    for seen in pool.run(overlaps):
        print(seen)
        assert seen["gathers"] == seen["children"]
        assert seen["beside"] == seen["children"] - 1
        # Two modules' parameters; a gradient that is reduced, and what its all-to-all receives
        # (twice the bytes: gradients are reduced in 32 bits).
        assert seen["peak"] == seen["bound"]


def test_planned_gathers_run_in_symmetric_kernels(pool):
    plain, planned = (pool.run(kernels, p)[0] for p in (False, True))
    print(plain, planned)
    assert any("AllGather_RING" in name for name in plain)
    assert not any("AllGather_RING" in name for name in planned)
    assert sum(n for name, n in planned.items() if "ncclSymk" in name and "AllGather" in name) > 0


def test_planned_gathers_run_on_copy_engines_without_multiprocessors(zero_cta):
    planned = zero_cta.run(kernels, True)[0]
    print(planned)
    assert not any("AllGather" in name for name in planned)
    assert any("Memcpy PtoP" in name for name in planned)


def test_memory(pool):
    plain, planned = (pool.run(memory_and_time, p)[0] for p in (False, True))
    print(plain, planned)
    assert planned["segment"] >= planned["bound"]
    assert planned["allocated"] + planned["bound"] <= plain["reserved"]
