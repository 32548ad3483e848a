"""Products under their collectives on devices, also on one that two ranks share."""

from __future__ import annotations

import pytest
import torch
from devices import SHARED, needs_devices, ranks_on
from parallel_blocks import blocks, late, shards, trained

import symmplan

pytestmark = needs_devices()

_WIDTH, _ROWS = 256, 384


def _train(rank, world, dim, inner, choose, dtype):
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    torch._dynamo.reset()
    mesh = dist.init_device_mesh("cuda", (world,))
    model = blocks(mesh, dim, width=_WIDTH, device="cuda", dtype=dtype)
    memory = "cuda" if SHARED else "auto"
    backend = symmplan.backend(inner=inner, memory=memory, choose=choose, timeout=60.0)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    close = (
        {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-4}
    )
    for step in range(4):
        x = shards(rank, world, dim, step, rows=_ROWS, width=_WIDTH).to("cuda", dtype)
        expected = trained(model, model, x)
        late(rank, step)
        if step % 2 == rank:
            torch.cuda._sleep(20_000_000)
        got = trained(model, compiled, x)
        torch.testing.assert_close(got, expected, **close)
    operations = [o.op for plan in backend.plans for o in plan.problem.operations]
    told = {
        "shifts": sum("shift" in op for op in operations),
        "rendezvous": backend.stats.rendezvous,
        "choices": [(c.op, c.seconds, c.algorithm) for c in backend.choices],
        "left": sorted({u.reason for p in backend.plans for u in p.unplanned}),
    }
    torch.cuda.synchronize()
    dist.barrier()
    backend.release()
    return told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.first)])
def test_blocks_in_parts_compute_what_they_compute(inner, dtype):
    with ranks_on(2, timeout=200.0) as pool:
        first, second = pool.run(_train, 0, inner, "pipelined", dtype)
    print(first)
    assert first["shifts"] == second["shifts"] == 8


def test_batches_are_gathered_along_their_length():
    with ranks_on(2, timeout=200.0) as pool:
        first, _ = pool.run(_train, 1, "inductor", "pipelined", torch.float32)
    assert first["shifts"] == 8


def test_what_is_measured_computes_the_same():
    with ranks_on(2, timeout=200.0) as pool:
        first, second = pool.run(_train, 0, "inductor", "measure", torch.bfloat16)
    print(*first["choices"], sep="\n")
    assert first["choices"] == second["choices"]
    assert {op for op, seconds, _ in first["choices"] if "pipelined" in seconds} == {
        "all-gather and products",
        "products and reduce-scatter",
    }


def _beside(rank, world):
    """A shift runs while a product does: neither waits for the other."""
    import torch.distributed as dist

    from symmplan.memory import realize
    from symmplan.model import Access, Buffer, Operation, Problem

    torch.cuda.set_device(rank)
    group = dist.group.WORLD.group_name
    nbytes = 64 << 20
    problem = Problem(
        buffers=(Buffer("in", nbytes, group), Buffer("out", nbytes, group)),
        operations=(Operation("all"),),
        accesses=(Access("all", "in", write=True), Access("all", "out", write=True)),
    )
    memory = "cuda" if SHARED else "nccl"
    device = torch.device("cuda", torch.cuda.current_device())
    arena = realize(symmplan.plan(problem), memory=memory, device=device)
    given, out = (arena.tensor(name).view(torch.float32) for name in ("in", "out"))
    x = torch.randn(4096, 4096, device="cuda")
    for step in range(5):
        given.fill_(10 * step + rank)
        if rank == step % world:
            torch.cuda._sleep(50_000_000)
        torch.ops.symmplan.shift_out(given, 1, world, group, out=out)
        y = x @ x
        torch.ops._c10d_functional.wait_tensor(out)
        assert (out == 10 * step + 1 - rank).all()
    del y, given, out
    torch.cuda.synchronize()
    dist.barrier()
    arena.release()


def test_a_shift_arrives_before_its_wait_ends():
    with ranks_on(2, timeout=120.0) as pool:
        pool.run(_beside)
