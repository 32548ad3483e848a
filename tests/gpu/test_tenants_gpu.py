"""FSDP2 and compiled graphs in one model on CUDA devices, over NCCL."""

from __future__ import annotations

import pytest
import torch
from devices import needs_devices, pool_on
from held import segments_of_plans

pytestmark = needs_devices()


pool = pool_on(2, timeout=280.0)


def _trained(rank, size, compiled, sharded):
    """Losses without symmplan and with it in the graphs, in FSDP2, or in both."""
    import torch.distributed as dist
    from test_tenants import TOKENS, made

    import symmplan

    torch.cuda.set_device(rank)
    torch._dynamo.reset()
    mesh, other = dist.init_device_mesh("cuda", (size,)), dist.new_group(list(range(size)))
    backend = symmplan.backend(inner="eager", memory="nccl", timeout=60.0, choose="placed")
    pair = []
    for inner, planned in (("aot_eager", False), (backend if compiled else "aot_eager", sharded)):
        model, handle = made(mesh, other, inner, planned=planned)
        pair.append((model, torch.optim.SGD(model.parameters(), lr=0.01)))
    losses = []
    for turn in range(6):
        for model, optimizer in pair:
            if rank == turn % 2:
                torch.cuda._sleep(2_000_000)
            tokens = (torch.arange(TOKENS, device="cuda") * (turn + 3)) % 2048
            loss = model(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    users = sorted(s.users for s in segments_of_plans() if s.users and s.memory != "shm")
    torch.cuda.synchronize()
    dist.barrier()
    if handle is not None:
        handle.remove()
    backend.release()
    return losses, users


@pytest.mark.parametrize(
    ("compiled", "sharded"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_trains_as_without(pool, compiled, sharded):
    for losses, users in pool.run(_trained, compiled, sharded):
        print(losses, users)
        torch.testing.assert_close(losses[::2], losses[1::2], rtol=1e-4, atol=1e-6)
        assert users == [("FSDP2",) * sharded + ("compiled graphs",) * compiled] * (
            sharded or compiled
        )
