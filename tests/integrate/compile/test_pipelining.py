"""Products under their collectives: the results of the plain program, forward and backward."""

from __future__ import annotations

import pytest
import torch
from parallel_blocks import blocks, late, shards, trained
from ranks import pool_of

import symmplan

pytestmark = pytest.mark.ranks

ranks = pool_of(2, 4, timeout=280.0)
pair = pool_of(2, timeout=280.0)


def _train(rank, world, dim, inner, choose, collectives="auto"):
    import torch.distributed as dist

    torch._dynamo.reset()
    mesh = dist.init_device_mesh("cpu", (world,))
    model = blocks(mesh, dim)
    backend = symmplan.backend(
        inner=inner, choose=choose, collectives=collectives, timeout=60.0, debug="poison"
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    try:
        for step in range(3):
            x = shards(rank, world, dim, step)
            expected = trained(model, model, x)
            late(rank, step)
            got = trained(model, compiled, x)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        ops = [site.op for plan in backend.plans for site in plan.problem.operations]
        return {
            "fingerprints": [p.fingerprint for p in backend.plans],
            "shifts": sum("shift" in op for op in ops),
            "placed": backend.stats.placed,
            "plain": backend.stats.plain,
            "left": sorted({u.reason for p in backend.plans for u in p.unplanned}),
        }
    finally:
        dist.barrier()
        backend.release()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_in_parts_compute_what_they_compute(ranks, dim, inner):
    first, *others = ranks.run(_train, dim, inner, "pipelined")
    assert all(other == first for other in others)
    print(first)
    assert first["shifts"]
