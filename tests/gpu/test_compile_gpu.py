"""Compiled graphs on CUDA devices: results, and which kernels the collectives really run."""

from __future__ import annotations

import pytest
import torch
from devices import needs_devices, ranks_on
from torch.distributed import _symmetric_memory

pytestmark = needs_devices()


def _model(x, w, group):
    ops = torch.ops._c10d_functional
    hidden = torch.relu(x @ w)
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(hidden, 2, group))
    product = gathered @ w
    part = ops.wait_tensor(ops.reduce_scatter_tensor(product, "sum", 2, group))
    total = ops.wait_tensor(ops.all_reduce(torch.sin(part), "sum", group))
    again = ops.wait_tensor(ops.all_gather_into_tensor(total.float(), 2, group))
    return again.sum(), part + 1


def _begin(rank, seed):
    """The rank's device and the group of all, nothing compiled yet."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    torch._dynamo.reset()
    torch.manual_seed(seed)
    return torch.device("cuda", torch.cuda.current_device()), dist.group.WORLD.group_name


def _run(rank, world_size, memory, inner):
    import torch.distributed as dist

    import symmplan

    device, group = _begin(rank, rank)
    x = torch.randn(2048, 1024, device=device, dtype=torch.bfloat16) / 32
    torch.manual_seed(7)
    w = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16) / 32
    expected = _model(x, w, group)
    backend = symmplan.backend(inner=inner, memory=memory, timeout=60.0, choose="placed")
    compiled = torch.compile(_model, backend=backend, fullgraph=True)
    for _ in range(3):
        got = compiled(x, w, group)
    torch.testing.assert_close(got[1].float(), expected[1].float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got[0], expected[0], rtol=2e-2, atol=1.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(x, w, group)
        torch.cuda.synchronize()
    (plan,) = backend.plans
    plan.verify()
    kernels = sorted({e.name for e in profile.events() if "nccl" in e.name or "PtoP" in e.name})
    stats = backend.stats
    dist.barrier()
    backend.release()
    return {
        "kernels": kernels,
        "stats": stats,
        "peak": plan.peak_bytes,
        "bound": plan.lower_bound_bytes,
        "fingerprint": plan.fingerprint,
    }


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_nccl_runs_its_symmetric_kernels_in_placements(inner):
    with ranks_on(2, timeout=280.0) as pool:
        first, second = pool.run(_run, "nccl", inner)
    print(first)
    assert first["fingerprint"] == second["fingerprint"]
    assert first["peak"] == first["bound"]
    assert first["stats"].rendezvous == 1
    assert any("ncclSymk" in name for name in first["kernels"]), first["kernels"]
    assert not any("AllGather_RING" in name for name in first["kernels"]), first["kernels"]


def _two_gathers(x, w, group):
    ops = torch.ops._c10d_functional
    first = ops.all_gather_into_tensor(x * 2, 2, group)
    second = ops.all_gather_into_tensor(x * 3, 2, group)
    one = ops.wait_tensor(first)[: w.shape[0]] @ w
    for _ in range(8):
        one = one @ w
    return one, ops.wait_tensor(second) + 1


def _overlapped(rank, world_size, inner):
    """Whether matrix products ran while the second gather did, and the results."""
    import torch.distributed as dist

    import symmplan

    device, group = _begin(rank, 7)
    w = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) / 2048**0.5
    x = torch.randn(65536, 2048, device=device, dtype=torch.bfloat16)
    expected = _two_gathers(x, w, group)
    backend = symmplan.backend(inner=inner, memory="nccl", timeout=60.0, choose="placed")
    compiled = torch.compile(_two_gathers, backend=backend, fullgraph=True)
    for _ in range(3):
        got = compiled(x, w, group)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(x, w, group)
        torch.cuda.synchronize()
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in profile.events()]
    moves = [s for s in spans if "nccl" in s[0] or "PtoP" in s[0]]
    products = [s for s in spans if "gemm" in s[0].lower() or "nvjet" in s[0].lower()]
    last = max(end for _, _, end in moves)
    stats = backend.stats
    dist.barrier()
    backend.release()
    return {
        "early": sum(start < last for _, start, _ in products),
        "products": len(products),
        "moves": [(name, end - start) for name, start, end in moves],
        "stats": stats,
    }


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_the_wait_for_one_gather_does_not_wait_for_the_next(inner):
    with ranks_on(2, timeout=280.0) as pool:
        first, _ = pool.run(_overlapped, inner)
    print(first)
    assert first["products"] == 9
    assert first["early"] >= 2  # they began before the second gather had ended
    assert first["stats"].placed == 4


def _chosen(rank, world_size):
    """Results and what was measured, with every collective timed both ways."""
    import torch.distributed as dist

    import symmplan

    device, group = _begin(rank, rank)
    x = torch.randn(2048, 1024, device=device, dtype=torch.bfloat16) / 32
    w = torch.eye(1024, device=device, dtype=torch.bfloat16)
    expected = _model(x, w, group)
    backend = symmplan.backend(memory="nccl", timeout=60.0)
    got = torch.compile(_model, backend=backend, fullgraph=True)(x, w, group)
    torch.testing.assert_close(got[1].float(), expected[1].float(), rtol=2e-2, atol=2e-2)
    stats, choices = backend.stats, backend.choices
    reasons = [u.reason for p in backend.plans for u in p.unplanned]
    dist.barrier()
    backend.release()
    return choices, stats, reasons


def test_ranks_choose_alike_by_measurement():
    with ranks_on(2, timeout=280.0) as pool:
        first, second = pool.run(_chosen)
    print(first)
    assert first == second
    choices, stats, reasons = first
    assert len(choices) >= 3
    left = [c for c in choices if not c.placed]
    assert sum("symmetric memory was not clearly faster" in r for r in reasons) >= len(left)
    assert (stats.placed > 0) == (len(left) < len(choices))


def _graphed(rank, world_size):
    import torch.distributed as dist

    import symmplan

    device, group = _begin(rank, 7)
    w = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16) / 32
    backend = symmplan.backend(memory="nccl", timeout=60.0, choose="placed")
    compiled = torch.compile(_model, backend=backend, fullgraph=True, mode="reduce-overhead")
    for turn in range(6):
        x = torch.randn(2048, 1024, device=device, dtype=torch.bfloat16) / 32
        expected = _model(x, w, group)
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(x, w, group)
        torch.testing.assert_close(
            got[1].float(),
            expected[1].float(),
            rtol=2e-2,
            atol=2e-2,
            msg=lambda m, t=turn: f"{t}: {m}",
        )
    stats = backend.stats
    torch.cuda.synchronize()
    dist.barrier()
    backend.release()
    return stats


def test_cuda_graphs_use_the_segments_where_they_lie():
    with ranks_on(2, timeout=280.0) as pool:
        first, second = pool.run(_graphed)
    assert first == second
    assert first.rendezvous == 1


def _pads(x, group):
    ops = torch.ops.symm_mem
    y = ops.one_shot_all_reduce(x * 2, "sum", group)
    z = ops.two_shot_all_reduce_(y.sin(), "sum", group)
    return ops.one_shot_all_reduce_out(z + 1, "sum", group, torch.empty_like(x))


def _one_sided(x, group):
    """Puts into peers' placements, twice into the same bytes."""
    ops = torch.ops.symm_mem
    for _ in range(2):
        received = torch.empty_like(x)
        ops.nvshmem_all_to_all(x * 2, received, group)
        x = received.sin()
    x = x + 1
    ops.nvshmem_broadcast(x, 1, group)
    return x * 3


def _one_sided_plainly(x):
    import torch.distributed as dist

    for _ in range(2):
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x * 2)
        x = received.sin()
    x = x + 1
    dist.broadcast(x, 1)
    return x * 3


def _with_pads(rank, world_size, memory, inner):
    import torch.distributed as dist

    import symmplan

    device, group = _begin(rank, rank)
    x = torch.randn(256, 256, device=device)
    total = x * 2
    dist.all_reduce(total)
    expected = total.sin()
    dist.all_reduce(expected)
    expected += 1
    dist.all_reduce(expected)
    backend = symmplan.backend(inner=inner, memory=memory, timeout=60.0)
    compiled = torch.compile(_pads, backend=backend, fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, group), expected, rtol=1e-4, atol=1e-4)
    stats = backend.stats
    if memory == "nvshmem":
        exact = _one_sided_plainly(x)
        compiled = torch.compile(_one_sided, backend=backend, fullgraph=True)
        for step in range(20):
            got = compiled(x + step, group)
            assert step or torch.equal(got, exact)
            torch.testing.assert_close(got, _one_sided_plainly(x + step))
        assert backend.stats.placed > stats.placed
    dist.barrier()
    backend.release()
    return stats


@pytest.mark.parametrize("memory", ["cuda", "nvshmem"])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_ops_of_torch_symmetric_memory_run_in_placements(inner, memory):
    if memory == "nvshmem" and not _symmetric_memory.is_nvshmem_available():
        pytest.skip("this torch has no NVSHMEM")
    with ranks_on(2, timeout=280.0) as pool:
        first, second = pool.run(_with_pads, memory, inner)
    assert first == second
    assert first.bound >= 3
    assert first.unplanned <= 1  # what the last writes may be ordinary memory


class _Sharded(torch.nn.Module):
    """Linear layers that have a part of their weight and gather the whole when they run."""

    def __init__(self, rank, device, group):
        super().__init__()
        torch.manual_seed(rank)
        self.group = group
        self.parts = torch.nn.ParameterList(
            torch.randn(512, 1024, device=device, dtype=torch.bfloat16) / 32 for _ in range(4)
        )

    def forward(self, x):
        for part in self.parts:
            x = torch.relu(x @ _GatherWeight.apply(part, self.group))
        return x.float().square().mean()


class _GatherWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_gather_into_tensor(part, 2, group))

    @staticmethod
    def backward(ctx, grad):
        ops = torch.ops._c10d_functional
        part = ops.reduce_scatter_tensor(grad.contiguous(), "sum", 2, ctx.group)
        return ops.wait_tensor(part), None


def _bound(rank, world_size, mode):
    """Losses with parameters kept in symmetric memory and without, kernels, and what was copied."""
    import torch.distributed as dist

    import symmplan
    from symmplan.memory import locate

    device, group = _begin(rank, 11)
    x = torch.randn(256, 1024, device=device, dtype=torch.bfloat16)
    backend = symmplan.backend(memory="nccl", timeout=60.0, choose="placed", bind=True)
    losses = []
    for compiled in (False, True):
        model = _Sharded(rank, device, group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=True)
        run_it = torch.compile(model, backend=backend, mode=mode) if compiled else model
        found = []
        for _ in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            loss = run_it(x)
            loss.backward()
            optimizer.step()  # in place, at once: peers must have read
            optimizer.zero_grad()  # the gradients are those of a CUDA graph
            found.append(float(loss))
        losses.append(found)
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=1e-4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.compiler.cudagraph_mark_step_begin()
        run_it(x).backward()
        torch.cuda.synchronize()
    names = sorted({e.name for e in profile.events() if "nccl" in e.name or "Memcpy" in e.name})
    placed = [locate(p) is not None for p in model.parameters()]
    stats, staged = backend.stats, backend.staged()
    dist.barrier()
    backend.release()
    moved_back = [locate(p) is None for p in model.parameters()]
    run_eagerly = float(model(x))
    return losses, names, placed, stats, staged, moved_back, run_eagerly == run_eagerly


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_parameters_are_gathered_where_they_live(mode):
    with ranks_on(2, timeout=280.0) as pool:
        first, second = pool.run(_bound, mode)
    print(first)
    names, placed, stats, staged, moved_back, finite = first[1:]
    assert stats == second[3]
    assert all(placed)
    assert all(moved_back)
    assert finite
    assert (stats.kept, stats.missed) == (4, 0)
    assert not any("outside" in row[3] for row in staged)
    assert any("ncclSymk" in name or "PtoP" in name for name in names), names
    assert not any("AllGather_RING" in name for name in names), names


def _odd(rank, world_size, numel, inner):
    """Gathers of 16-bit numbers, so many on each rank: whether the bits are right, and counts."""
    import torch.distributed as dist

    import symmplan

    device, group = _begin(rank, rank)
    x = torch.randn(numel, device=device, dtype=torch.bfloat16)

    def program(x):
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_gather_into_tensor(x * 2, world_size, group)) * 3

    expected = program(x)
    backend = symmplan.backend(inner=inner, memory="nccl", timeout=60.0, choose="placed")
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    equal = all(torch.equal(compiled(x), expected) for _ in range(3))
    stats = backend.stats
    dist.barrier()
    backend.release()
    return equal, stats.placed, stats.unplanned


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_gathers_of_parts_that_are_not_whole_words_are_right(inner):
    """NCCL 2.28.9's symmetric kernel would write wrong bytes."""
    with ranks_on(2, timeout=280.0) as pool:
        for numel, placed in ((297, False), (298, True), (4097, False), (4096, True)):
            for equal, found, left_out in pool.run(_odd, numel, inner):
                assert equal
                assert (found, left_out) == ((2, 0) if placed else (0, 2))
