"""Modules that keep the storage of their unsharded parameters when they reshard (torch 2.15)."""

from __future__ import annotations

import pytest
import torch
from ranks import pool_of
from torch.distributed.fsdp import FSDPModule, fully_shard

import symmplan

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.all_cases,
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_keep_unsharded_storage"), reason="this torch has no such mode"
    ),
]

two = pool_of(2)

STEPS = 7


def _trained(rank, world, when, planned):
    """Losses and what is in the kept storages behind each step; the mode is set before a step."""
    import torch.distributed as dist

    mesh = dist.init_device_mesh("cpu", (world,))
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = symmplan.fsdp.apply(model, choose="placed") if planned else None
    seen, kept = [], {}
    # As a CUDA graph does, of whose parameters the addresses must stay.
    model[1].register_forward_pre_hook(lambda module, _: kept.update(module.named_parameters()))
    for step in range(STEPS):
        if step == when:
            model.set_keep_unsharded_storage(True)
        if step == when + 3:
            model.set_keep_unsharded_storage(False)
        loss = model(torch.full((2, 32), rank + step + 1.0)).square().mean()
        loss.backward()
        seen.append(loss.detach().clone())
        if when <= step < when + 3:
            seen += [weight.detach().clone() for weight in kept.values()]
        optimizer.step()
        optimizer.zero_grad()
    return seen, 0 if handle is None else handle.stats.served


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_what_is_kept_can_be_read(two, when):
    plain, planned = two.run(_trained, when, False), two.run(_trained, when, True)
    for (want, _), (found, served) in zip(plain, planned, strict=True):
        assert len(found) == len(want) == STEPS + 3 * 2
        assert all(map(torch.equal, found, want))
        assert served > 0
