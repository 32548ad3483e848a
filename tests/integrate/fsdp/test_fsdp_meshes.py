"""FSDP2 on meshes of several dimensions, and modules on meshes of their own."""

from __future__ import annotations

import pytest
from fsdp_conditions import forced, forced_kind
from fsdp_models import (
    Net,
    batch,
    both,
    changing,
    check,
    mesh,
    needs,
    same,
    sgd,
    shard,
    train,
    update,
)
from ranks import pool_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common

pytestmark = pytest.mark.ranks

four = pool_of(4, timeout=240.0)


def hybrid(rank, world):
    """HSDP: sharded over pairs, replicated over the pairs."""
    return both(lambda: shard(Net(), mesh=mesh(2, 2, names=("replicate", "shard"))), train, rank)


def hybrid_accumulation(rank, world):
    """HSDP that all-reduces only in the last micro-batch."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(3):
            for micro in range(2):
                model.set_requires_all_reduce(micro == 1)
                model(batch(10 * step + micro, rank)).pow(2).mean().backward()
            update(model, optimizer, trace, step)

    return both(lambda: shard(Net(), mesh=mesh(2, 2, names=("replicate", "shard"))), program, rank)


def two_dimensions(rank, world):
    """Tensor parallelism inside, FSDP2 outside."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def build():
        both_dimensions = mesh(2, 2, names=("dp", "tp"))
        model = Net()
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, both_dimensions["tp"], plan)
        return shard(model, mesh=both_dimensions["dp"])

    # Ranks of one tensor-parallel group must see the same data.
    return both(build, lambda model, trace, rank: train(model, trace, rank // 2), rank)


@pytest.mark.further
@pytest.mark.parametrize("program", [hybrid, hybrid_accumulation, two_dimensions])
def test_meshes_of_two_dimensions(four, program):
    check(four.run(program))


@pytest.mark.further
@pytest.mark.parametrize("program", [hybrid, hybrid_accumulation])
def test_pushes_over_two_meshes(four, program):
    for result in four.run(forced, "push", program):
        assert result["differences"] == []
        assert result["stats"]["plain"] == 0


def partial_reshard(rank, world):
    """``reshard_after_forward=2``: backward gathers over pairs, forward over all four."""
    return both(lambda: shard(Net(), reshard_after_forward=2), train, rank, close=1e-5)


@pytest.mark.further
def test_forward_and_backward_may_gather_over_different_groups(four):
    """They share one segment, which meets each of them once: FSDP2 makes one for each module."""
    results = four.run(partial_reshard)
    assert [r["segments"] for r in results] == [1] * 4
    stats = check(results, rendezvous=1 + 4)
    assert stats["unshared_bytes"] > 3 * stats["segment_bytes"]


def other_groups(rank, world):
    """Backward gathers over pairs at first, and over all ranks later."""

    def change(model, step, trace, rank):
        if step == 3:
            model.set_reshard_after_forward(True)

    program = changing(change, steps=6)
    return both(lambda: shard(Net(), reshard_after_forward=2), program, rank, close=1e-5)


@pytest.mark.further
def test_a_module_that_changes_its_group_is_plain_once_and_then_planned(four):
    results = four.run(other_groups)
    stats = check(results, plain=4, replans=1, rendezvous=None, reordered=None)
    assert stats["reasons"] == {"it ran over another group than planned": 4}


def groups_of_their_own(rank, world, changes):
    """Modules with two parameter groups: one over all ranks, one over pairs."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    def build():
        model = Net()
        pairs = mesh(2, 2, names=("outer", "inner"))
        everyone = mesh(world)
        infos = {True: FSDPMeshInfo(everyone, 0), False: FSDPMeshInfo(pairs["inner"], 0)}
        for block in model.blocks:
            ups = set(block.up.parameters())
            fully_shard(
                block,
                mesh=everyone,
                shard_placement_fn=lambda p, ups=ups: ShardPlacementResult(
                    Shard(0), infos[p in ups]
                ),
            )
        return fully_shard(model, mesh=everyone)

    def change(model, step, trace, rank):
        if changes and step in (3, 6):
            model.set_reshard_after_backward(step == 6)

    return both(build, changing(change, steps=8), rank, close=1e-5)


@pytest.mark.further
@needs("ShardPlacementResult", _fsdp_common)
@pytest.mark.parametrize("changes", [False, True])
def test_modules_with_several_parameter_groups(four, changes):
    results = same(four.run(groups_of_their_own, changes), plain=0)
    assert all(result["stats"]["modules"] == 7 for result in results)


def experts(rank, world):
    """Some modules are sharded over pairs, the others over all ranks."""

    def build():
        both_dimensions = mesh(2, 2, names=("outer", "inner"))
        model = Net()
        for block in model.blocks:
            fully_shard(block.up, mesh=both_dimensions["inner"], reshard_after_forward=False)
        return shard(model)

    # Sums over four ranks may be rounded otherwise.
    return both(build, train, rank, close=1e-5)


@pytest.mark.further
def test_modules_on_meshes_of_their_own(four):
    same(four.run(experts), plain=0, copies=0, replans=0)


def exactly(rank, world, kind):
    """Over four ranks with the sums left to the process group: the same bits."""

    def build():
        if kind == "experts":
            both_dimensions = mesh(2, 2, names=("outer", "inner"))
            model = Net()
            for block in model.blocks:
                fully_shard(block.up, mesh=both_dimensions["inner"])
            return shard(model)
        if kind == "hybrid":
            both_dimensions = mesh(2, 2, names=("replicate", "shard"))
            return shard(Net(), mesh=both_dimensions, reshard_after_forward=1)
        return shard(Net(), reshard_after_forward=2)

    with forced_kind("reduce_scatter", rank):
        return both(build, train, rank, choose="measure")


@pytest.mark.further
@pytest.mark.parametrize("kind", ["experts", "hybrid", "partial"])
def test_meshes_have_the_same_bits_where_the_group_reduces(four, kind):
    """Gathers are placed, over pairs and over four."""
    for result in same(four.run(exactly, kind), copies=0, replans=0):
        assert all("torch's own way" in reason for reason in result["stats"]["reasons"])
