"""What a planned step costs the host: Python calls of the package, and all calls beside FSDP2's."""

from __future__ import annotations

import collections
import pathlib
import sys

import pytest
import torch
from fsdp_models import mesh as mesh_of
from hook_times import Block
from ranks import pool_of

import symmplan
from symmplan.torch_private import fsdp2

pytestmark = pytest.mark.ranks

two = pool_of(2)

MODULES = 6
#: A gather in each direction, and a reduction.
COLLECTIVES = 3 * MODULES
#: Python calls of the package for each of them, and all calls by those of plain FSDP2. What a step
#: does is counted, not how long it takes; a change that adds to it says so here.
OWN, ALL = 60, 0.7
#: The same where a plan places nothing.
IDLE_OWN, IDLE_ALL = 25, 1.05


def _counted(step, model):
    """Calls of the package, and all Python and C calls: of many steps the one that waited least.

    Where CPU ranks meet, a rank calls as often as it must wait, which devices do not.
    """
    root = pathlib.Path(symmplan.__file__).parent
    waits, root = str(root / "memory" / "meeting" / "control.py"), str(root)
    least = None
    for _ in range(12):
        calls = collections.Counter()

        def count(frame, event, _, calls=calls):
            file = frame.f_code.co_filename
            if event in ("call", "c_call") and file != waits:
                calls["all"] += 1
                calls["own"] += event == "call" and file.startswith(root)

        torch.distributed.barrier()
        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(None)
        model.zero_grad()
        least = min(least or calls, calls, key=lambda c: c["all"])
    return least


def _calls(rank, world, choose):
    from torch.distributed.fsdp import fully_shard

    found = {}
    for side in ("plain", "planned"):
        model = torch.nn.Sequential(*(Block() for _ in range(MODULES)))
        for module in (*model, model):
            fully_shard(module, mesh=mesh_of(world))
        handle = symmplan.fsdp.apply(model, choose=choose) if side == "planned" else None

        def step(model=model):
            model(torch.ones(4, 16)).sum().backward()

        for _ in range(3):
            step()
            model.zero_grad()
        found[side] = dict(_counted(step, model))
        if handle is not None:
            found["served"] = handle.stats.served, handle.stats.plain
            handle.remove()
    return found


def _judge(found, own, share):
    assert found["plain"]["own"] <= MODULES  # what watches FSDP2's copy-in stays in a process
    calls = found["planned"]["own"] / COLLECTIVES
    of_all = found["planned"]["all"] / found["plain"]["all"]
    print(f"{calls:.0f} calls of the package for each collective, {of_all:.2f} of all")
    assert calls <= own
    assert of_all <= share


def test_a_planned_step_makes_few_calls(two):
    for found in two.run(_calls, "push"):
        served, plain = found["served"]
        assert served % COLLECTIVES == plain == 0
        _judge(found, OWN, ALL)


@pytest.mark.further
def test_a_step_of_a_plan_that_places_nothing_makes_fewer(two):
    for found in two.run(_calls, "ordinary"):
        served, plain = found["served"]
        assert served == plain % COLLECTIVES == 0
        _judge(found, IDLE_OWN, IDLE_ALL)


def _hooks(model):
    """All that FSDP2 calls by itself of a model's modules, states and parameter groups."""
    found = []
    for module in model.modules():
        found += [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            state = module._get_fsdp_state()
            owners = [state, *fsdp2.param_groups(module)]
            found += [(n, x) for o in owners for n, x in vars(o).items() if callable(x)]
    return found


def _wraps(rank, world, grouped):
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*(Block() for _ in range(4)))
    for part in [[model[0], model[1]], model[2], model[3]] if grouped else model:
        fully_shard(part, mesh=mesh_of(world))
    fully_shard(model, mesh=mesh_of(world))
    before, wraps, losses, handle = _hooks(model), [], [], None
    disable = torch._dynamo.disable

    def counted(fn=None, *args, **kwargs):
        wraps[-1] += 1
        return disable(fn, *args, **kwargs)

    for planned in (False, True):
        if planned:
            handle = symmplan.fsdp.apply(model, choose="push")
        for step in range(4):
            wraps.append(0)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(torch._dynamo, "disable", counted)
                loss = model(torch.ones(4, 16) + rank).square().sum()
                loss.backward()
            if step == 3:
                losses.append(loss.item())
            model.zero_grad()
    handle.remove()
    assert _hooks(model) == before
    return wraps[3], wraps[-1], losses


@pytest.mark.parametrize("grouped", [False, True])
def test_hooks_are_kept_from_dynamo_once_and_given_back(two, grouped):
    for plain, planned, losses in two.run(_wraps, grouped):
        assert losses[0] == losses[1]
        # Hooks of several modules are no methods, and stay as they are.
        assert planned < plain / 2 if grouped else planned == 0 < plain
