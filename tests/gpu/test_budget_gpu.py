"""Budgets and memory that cannot be had, on devices.

    python -m pytest tests/gpu/test_budget_gpu.py -m gpu --durations=0

All devices of one host, four at most.
"""

from __future__ import annotations

import pytest
import torch
from devices import needs_devices, pool_on

DEVICES = min(4, torch.cuda.device_count())

pytestmark = needs_devices()

DIM = 4096


#: A program that takes longer hangs: its ranks are killed, and their stacks shown.
SECONDS = 50

#: To start ranks takes longer than most programs.
pool = pool_on(DEVICES, timeout=SECONDS)
#: Ranks without segments of programs before, which plans may take for nothing.
fresh = pool_on(DEVICES, scope="function", timeout=SECONDS)


# Rank side.


def _program(rank, world, **apply):
    import warnings

    from fsdp_models import Net, batch, both, mesh, shard

    def train(model, trace, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(4):
            loss = model(batch(step, rank, dim=DIM, device="cuda")).pow(2).mean()
            loss.backward()
            trace.add(f"{step}.loss", loss)
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters(model)

    def look(handle):
        return (
            handle.plan.summary(),
            len(handle.choices),
            max([c.nbytes for c in handle.choices], default=0),
        )

    def build():
        return shard(Net(dim=DIM).cuda(), mesh=mesh(world, device="cuda"))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = both(build, train, rank, look=look, close=1e-3, timeout=30.0, **apply)
    result["warned"] = [str(w.message) for w in said if "symmplan" in str(w.message)]
    return result


def on_budget(rank, world, choose, capacity):
    return _program(rank, world, choose=choose, capacity=capacity)


def crowded(rank, world, choose, left):
    """One rank's device has ``left`` bytes free while the plan is made."""
    from symmplan.integrate.fsdp.plans import Planning

    original = Planning.make

    def make(self, recording):
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        hog = torch.empty(max(0, free - left), dtype=torch.uint8, device="cuda")
        try:
            return original(self, recording)
        finally:
            del hog
            torch.cuda.empty_cache()

    if rank == world - 1:
        Planning.make = make
    try:
        return _program(rank, world, choose=choose)
    finally:
        Planning.make = original


def failing(rank, world, stage, victim, choose):
    from symmplan.errors import BackendError, OutOfSharedMemoryError
    from symmplan.memory.backends.torch_symm import TorchSymmBackend

    def fails(*args, **kwargs):
        kind = OutOfSharedMemoryError if stage == "allocate" else BackendError
        raise kind("no luck today", fix="try tomorrow")

    original = getattr(TorchSymmBackend, stage)
    if rank == victim:
        setattr(TorchSymmBackend, stage, fails)
    try:
        return _program(rank, world, choose=choose)
    finally:
        setattr(TorchSymmBackend, stage, original)


def measured_in(rank, world, nbytes):
    """How much less is free of the device while a large collective is measured."""
    from fsdp_models import mesh
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import symmplan
    from symmplan.choose import trials

    over = mesh(world, device="cuda")
    for size in (64 << 20, nbytes):  # communicators and workspaces come with the first, and stay
        trials.forget()
        rows = size // (4 * 1024)
        wide = nn.utils.skip_init(nn.Linear, rows, 1024, bias=False, device="cuda")
        nn.init.ones_(wide.weight)
        model = fully_shard(wide, mesh=over)
        handle = symmplan.fsdp.apply(model, choose="measure", capacity=0, timeout=30.0)
        model(torch.ones(8, rows, device="cuda")).sum().backward()
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        least = [torch.cuda.mem_get_info()[0]]
        before, original = least[0], trials.seconds_of

        def watched(*args, original=original, least=least, **kwargs):
            result = original(*args, **kwargs)
            least.append(torch.cuda.mem_get_info()[0])
            return result

        trials.seconds_of = watched
        try:
            handle.freeze()
        finally:
            trials.seconds_of = original
        choices = [(c.op, c.nbytes, dict(c.seconds)) for c in handle.choices]
        handle.remove()
    return before - min(least), choices


# Parent side.


@pytest.mark.parametrize("choose", ["measure", "copy engine", "placed"])
def test_plans_keep_to_the_budget(pool, choose):
    whole = pool.run(on_budget, choose, None)[0]
    for part in (0, 0.3, 0.7):
        capacity = int(part * whole["bytes"][0])
        for result in pool.run(on_budget, choose, capacity):
            assert result["differences"] == []
            assert result["bytes"][0] <= capacity
            assert not result["warned"]


@pytest.mark.parametrize("left", [3 << 30, 1 << 30])  # the second is less than the plan wants
def test_a_device_that_is_full_on_one_rank(fresh, left):
    results = fresh.run(crowded, "placed", left)
    for result in results:
        assert result["differences"] == []
        assert result["bytes"][0] <= left
    assert len({r["looked"][0] for r in results}) == 1


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stage", ["allocate"])  # a rank alone cannot leave NCCL's registration
@pytest.mark.parametrize("choose", ["placed", "measure"])
def test_one_rank_without_memory(fresh, choose, stage, victim):
    results = fresh.run(failing, stage, victim, choose)
    assert sum(len(r["warned"]) for r in results) <= 1  # measuring takes memory of another kind
    for result in results:
        assert result["differences"] == []
    if choose == "placed":
        assert all(r["stats"]["served"] == 0 and r["warned"] == [] for r in results[1:])
        assert "no luck today" in results[0]["warned"][0]


def test_measuring_takes_256_mib_at_most(pool):
    for taken, choices in pool.run(measured_in, 2 << 30):
        assert {op for op, *_ in choices} == {"all_gather", "reduce_scatter"}
        assert all(nbytes == 2 << 30 for _, nbytes, _ in choices)
        assert taken <= (256 << 20) + (64 << 20)  # and what NCCL keeps of what it registers
