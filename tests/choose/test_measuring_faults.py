"""A rank that fails while collectives are timed: all raise, nobody waits for the process group."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, batch
from ranks import RankPool, pool_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import symmplan

pytestmark = pytest.mark.ranks

pair = pool_of(2, timeout=60.0)


# Programs over a process group: each ends with an error of its measurement.


def _fsdp(group, timeout):
    mesh = DeviceMesh.from_group(group, "cpu")
    model = Net()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    handle = symmplan.fsdp.apply(model, choose="measure", timeout=timeout)
    try:
        for step in range(3):
            model(batch(step, 0)).sum().backward()
    finally:
        handle.remove()


def _collectives(x, group):
    ops = torch.ops._c10d_functional
    gathered = ops.all_gather_into_tensor(x, 2, group.group_name)
    y = x @ x  # beside it
    y = ops.wait_tensor(gathered)[: x.shape[0]] @ y
    return ops.wait_tensor(ops.all_reduce(y, "sum", group.group_name))


def _compiled(group, timeout):
    torch._dynamo.reset()
    backend = symmplan.backend(
        "eager", choose="measure", collectives="process group", timeout=timeout
    )
    try:
        torch.compile(lambda x: _collectives(x, group), backend=backend)(torch.ones(8, 8))
    finally:
        backend.release()


def _eager(group, timeout):
    with symmplan.eager(group, choose="measure", timeout=timeout) as session:
        for _ in range(3):
            _collectives(torch.ones(8, 8), group)
            session.step()


PROGRAMS = {"fsdp": _fsdp, "compiled": _compiled, "eager": _eager}


# What goes wrong, on one rank.


def _break(moment, after):
    """From the call ``after`` on, a moment of a measurement goes wrong on this rank."""
    from symmplan.choose import clock

    owner = clock.Clock
    name = {"between": "span", "beside": "_multiply", "product": "product"}.get(moment, "_multiply")
    original, calls = getattr(owner, name), [0]

    def broken(*args, **kwargs):
        calls[0] += 1
        if calls[0] > after:
            if moment == "late":
                time.sleep(5.0)
            elif moment == "killed":
                os._exit(1)
            else:
                raise torch.OutOfMemoryError("no luck today")
        return original(*args, **kwargs)

    setattr(owner, name, broken)
    return lambda: setattr(owner, name, original)


def _run(rank, world, program, moment, after, victim):
    from symmplan.choose import trials

    group = dist.new_group(range(world))  # with half an hour's patience, and of no more use then
    trials.forget()
    undo = _break(moment, after) if rank == victim else lambda: None
    try:
        PROGRAMS[program](group, 2.0 if moment == "late" else 20.0)
    finally:
        undo()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("moment", "after"), [("beside", 4), ("between", 0), ("between", 7), ("product", 0)]
)
def test_a_rank_that_fails_while_it_measures_fails_on_all(pair, program, moment, after):
    if moment == "product" and program == "fsdp":
        pytest.skip("it has no products beside its collectives on the CPU")
    for victim in (0, 1):
        outcomes = pair.outcomes(_run, program, moment, after, victim)
        for rank, outcome in enumerate(outcomes):
            assert outcome.error is not None, outcome.describe()
            assert "SymmplanError" in outcome.error.kinds or program == "compiled"
            assert "no luck today" in outcome.error.text
            assert rank == victim or f"rank {victim}" in outcome.error.text


@pytest.mark.further
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rank_that_is_late_while_it_measures_is_an_error(pair, program):
    first, second = pair.outcomes(_run, program, "late", 3, 1)
    assert "did not end in 2 s" in first.error.text
    assert second.error is not None


@pytest.mark.further
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rank_that_dies_while_it_measures_is_an_error(program):
    with RankPool(2, timeout=60.0) as pool:
        first, second = pool.outcomes(_run, program, "killed", 4, 1)
        assert second.exitcode == 1
        assert "PeerLostError" in first.error.kinds or "ended" in first.error.text
