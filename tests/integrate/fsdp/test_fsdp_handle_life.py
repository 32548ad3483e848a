"""A handle from `apply` to `Handle.remove`: what it says of itself, and what it refuses."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, Stop, Trace, batch, shard, train
from ranks import pool_of
from torch import nn

import symmplan
from symmplan.errors import BackendError, CaptureError, ReleasedError, RunError

pytestmark = pytest.mark.ranks

two = pool_of(2)


def lifecycle(rank, world):
    """Errors, freeze by hand, remove, apply again, and a model that just goes away."""
    told = {}
    for name, error, act in (
        ("no fsdp", CaptureError, lambda: symmplan.fsdp.apply(nn.Linear(2, 2))),
        ("memory", BackendError, lambda: symmplan.fsdp.apply(shard(Net()), memory="tape")),
        ("choose", BackendError, lambda: symmplan.fsdp.apply(shard(Net()), choose="dice")),
    ):
        with pytest.raises(error) as raised:
            act()
        told[name] = str(raised.value)
    model = shard(Net())
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=20.0)
    told["repr"] = repr(handle)
    told["planned"] = [handle.planned]
    with pytest.raises(RunError) as raised:
        _ = handle.plan
    told["plan"] = str(raised.value)
    with pytest.raises(CaptureError) as raised:
        symmplan.fsdp.apply(model)
    told["twice"] = str(raised.value)
    with pytest.raises(CaptureError) as raised:
        handle.freeze()
    told["too early"] = str(raised.value)
    train(model, Trace(), rank, steps=1)
    handle.freeze()
    handle.freeze()
    told["frozen"] = handle.stats.rendezvous
    train(model, Trace(), rank, steps=2)
    told["placed"] = handle.stats.served
    told["planned"].append(handle.planned)
    fingerprint = handle.plan.fingerprint
    told["repr planned"] = repr(handle)
    placed = handle.stats.served
    handle.remove()
    handle.remove()
    told["repr removed"] = repr(handle)
    told["same plan"] = handle.plan.fingerprint == fingerprint
    for act in (handle.freeze, functools.partial(handle.check, torch.compiler.reset)):
        with pytest.raises(ReleasedError) as raised:
            act()
        told[raised.value.what] = raised.value.fix
    train(model, Trace(), rank, steps=1)
    told["after remove"] = handle.stats.served - placed
    again = symmplan.fsdp.apply(model, choose="placed", timeout=20.0)
    train(model, Trace(), rank, steps=3)
    told["again"] = again.stats.served
    from symmplan.process import PROCESS

    told["live"] = len(PROCESS.segments)
    del model, again, handle
    gc.collect()
    told["live at end"] = len(PROCESS.segments)
    dist.barrier()
    return told


def test_the_life_of_a_handle(two, shared_memory_is_left_clean):
    for told in two.run(lifecycle):
        assert "has no FSDP2 module" in told["no fsdp"]
        assert "fix: call fully_shard" in told["no fsdp"]
        assert "accelerate launch, set fsdp_version: 2 in fsdp_config" in told["no fsdp"]
        assert "unknown memory backend 'tape'" in told["memory"]
        assert "unknown algorithm 'dice'" in told["choose"]
        assert "symmplan.fsdp is already applied to FSDP module 'model'" in told["twice"]
        assert "handle.remove()" in told["twice"]
        assert "no FSDP collective has run yet" in told["too early"]
        assert told["repr"] == "<symmplan.fsdp.Handle: 4 modules, recording>"
        assert told["repr planned"] == "<symmplan.fsdp.Handle: 4 modules, planned>"
        assert told["repr removed"] == "<symmplan.fsdp.Handle: 4 modules, removed>"
        assert "handle.plan was asked for before there is a plan" in told["plan"]
        assert "handle.planned says whether" in told["plan"]
        assert told["planned"] == [False, True]
        assert told["same plan"]
        for method in ("freeze", "check"):
            assert f"handle.{method}() was called after handle.remove()" in told
        assert told["frozen"] == 1
        assert told["placed"] == 2 * 11
        assert told["after remove"] == 0
        assert told["again"] == 2 * 11
        assert told["live"] == 1
        assert told["live at end"] == 0


def test_a_plan_is_never_none_to_a_type_checker():
    assert symmplan.fsdp.Handle.plan.fget.__annotations__["return"] == "Plan"


def left(rank, world):
    """Who leaves the block of a handle, in peace or by an error, has removed it."""
    told = []
    for fails in (False, True):
        model = shard(Net())
        seen = []
        with contextlib.suppress(Stop), symmplan.fsdp.apply(model, choose="placed") as handle:
            train(model, Trace(), rank, steps=2)
            seen.append(handle.stats.served > 0)
            loss = model(batch(2, rank)).sum() if fails else None
            if fails:
                raise Stop  # between forward and backward, where remove() alone would refuse
        del loss
        placed = handle.stats.served
        train(model, Trace(), rank, steps=1)
        told.append((*seen, repr(handle), handle.stats.served - placed))
    return told


def test_to_leave_a_handle_is_to_remove_it(two):
    removed = "<symmplan.fsdp.Handle: 4 modules, removed>"
    assert two.run(left) == [[(True, removed, 0)] * 2] * 2


def cast_midway(rank, world):
    """The model gets another type behind the plan, which plain FSDP2 cannot gather either."""
    model = shard(Net())
    with symmplan.fsdp.apply(model, timeout=20.0) as handle:
        train(model, Trace(), rank, steps=2)
        assert handle.planned
        model.to(torch.bfloat16)
        with pytest.raises(RunError) as raised:
            train(model, Trace(), rank, steps=1)
        model.reset_iter_state() if hasattr(model, "reset_iter_state") else model.reshard()
    return str(raised.value)


def replicated(rank, world):
    """What Accelerate makes of a model on the CPU."""
    model = torch.nn.parallel.DistributedDataParallel(Net())
    with pytest.raises(CaptureError) as raised:
        symmplan.fsdp.apply(model)
    return str(raised.value)


def test_another_type_and_another_wrapping_say_what_to_do(two):
    for said in two.run(cast_midway):
        assert "has another type than when FSDP2 began" in said
        assert "expected torch.float32; got torch.bfloat16" in said
        assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in said
    for said in two.run(replicated):
        assert "got DistributedDataParallel" in said
        assert "fix: call fully_shard(model) in place of DistributedDataParallel" in said
        assert "fsdp_version" not in said
