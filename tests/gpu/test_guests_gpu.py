"""Compiled graphs in a window of FSDP2's segments on CUDA devices, over NCCL."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, init="nccl", timeout=280.0) as ranks:
        yield ranks


def _trained(rank, size, choose):
    """Losses with and without symmplan, and what the process holds meanwhile."""
    import torch.distributed as dist
    from test_guests import TOKENS, made

    import symmplan

    torch.cuda.set_device(rank)
    torch._dynamo.reset()
    mesh, other = dist.init_device_mesh("cuda", (size,)), dist.new_group(list(range(size)))
    backend = symmplan.backend(inner="eager", memory="nccl", timeout=60.0, choose=choose)
    pair = []
    for inner, planned in (("eager", False), (backend, True)):
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
            losses.append(float(loss))
    held = [(s.nbytes, s.users) for s in symmplan.segments() if s.users]
    stats, graphs = handle.stats, backend.stats
    torch.cuda.synchronize()
    dist.barrier()
    handle.remove()
    backend.release()
    left = [s.users for s in symmplan.segments() if s.users]
    return losses, held, (stats.served, stats.plain, stats.copies, graphs.served), left


def test_both_share_one_segment(pool):
    for losses, held, counts, left in pool.run(_trained, "placed"):
        print(losses, held, counts)
        torch.testing.assert_close(losses[::2], losses[1::2], rtol=1e-5, atol=1e-6)
        ((_, users),) = held
        assert users == ("FSDP2", "compiled graphs")
        served, plain, copies, graphs = counts
        assert served > 0
        assert graphs > 0
        assert plain == copies == 0
        assert left == []
