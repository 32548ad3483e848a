"""Compiled functions in eager sessions on devices, where other threads run backward.

SHARE_DEVICE=1 python -m pytest -m gpu tests/gpu/test_compiled_in_sessions_gpu.py  # on one device
"""

from __future__ import annotations

import pytest
import torch
from devices import needs_devices, pool_on

pytestmark = needs_devices()

two = pool_on(2, timeout=200)

TURNS = 4


def _of_one_graph(rank, world_size, recomputed):
    """Functions of one graph, compiled in the session; backward may call them again."""
    import torch.distributed as dist
    from torch.utils.checkpoint import checkpoint

    import symmplan

    def grown(x):
        return torch.nn.functional.gelu(x) * 2

    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(grown, backend=count, fullgraph=True)
    frames = []
    with symmplan.eager(memory="cuda", choose="placed", timeout=60.0) as session:
        for turn in range(TURNS):
            x = torch.full((256, 512), float(rank + turn), device="cuda", requires_grad=True)
            y = checkpoint(compiled, x, use_reentrant=False) if recomputed else compiled(x)
            y.sum().backward()
            total = x.grad + 1
            dist.all_reduce(total)
            plain = [torch.full_like(x, float(r + turn)).requires_grad_() for r in range(2)]
            torch.stack([grown(p) for p in plain]).sum().backward()
            assert torch.allclose(total, plain[0].grad + plain[1].grad + 2, atol=1e-5), turn
            session.step()
            frames.append(count.frame_count)
    return session.stats.served, frames[0], frames[-1] > 0


@pytest.mark.parametrize("recomputed", [False, True])
def test_functions_of_one_graph_are_compiled_after_the_recorded_iteration(two, recomputed):
    assert two.run(_of_one_graph, recomputed) == [(TURNS - 1, 0, True)] * 2
