"""The algorithms by which FSDP2's collectives run on devices: what the plan says is what runs.

    python -m pytest tests/gpu/test_fsdp_algorithms_gpu.py -m gpu

All devices of one host, four at most.
"""

from __future__ import annotations

import sys

import pytest
import torch
from devices import finish, needs_devices, pool_on, ranks_on

DEVICES = min(4, torch.cuda.device_count())

pytestmark = needs_devices()

DIM = 2048


pool = pool_on(DEVICES, timeout=180)


# Rank side.


def build(world, dim=DIM, bf16=False):
    from fsdp_models import Net, mesh, shard
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if bf16 else {}
    return shard(Net(dim=dim).cuda(), mesh=mesh(world, device="cuda"), **options)


def train(model, trace, rank, steps=3, dim=DIM):
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


def look_only(model, trace, rank):
    """Gathers without reductions; planned after some rounds."""
    from fsdp_models import batch

    with torch.no_grad():
        for step in range(24):
            trace.add(f"{step}", model(batch(step, rank, dim=512, device="cuda")))


def parity(rank, world, choose, bf16, gathers_only):
    from fsdp_models import both

    def program(model, trace, rank):
        train(model, trace, rank, steps=20, dim=512)

    # More than two numbers are summed in another order, in 32 bits, and parameters that differ by
    # that are cast to 16 bits, whose last bit may then differ.
    close = 0.0 if gathers_only or world == 2 else (2e-2 if bf16 else 1e-4)
    return both(
        lambda: build(world, dim=512, bf16=bf16),
        look_only if gathers_only else program,
        rank,
        close=close,
        choose=choose,
    )


def profiled(rank, world, choose):
    """What the plan says of each collective, and the kernels and copies of one step."""
    from fsdp_models import Trace
    from torch.profiler import ProfilerActivity, profile

    import symmplan

    torch.manual_seed(7)
    model = build(world, bf16=True)
    handle = symmplan.fsdp.apply(model, choose=choose, timeout=60)
    train(model, Trace(), rank, steps=2)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        train(model, Trace(), rank, steps=1)
        torch.cuda.synchronize()
    found = [e.name for e in profiler.events() if "nccl" in e.name or "Memcpy PtoP" in e.name]
    plan, algorithms = handle.plan, {"all_gather": set(), "reduce_scatter": set()}
    for scheduled in handle._runtime.schedule.collectives:
        algorithms[scheduled.call.key.kind].add(scheduled.runs_by)
    counted = {name for name, count in handle.algorithms.items() if count}
    assert counted == algorithms["all_gather"] | algorithms["reduce_scatter"]
    told = {
        "kernels": {name: found.count(name) for name in set(found)},
        "algorithms": algorithms,
        "fingerprint": plan.fingerprint,
        "choices": [(c.op, c.nbytes, c.algorithm, dict(c.seconds)) for c in handle.choices],
        "rendezvous": handle.stats.rendezvous,
        "segments": len(plan.segments),
    }
    handle.remove()
    return told


def communicators(rank, world):
    """Of two models, one after the other: names, policies, and rendezvous."""
    from fsdp_models import Trace

    import symmplan
    from symmplan.process import PROCESS

    seen = []
    for _ in range(2):
        model = build(world, dim=512)
        handle = symmplan.fsdp.apply(model, choose="copy engine", timeout=60)
        train(model, Trace(), rank, dim=512)
        (engines,) = PROCESS.engines_made.values()
        config = engines._get_backend(torch.device("cuda")).options.config
        policy = config.cta_policy, config.max_ctas
        seen.append((engines.group_name, policy, handle.stats.rendezvous))
        handle.remove()
    return seen


def written(rank, world):
    """What a process writes to its standard error while its first model is measured and planned."""
    import os
    import tempfile

    from fsdp_models import Trace

    import symmplan

    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            model = build(world, dim=512)
            handle = symmplan.fsdp.apply(model, choose="measure", timeout=60)
            train(model, Trace(), rank, dim=512)
            torch.cuda.synchronize()
            sys.stderr.flush()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        handle.remove()
        file.seek(0)
        return file.read().decode()


def summed(rank, world, given, rounded, made):
    """Sums of parts by the kernel and by torch, which must have the same bits: what has not."""
    from symmplan.integrate.fsdp.sums import OwnRow, sum_parts, sums_parts

    device, wrong = torch.device("cuda", rank), []
    assert sums_parts(device)
    generator = torch.Generator(device).manual_seed(rank)

    def drawn(*shape, dtype):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    for ranks, scale, add in [(2, 0.5, True), (3, 1 / 3, True), (5, 0.37, True), (5, 0.2, False)]:
        sizes = [5000, 17, 4096 * 3, 1] * 5  # of more tensors than one launch takes
        counts = [-(-size // ranks) for size in sizes]
        rows, spans = drawn(ranks, sum(counts), dtype=given), []
        gradients = [drawn(size, dtype=given) for size in sizes]
        for at, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            begin, end = (min(size, r * count) for r in (ranks - 1, ranks))
            spans.append((begin, end, sum(counts[:at])))
        total = drawn(sum(counts), dtype=made)
        exact, inside = rows.float(), torch.zeros_like(total, dtype=torch.bool)
        for gradient, (begin, end, at) in zip(gradients, spans, strict=True):
            exact[-1, at : at + end - begin] = gradient[begin:end]
            inside[at : at + end - begin] = True
        one_by_one = torch.zeros_like(exact[0])
        for row in exact:
            one_by_one += row
        new = (one_by_one * torch.tensor(scale, device=device)).to(rounded).to(made)
        want = torch.where(inside, total + new if add else new, total)
        parts = OwnRow(ranks - 1, tuple(spans), device)
        sum_parts(rows, parts, gradients, total, scale, rounded, add=add)
        if not torch.equal(total, want):
            wrong.append((ranks, scale, add, float((total.double() - want.double()).abs().max())))
    return wrong


def fail_alone(rank, world, where):
    from test_fsdp_algorithms import failing_freeze

    def program(model, trace, rank, steps):
        train(model, trace, rank, steps, dim=512)

    return failing_freeze(rank, world, where, lambda: build(world, dim=512), program)


def loans(rank, world, waits):
    """Somebody reads late on one stream; the next user of the bytes writes on another."""
    from symmplan.runtime.leases import Lease, Ledger

    def fill():
        users, bytes_ = Ledger([]), torch.zeros(1 << 20, device="cuda")
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            lease = Lease(stream=first)
            users.take(0, 1 << 20, lease)
            torch.cuda._sleep(50_000_000)
            read = bytes_.clone()
            lease.issued(None, done=True)
        lease.drop()
        with torch.cuda.stream(second):
            users.take(1 << 19, 1 << 21, Lease(stream=second))
            bytes_.fill_(1.0)
        torch.cuda.synchronize()
        return float(read.sum())

    original = Lease.wait
    if not waits:
        Lease.wait = lambda self: None
    try:
        fill()  # allocations and first launches wait for the device by themselves
        return fill()
    finally:
        Lease.wait = original


# Parent side.


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("choose", ["placed", "copy engine", "push", "shared push", "measure"])
def test_twenty_steps_are_those_of_plain_fsdp2(pool, choose, bf16):
    for result in pool.run(parity, choose, bf16, False):
        assert result["differences"] == []
        assert result["stats"]["copies"] == result["stats"]["reordered"] == 0


@pytest.mark.parametrize("choose", ["placed", "copy engine"])
def test_gathers_have_the_same_bits_on_any_number_of_ranks(pool, choose):
    for result in pool.run(parity, choose, True, True):
        assert result["differences"] == []
        assert result["stats"]["plain"] == result["stats"]["copies"] == 0


@pytest.mark.parametrize("choose", ["placed", "copy engine", "push", "measure"])
def test_what_the_plan_says_is_what_runs(pool, choose):
    results = pool.run(profiled, choose)
    assert len({r["fingerprint"] for r in results}) == 1
    told = results[0]
    print(told["algorithms"], told["kernels"], told["choices"], sep="\n")
    for seen in results:
        names = seen["kernels"]
        copied = sum(count for name, count in names.items() if "Memcpy PtoP" in name)
        engines = False
        assert seen["algorithms"] == told["algorithms"]
        for op, kind in (("all_gather", "AllGather"), ("reduce_scatter", "ReduceScatter")):
            algorithms = seen["algorithms"][op]
            assert algorithms
            of_kind = [name for name in names if kind in name]
            symmetric = any("ncclSymk" in name for name in of_kind)
            ring = any("ncclDevKernel" in name for name in of_kind)
            assert symmetric == ("symmetric" in algorithms), (algorithms, names)
            assert ring == ("ordinary" in algorithms), (algorithms, names)
            engines = engines or bool({"copy engine", "push"} & algorithms)
        assert (copied > 0) == engines
    if choose != "measure":
        gathers = {"placed": "symmetric", "push": "copy engine"}.get(choose, choose)
        scatters = "push" if choose == "push" else "symmetric"
        assert told["algorithms"] == {"all_gather": {gathers}, "reduce_scatter": {scatters}}
    assert told["rendezvous"] <= told["segments"] * (1 if choose == "placed" else 3)


def test_two_communicators_serve_all_models(pool):
    for first, second in pool.run(communicators):
        _, policy, _ = first
        assert policy == (2, 1)  # NCCL_CTA_POLICY_ZERO, one channel
        assert second[:2] == first[:2]
        assert second[2] in (0, 1)  # a segment of a model before, which may not have met it


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float32),
    ],
)
def test_the_kernel_sums_as_torch_does(pool, dtypes):
    assert pool.run(summed, *dtypes) == [[]] * DEVICES


def test_torch_need_not_guess_the_device_of_our_communicators():
    with ranks_on(DEVICES, timeout=180) as ranks:
        for said in ranks.run(written):
            assert "Guessing device ID" not in said
        ranks.outcomes(finish)


@pytest.mark.parametrize("where", ["planning", "measuring"])
def test_a_rank_that_fails_alone_fails_all_ranks_at_once(pool, where):
    for rank, error in enumerate(pool.run(fail_alone, where)):
        own = "ArithmeticError: no luck in" if rank == 1 else "rank 1 failed: ArithmeticError"
        assert own in error
    for result in pool.run(parity, "measure", False, True):
        assert result["differences"] == []


def test_bytes_are_reused_in_order_across_streams(pool):
    """A reduce-scatter's input may become an all-gather's output while FSDP2 orders nothing."""
    assert pool.run(loans, True) == [0.0] * DEVICES
    assert all(seen > 0 for seen in pool.run(loans, False))
