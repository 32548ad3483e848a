"""Torch's own symmetric memory and memory="nccl" in one process, over doubles of both."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from doubles import on_devices, state
from ranks import pool_of
from torch.distributed.fsdp import fully_shard

import symmplan
from symmplan.torch_private import symm_mem

pytestmark = [pytest.mark.ranks, pytest.mark.all_cases]

CPU = torch.device("cpu")

two = pool_of(2, timeout=60)


def _torch_s(rank):
    """What torch's own ops do: memory for a group by its name, and a write to the peer."""
    name = dist.group.WORLD.group_name
    own = state().memory.empty(8, CPU, name)
    handle = symm_mem.rendezvous(own, name)
    handle.barrier(channel=0, timeout_ms=5000)
    handle.get_buffer(1 - rank, (8,), torch.uint8).fill_(rank + 1)
    handle.barrier(channel=0, timeout_ms=5000)
    return own.tolist() == [2 - rank] * 8


def _fsdp(rank):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    for module in (*model, model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,)))
    handle = symmplan.fsdp.apply(model, memory="nccl", choose="push", timeout=30.0)
    for step in range(3):
        model(torch.full((2, 64), float(rank + step))).sum().backward()
    stats = handle.stats
    handle.remove()
    return stats.served > 0 and not stats.reasons


def _session(rank):
    name = dist.group.WORLD.group_name
    with symmplan.eager(memory="nccl", choose="placed", timeout=30.0) as session:
        for turn in range(3):
            x = torch.full((64,), rank + turn + 1.0)
            found = torch.ops._c10d_functional.all_reduce(x, "sum", name)
            right = torch.ops._c10d_functional.wait_tensor(found)[0] == 3 + 2 * turn
            session.step()
        return bool(right) and session.stats.placed > 0


def _in_turn(rank, world, ours, first):
    acts = [_torch_s, ours] if first == "torch" else [ours, _torch_s]
    return [act(rank) for act in (*acts, acts[0])], state().memory.name


@pytest.mark.parametrize("first", ["torch", "symmplan"])
@pytest.mark.parametrize("ours", [_fsdp, _session])
def test_each_runs_as_alone(two, ours, first):
    for right, allocator in two.run(on_devices, _in_turn, ours, first):
        assert right == [True] * 3
        assert allocator == "CUDA"
