"""Graphs in one segment of which CUDA graphs were captured, which may be replayed in any order."""

from __future__ import annotations

import sys
from unittest import mock

import custom_ops
import pytest
import torch
from doubles import on_devices
from paths import TESTS
from ranks import pool_of

import symmplan
from symmplan.integrate.compile.turns import Shared

sys.path.append(str(TESTS / "runtime"))
import test_tenants as tenants

pytestmark = [pytest.mark.ranks, pytest.mark.all_cases]

two = pool_of(2, setup=custom_ops.meet, timeout=120)


def _one_sided(x, group):
    return torch.ops.symmplan_test.scale(x.sin(), group).cos()


def _collective(x, group):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.sin(), "sum", group)).cos()


def _barriers(rank, world, program):
    """Barriers around each run: twice, captured, another graph captured, the first again."""
    from symmplan.device import device_of

    torch._dynamo.reset()
    backend = symmplan.backend("eager", choose="placed", memory="nccl", timeout=30.0)
    compiled = torch.compile(
        lambda x: program(x, custom_ops.GROUPS[0]), backend=backend, dynamic=False
    )
    large, small = torch.ones(64, 8), torch.ones(32, 8)
    found, count = [], 0

    def counted(shared):
        nonlocal count
        count += 1
        barrier(shared)

    def run(x):
        nonlocal count
        count = 0
        compiled(x)
        found.append(count)

    barrier = Shared._barrier
    with mock.patch.object(Shared, "_barrier", counted):
        run(large)
        run(large)
        for x in (large, small):
            with mock.patch.object(type(device_of(x.device)), "capture_of", return_value=1):
                run(x)
        run(large)
        run(large)
    backend.release()
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "barriers"),
    [(_one_sided, [0, 0, 2, 2, 2, 2]), (_collective, [0, 0, 0, 0, 0, 0])],
)
def test_a_replay_may_be_between_any_two_runs(two, program, barriers):
    """Barriers are in front of, and behind, what peers may touch at any time."""
    assert two.run(on_devices, _barriers, program) == [barriers] * 2


def _replans(rank, world, captured, outgrown):
    """How often FSDP2 is planned again, of whose tenant CUDA graphs are captured."""
    import torch.distributed as dist

    from symmplan.device import device_of

    torch._dynamo.reset()
    backend = symmplan.backend("eager", "nccl", choose="placed", timeout=30.0)
    mesh = dist.init_device_mesh("cpu", (world,))
    model, handle = tenants.made(mesh, mesh.get_group(), backend, planned=True)
    kind, optimizer = type(device_of(torch.device("cpu"))), torch.optim.SGD(model.parameters())
    for turn in range(10):
        if turn == 4:
            with mock.patch.object(kind, "capture_of", return_value=int(captured)), torch.no_grad():
                model.blocks[0](torch.ones(tenants.TOKENS, tenants.WIDTH))
            if outgrown:  # the graphs move, but not what was captured
                larger = torch.compile(_collective, backend=backend)
                larger(torch.ones(256, 1024), mesh.get_group().group_name)
        if turn == 5:
            for module in (model.embed, *model.blocks, model.head):
                if hasattr(module, "set_reshard_after_forward"):
                    module.set_reshard_after_forward(False)
        tenants._step(model, optimizer, turn, rank)
    there = [arena.parent is not None for arena in backend._pool.arenas]
    replans = handle.stats.replans
    handle.remove()
    backend.release()
    return there, replans


@pytest.mark.further
@pytest.mark.parametrize(("captured", "outgrown"), [(False, False), (True, False), (True, True)])
def test_fsdp2_is_not_planned_again_where_its_tenant_is_captured(two, captured, outgrown):
    for there, replans in two.run(on_devices, _replans, captured, outgrown):
        assert there == [not outgrown]
        assert replans == (0 if captured else 1)
