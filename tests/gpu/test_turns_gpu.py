"""Sessions around an optimizer, in FSDP2's segments: the same bits, its bytes, and milliseconds.

Two devices of one host, or one that two ranks share. `python -m pytest -s -m gpu
tests/gpu/test_turns_gpu.py` prints the optimizer's step and what the driver has given.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from devices import SHARED, needs_devices, pool_on

pytestmark = needs_devices()

two = pool_on(2, timeout=280.0)
MEMORY = ["cuda"] if SHARED else ["nccl", "cuda"]
MiB = 1 << 20
DIM = 2048


def _compared(rank, world, style, acts, memory):
    import fsdp_models
    from gathering_optimizers import compared

    torch.cuda.set_device(rank)
    fsdp_models.DEVICE[0] = "cuda"
    return compared(rank, world, style, acts, choose="placed", memory=memory)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("style", ["asynchronous", "unequal", "gathered", "in place"])
def test_the_same_bits_in_fsdp2s_bytes(two, style, memory):
    acts = ["train", "train", "evaluate inside", "keep", "train", "keep inside", "sleep", "train"]
    for found in two.run(_compared, style, [*acts, "graph", "train inside", "train"], memory):
        assert found["differences"] == []
        assert found["rests"]
        assert found["bytes"][-1] == found["fsdp"]


def _used(world):
    """What the driver has given; of both ranks on a shared device."""
    torch.cuda.synchronize()
    torch.distributed.barrier()
    free, total = torch.cuda.mem_get_info()
    torch.distributed.barrier()
    return total - free


def _measured(rank, world, planned, memory):
    """Milliseconds of the optimizer's steps, and MiB after them."""
    import torch.distributed as dist
    from fsdp_models import Net, mesh, shard
    from gathering_optimizers import Gathering

    import symmplan

    torch.cuda.set_device(rank)
    torch.manual_seed(3)
    model = shard(Net(blocks=4, dim=DIM).cuda(), mesh=mesh(world, device="cuda"))
    optimizer = Gathering(model.parameters(), "in place", dist.group.WORLD)
    handle = session = None
    if planned:
        # With a limit: what the program has without symmplan is too little for NCCL's windows.
        given = {"choose": "placed", "memory": memory, "timeout": 60.0, "capacity": "1GiB"}
        handle, session = symmplan.fsdp.apply(model, **given), symmplan.eager(**given)
        session.__enter__()
    taken = []
    for _ in range(8):
        model(torch.ones(64, DIM, device="cuda")).square().mean().backward()
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        optimizer.step_by_step()
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - begin))
        if session is not None:
            session.step()
        model.zero_grad()
    used, rests = _used(world), session is not None and session.stats.segment_bytes == 0
    if session is not None:
        session.__exit__(None, None, None)
        handle.remove()
    return statistics.median(taken[3:]), used / MiB, rests


@pytest.mark.parametrize("memory", MEMORY)
def test_what_an_optimizers_step_takes(two, memory):
    for planned in (False, True):
        for ms, used, rests in two.run(_measured, planned, memory):
            print(f"{memory} planned={planned} {ms:.2f} ms, {used:.0f} MiB")
            assert rests == planned
