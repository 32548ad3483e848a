"""Segments that larger ones have replaced: the device has their bytes back, and their windows'."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
from doubles import on_devices, state
from ranks import pool_of

import symmplan
from symmplan.process import PROCESS

pytestmark = [pytest.mark.ranks, pytest.mark.all_cases]

two = pool_of(2, timeout=120)


def _held(stats):
    """Bytes of all segments, how many windows they have, and bytes that the plan's shall have."""
    assert stats.bytes_without_owner == 0
    return state().device.segments, state().network.windows, stats.segment_bytes


def _addresses():
    """Where the segments lie that somebody uses."""
    used = [a for a in PROCESS.arenas.values() if not a.released and any(a.tenants)]
    return {segment.address for arena in used for segment in arena.segments.values()}


def _addresses_of_another(program):
    """Where the segment of another backend lies, with the smallest of the graphs."""
    torch._dynamo.reset()
    before = _addresses()
    backend = symmplan.backend("eager", choose="placed", timeout=30.0)
    torch.compile(program, backend=backend)(torch.ones(256, 1024))
    found = _addresses() - before
    backend.release()
    return found


def _graphs(rank, world, choose, captured=False):
    """Graphs of ever larger tensors, the first in a CUDA graph, too: what is held after each."""
    import torch.distributed as dist

    from symmplan.device import device_of

    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name

    def gathered(x):
        return ops.wait_tensor(ops.all_gather_into_tensor(x * 2, world, name)).sum()

    backend = symmplan.backend("eager", choose=choose, timeout=30.0)
    compiled = torch.compile(gathered, backend=backend, dynamic=False)
    found = []
    for rows in (256, 512, 1024):
        x = torch.ones(rows, 1024) * (rank + 1)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), gathered(x))
        found.append(_held(backend.stats))
        if captured and rows == 256:
            with mock.patch.object(type(device_of(x.device)), "capture_of", return_value=1):
                compiled(x)
            (graphs,) = _addresses()
    if captured:  # nobody else gets it, before the backend is released
        assert graphs not in _addresses_of_another(gathered)
        backend.release()
        assert {graphs} == _addresses_of_another(gathered)
    backend.release()
    torch._dynamo.reset()
    return found


@pytest.mark.long
@pytest.mark.parametrize("choose", ["placed", "copy engine"])
def test_a_backend_has_the_largest_segment_of_its_graphs_only(two, choose):
    for found in two.run(on_devices, _graphs, choose):
        (_, windows, _), *_ = found
        assert windows == (2 if choose == "copy engine" else 1)
        assert [nbytes for nbytes, *_ in found] == [nbytes for *_, nbytes in found]
        assert [taken for _, taken, _ in found] == [windows] * 3
        assert found[0][0] < found[1][0] < found[2][0]


@pytest.mark.long
def test_a_segment_stays_of_which_a_cuda_graph_has_addresses(two):
    for found in two.run(on_devices, _graphs, "placed", True):
        first, second, third = (mine for *_, mine in found)
        assert [nbytes for nbytes, *_ in found] == [first, first + second, first + third]
        assert [taken for _, taken, _ in found] == [1, 2, 2]


def _steps(rank, world, choose):
    """FSDP2 that begins to keep its parameters: what is held before and after that is planned."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(5)))
    for module in (*model, model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (world,)))
    handle = symmplan.fsdp.apply(model, choose=choose, timeout=30.0)
    found, most, map_ = [], [], state().device.map

    def mapped(nbytes):
        made = map_(nbytes)
        most.append(state().device.segments)
        return made

    state().device.map = mapped
    for step in range(8):
        if step == 3:
            found.append(_held(handle.stats))
            for module in model:
                module.set_reshard_after_forward(False)
        model(torch.full((4, 512), float(rank + step))).square().mean().backward()
    found.append((*_held(handle.stats), handle.stats.replans))
    handle.remove()
    return *found, max(most)


@pytest.mark.long
@pytest.mark.parametrize("choose", ["symmetric", "push"])
def test_fsdp2_has_the_segment_of_its_last_plan_only(two, choose):
    for before, (*after, replans), most in two.run(on_devices, _steps, choose):
        assert replans == 1
        assert most == after[0], "both segments were there at once"
        for nbytes, windows, mine in (before, after):
            assert nbytes == mine
            assert windows == before[1]
        assert before[0] < after[0]


def _experts(rank, world, captured):
    """Experts that get ever more rows, the first as if captured: what is held after each call."""
    found = []
    experts = symmplan.expert_parallel(max_tokens=64, choose="push", timeout=30.0)
    for count in (16, 64, 256):
        rows = torch.full((world * count, 256), float(rank))
        routes = experts.routes([count] * world)
        inside = experts.dispatch(rows, routes)
        assert torch.equal(inside[:, 0], torch.arange(world).repeat_interleave(count).float())
        assert torch.equal(experts.combine(inside, routes), rows)
        found.append(_held(experts.stats))
        experts._slot._captured |= captured and count == 16
    experts.release()
    return found


@pytest.mark.parametrize("captured", [False, True])
def test_experts_have_the_segment_of_their_last_plan_only(two, captured):
    for found in two.run(on_devices, _experts, captured):
        first, *_, last = (mine for *_, mine in found)
        assert first < last == found[-1][0] - captured * first
        assert found[0][1] == 1 == found[-1][1] - captured


def _asleep(rank, world):
    """Whether the last rank had taken its windows back when this one was through with its own."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from symmplan.memory.backends import windows

    model = torch.nn.Linear(512, 512, bias=False)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=30.0)
    for _ in range(2):
        model(torch.ones(4, 512)).sum().backward()
    store, take_back = dist.distributed_c10d._get_default_store(), windows._take_back

    def late(group, ended):
        time.sleep(0.5)
        taken = take_back(group, ended)
        store.set("taken back", "")
        return taken

    with mock.patch.object(windows, "_take_back", late if rank == world - 1 else take_back):
        handle.sleep()
    found = store.check(["taken back"])
    handle.remove()
    return found, state().device.segments


def test_no_rank_goes_on_while_a_peer_still_maps_what_it_gave_back(two):
    """The driver would not have these bytes yet."""
    for found, held in two.run(on_devices, _asleep):
        assert found
        assert held == 0
