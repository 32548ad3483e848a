"""What a program drops gives its memory back, on each rank by itself, in each integration."""

from __future__ import annotations

import gc
import logging
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from doubles import on_devices, state
from ranks import pool_of, run_ranks
from torch import nn

import symmplan
from symmplan.coordination.own import at_drop, own_work
from symmplan.memory import cache, realize
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.process import PROCESS

TIMES = 6
COUNT = 1 << 16

#: Collectives that torch's flight recorder remembers, 2,000 by default.
RECORDED = 8

two = pool_of(2, timeout=240.0)
few_recorded = pool_of(2, timeout=240.0, env={"TORCH_FR_BUFFER_SIZE": str(RECORDED)})


def _held():
    """Mappings of shared files, descriptors, and segments."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "shm" in line]
    return len(mapped), len([*Path("/proc/self/fd").iterdir()]), len(symmplan.segments())


def _reduced(x):
    return fc.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def _compiled(rank, k, memory="shm"):
    compiled = torch.compile(
        _reduced,
        backend=symmplan.backend(inner="eager", memory=memory, choose="placed"),
        dynamic=False,
    )
    for i in range(2):
        assert compiled(torch.full((COUNT,), rank + i + k + 0.0))[0] == 2 * (1 + 2 * (i + k)) + 1
    torch.compiler.reset()


def _released(rank, k, memory):
    backend = symmplan.backend(inner="eager", memory=memory, choose="placed")
    compiled = torch.compile(_reduced, backend=backend, dynamic=False)
    assert compiled(torch.full((COUNT,), rank + k + 0.0))[0] == 2 * (1 + 2 * k) + 1
    backend.release()
    torch.compiler.reset()


def _default(rank, k, memory="shm"):
    compiled = torch.compile(_reduced, backend="symmplan", dynamic=False)
    assert compiled(torch.full((COUNT,), rank + k + 0.0))[0] == 2 * (1 + 2 * k) + 1
    torch.compiler.reset()


def _experts(rank, k, memory="shm"):
    experts = symmplan.expert_parallel(max_tokens=64, memory=memory, choose="placed")
    routes = experts.routes(torch.tensor([8, 8]))
    rows = torch.full((16, 256), rank + k + 0.0, requires_grad=True)
    there = experts.dispatch(rows, routes)
    assert there[:, 0].tolist() == [k] * 8 + [k + 1.0] * 8
    experts.combine(there * 2, routes).sum().backward()


def _fsdp(rank, k, memory="shm"):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    symmplan.fsdp.apply(model, memory=memory, choose="placed")
    for i in range(3):
        model(torch.full((2, 64), rank + i + k + 0.0)).sum().backward()


def _session(rank, k, memory="shm"):
    with symmplan.eager(memory=memory, choose="placed") as session:
        for i in range(3):
            result = _reduced(torch.full((COUNT,), rank + i + k + 0.0))
            assert result[0] == 2 * (1 + 2 * (i + k)) + 1
            session.step()


def _arena(rank, k, memory="shm"):
    buffer = Buffer("x", COUNT, dist.group.WORLD.group_name)
    problem = Problem(
        buffers=(buffer,), operations=(Operation("o"),), accesses=(Access("o", "x", write=True),)
    )
    alone = memory == "nccl"  # whose other segments serve the next plan
    arena = realize(symmplan.plan(problem), memory=memory, temporary=alone)
    arena.tensor("x").fill_(rank + k)
    arena.segments["segment0"].barrier()
    if not alone:
        assert arena.segments["segment0"].peers()[1 - rank][0] == 1 - rank + k
    arena.segments["segment0"].barrier()


KINDS = {f.__name__[1:]: f for f in (_fsdp, _session, _experts, _arena, _compiled, _default)}


def _again_and_again(rank, world, kind):
    """What is held before, and after each of several times."""
    found = [_held()]
    for k in range(TIMES):
        KINDS[kind](rank, k)
        gc.collect()
        dist.barrier()
        found.append(_held())
    return found


def _port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _in_new_groups(rank, world, kind, ports):
    """The same, each time in another process group."""
    found = []
    dist.destroy_process_group()
    for k, port in enumerate(ports):
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        KINDS[kind](rank, k)
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        found.append(_held())
    return found


def _taken(rank, world, kind, memory):
    """Bytes of the doubled device after each of several times, by what has them."""
    found = []
    for k in range(TIMES):
        {**KINDS, "released": _released}[kind](rank, k, memory)
        for _ in range(RECORDED):  # torch's flight recorder has the code of what called them
            dist.barrier()
        gc.collect()
        symmplan.segments()
        device = state().device
        found.append({**device.taken, "segments": device.segments})
    return found


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.parametrize("memory", ["nccl", "cuda"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_bytes_of_a_device_grow(few_recorded, kind, memory):
    if (kind, memory) == ("default", "cuda"):
        pytest.skip("a process has one default backend, on the first device that it met")
    for found in few_recorded.run(on_devices, _taken, kind, memory):
        assert found[-1] == found[1], found


@pytest.mark.ranks
@pytest.mark.further
def test_a_release_gives_back_what_is_recorded_yet(two):
    for found in two.run(on_devices, _taken, "released", "nccl"):
        assert found[-1] == found[1], found


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows(two, kind):
    for found in two.run(_again_and_again, kind):
        assert len({*found[2:]}) == 1, found
        more = found[-1][2] - found[0][2]
        assert more == (kind == "default"), found  # which is there for the next graph


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.further
def test_nothing_grows_over_new_process_groups(kind):
    for found in run_ranks(_in_new_groups, 2, kind, [_port() for _ in range(TIMES)]):
        assert len({*found[2:]}) == 1, found


def _kept_tensor(rank, world, way):
    """An arena is dropped or released while a tensor in it, and then a view of that, lives on."""
    group = dist.group.WORLD.group_name
    problem = Problem(
        buffers=(Buffer("x", 4096, group), Buffer("y", 64, group)),
        operations=(Operation("o"),),
        accesses=(Access("o", "x", write=True), Access("o", "y", write=True)),
    )
    plan = symmplan.plan(problem)
    before = len(symmplan.segments())
    arena = realize(plan, memory="shm")
    kept = arena.tensor("x").fill_(rank)
    assert arena.tensor("y").untyped_storage()._cdata == kept.untyped_storage()._cdata
    if way == "release":
        arena.release()
    del arena
    others = [realize(plan, memory="shm") for _ in range(3)]
    for other in others:
        other.tensor("x").fill_(7)
    held = [(s.users, s.nbytes) for s in symmplan.segments()[before:]]
    same = kept.eq(rank).all().item()
    kept = kept[:2048].view(2, 1024)
    gc.collect()
    gather = torch.ops.symmplan.all_gather_out
    try:
        gather(torch.full((1, 1024), rank + 5, dtype=torch.uint8), 2, group, out=kept)
        gathered = kept[:, 0].tolist()
    except symmplan.errors.NotSymmetricError as error:
        gathered = "lies in no live segment" in str(error)
    del kept, other, others
    return same, held, gathered, len(symmplan.segments()) - before


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["drop", "release"])
def test_a_tensor_keeps_its_arena_and_its_bytes(two, way):
    users, gathered = ((), [5, 6]) if way == "drop" else (("tensors",), True)
    nbytes = 4096 + 256
    held = [(users, nbytes), *[((), nbytes)] * 3]
    assert two.run(_kept_tensor, way) == [(True, held, gathered, 0)] * 2


def _kept_function(rank, world):
    """Two backends are dropped, and the functions that they compiled are not."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log = logging.getLogger("symmplan")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    before = len(symmplan.segments())
    kept = []
    for _ in range(2):
        backend = symmplan.backend(inner="eager", memory="shm")
        kept.append(torch.compile(_reduced, backend=backend, dynamic=False))
        kept[-1](torch.ones(COUNT))
        del backend
    gc.collect()
    users = [s.users for s in symmplan.segments()]
    right = all(c(torch.full((COUNT,), i + 1.0))[0] == 4 * (i + 1) + 1 for i, c in enumerate(kept))
    kept.clear()
    torch.compiler.reset()
    gc.collect()
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)
    held = [text for text in told if "torch.compiler.reset()" in text]
    return right, ("compiled graphs",) in users, held, len(symmplan.segments()) - before


@pytest.mark.further
@pytest.mark.ranks
def test_who_holds_the_bytes_of_a_dropped_backend_is_said():
    text = f"compiled functions of other backends hold {8 * COUNT:,} bytes until"
    for right, listed, held, more in run_ranks(_kept_function, 2):
        assert right
        assert listed
        assert len(held) == 1
        assert text in held[0]
        assert more <= 0


class _Cached:
    """Stands for an arena in the segment cache."""

    def __init__(self, nbytes):
        self.segment_bytes = nbytes


def _common(rank, world, sizes):
    """Which arena ranks take of those that each has: ``{number: bytes}`` of each rank."""
    found = {number: _Cached(nbytes) for number, nbytes in sizes[rank].items()}
    world_group = dist.group.WORLD
    return cache._common(found, {world_group.group_name: world_group}, 30.0)


@pytest.mark.ranks
def test_ranks_take_an_arena_that_all_have(two):
    """Models end on each rank at a moment of its own, and in an order of its own."""
    for sizes, common in (
        ([{3: 64, 5: 32}, {5: 32, 3: 64}], 5),
        ([{3: 64, 5: 32}, {3: 64}], 3),
        ([{3: 64}, {5: 64}], None),
        ([{}, {5: 64}], None),
    ):
        assert two.run(_common, sizes) == [common] * 2


class _Thing:
    """Something to drop."""


def test_nothing_is_given_back_in_the_midst_of_own_work():
    done = []
    thing = _Thing()
    at_drop(thing, lambda: done.append(1))
    with own_work:
        with own_work:
            del thing
        assert not done
    assert done == [1]
    assert not PROCESS.dropped


def test_what_cannot_be_given_back_disturbs_nobody(caplog):
    done = []
    things = [_Thing(), _Thing()]
    at_drop(things[0], lambda: 1 / 0)
    at_drop(things[1], lambda: done.append(1))
    with own_work:
        things.clear()
    assert done == [1]
    assert "could not be given back" in caplog.text


def test_a_device_that_has_failed_replaces_no_error(monkeypatch):
    failed = mock.Mock(is_accelerator=True, **{"is_capturing.side_effect": RuntimeError("CUDA")})
    done = []
    things = [_Thing()]
    at_drop(things[0], lambda: done.append(1))

    def act():
        with own_work:
            things.clear()
            raise KeyError

    with monkeypatch.context() as patched:
        patched.setitem(PROCESS.devices, "failed", failed)
        with pytest.raises(KeyError):
            act()
        assert not done
    with own_work:
        assert len(PROCESS.dropped) == 1
    assert done == [1]
