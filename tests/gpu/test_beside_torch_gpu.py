"""Torch's own symmetric memory and symmplan's NCCL memory in one process, in either order.

    python -m pytest tests/gpu/test_beside_torch_gpu.py -m gpu

Two devices of one host.
"""

from __future__ import annotations

import pytest
import torch
from devices import needs_devices, ranks_on

pytestmark = needs_devices()

DIM = 1024

F = torch.ops._c10d_functional


def _own(rank, world):
    """A program's own tensors in symmetric memory, with torch's ops."""
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symm_mem

    name = dist.group.WORLD.group_name
    x = symm_mem.empty(DIM, device="cuda", dtype=torch.float32).fill_(rank + 1)
    symm_mem.rendezvous(x, name)
    torch.cuda.synchronize()
    dist.barrier()
    y = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name)
    torch.cuda.synchronize()
    return bool((y == world * (world + 1) / 2).all())


def _product(rank, world):
    """A gather and its product in one op, which takes a symmetric workspace for its group."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory  # which declares the op

    torch.manual_seed(7)
    whole = torch.randn(world * 256, DIM, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(DIM, DIM, device="cuda", dtype=torch.bfloat16) / DIM**0.5
    part = whole.view(world, 256, DIM)[rank].contiguous()
    _, (found,) = torch.ops.symm_mem.fused_all_gather_matmul(
        part, [w], 0, dist.group.WORLD.group_name
    )
    torch.testing.assert_close(found, whole @ w, rtol=3e-2, atol=3e-2)
    return True


def _pipelined(rank, world):
    """Inductor's own pipelined products."""
    import torch.distributed as dist

    name = dist.group.WORLD.group_name
    torch.manual_seed(8)
    x = torch.randn(512, DIM, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(DIM, DIM, device="cuda", dtype=torch.bfloat16) / DIM**0.5

    def gathered(x, w):
        return F.wait_tensor(F.all_gather_into_tensor(x, world, name)) @ w

    torch._dynamo.reset()
    with torch._inductor.config.patch(_micro_pipeline_tp=True):
        found = torch.compile(gathered)(x, w)
    torch.testing.assert_close(found, gathered(x, w), rtol=3e-2, atol=3e-2)
    return True


def _fsdp(rank, world):
    """FSDP2 by copy engines, with pushed gradients."""
    from fsdp_models import Net, batch, mesh, shard

    import symmplan

    torch.manual_seed(9)
    model = shard(Net(3, dim=DIM).cuda().bfloat16(), mesh=mesh(world, device="cuda"))
    handle = symmplan.fsdp.apply(model, choose="push", timeout=60.0)
    for step in range(3):
        rows = batch(step, rank, dim=DIM, device="cuda").bfloat16()
        model(rows).float().pow(2).mean().backward()
    torch.cuda.synchronize()
    stats = handle.stats
    handle.remove()
    return stats.served > 0 and not stats.reasons


def _graph(rank, world):
    """A compiled graph over NCCL's memory."""
    import torch.distributed as dist

    import symmplan

    name = dist.group.WORLD.group_name

    def gathered(x):
        return F.wait_tensor(F.all_gather_into_tensor(x * 2, world, name)) + 1

    torch._dynamo.reset()
    x = torch.full((DIM,), rank + 1.0, device="cuda")
    backend = symmplan.backend(choose="placed", timeout=60.0)
    compiled = torch.compile(gathered, backend=backend)
    for _ in range(2):
        right = torch.equal(compiled(x), gathered(x))
    placed = backend.stats.placed
    torch.cuda.synchronize()
    dist.barrier()
    backend.release()
    return right and placed > 0


TORCH = {"own": _own, "product": _product, "pipelined": _pipelined}
OURS = {"fsdp": _fsdp, "graph": _graph}


def one_after_the_other(rank, world, first, second):
    parts = {**TORCH, **OURS}
    return [parts[what](rank, world) for what in (first, second, first)]


@pytest.mark.parametrize("ours", [pytest.param("fsdp", marks=pytest.mark.first), "graph"])
@pytest.mark.parametrize("others", list(TORCH))
@pytest.mark.parametrize("turn", [1, -1], ids=["symmplan last", "symmplan first"])
def test_each_runs_as_alone(ours, others, turn):
    order = (others, ours)[::turn]
    with ranks_on(2, timeout=120) as pool:
        for found in pool.run(one_after_the_other, *order):
            assert found == [True] * 3
