"""Eager sessions on CUDA devices: results, kernels, CUDA graphs, latency against plain NCCL."""

from __future__ import annotations

import pytest
import torch
from devices import needs_devices, ranks_on
from held import segments_of_plans

pytestmark = needs_devices()


def _block(x, qkv, proj, up, down, eager):
    """A transformer block without its norms' weights, heads and columns sharded over the ranks."""
    import torch.distributed as dist

    import symmplan

    tokens, width = x.shape
    make = symmplan.placed.out if eager else lambda fn, *args: fn(*args)
    h = torch.nn.functional.layer_norm(x, (width,))
    q, k, v = (h @ qkv).view(tokens, 3, -1, 64).unbind(1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    )
    part = make(torch.mm, attended.transpose(0, 1).reshape(tokens, -1), proj)
    dist.all_reduce(part)
    x = x + part
    del part
    h = torch.nn.functional.layer_norm(x, (width,))
    part = make(torch.mm, torch.nn.functional.gelu(h @ up), down)
    dist.all_reduce(part)
    return x + part


def _weights(rank, width, blocks, device):
    generator = torch.Generator(device).manual_seed(7)
    found = []
    for _ in range(blocks):
        shapes = [
            (width, 3 * width // 2),
            (width // 2, width),
            (width, 2 * width),
            (2 * width, width),
        ]
        both = [
            [
                torch.randn(s, device=device, generator=generator, dtype=torch.bfloat16)
                for s in shapes
            ]
            for _ in range(2)
        ]
        found.append([w / w.shape[0] ** 0.5 for w in both[rank]])
    return found


def _model(x, weights, eager):
    for block in weights:
        x = _block(x, *block, eager)
    return x


def _microseconds(call, repeat=30):
    for _ in range(5):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.distributed.barrier()
    begin.record()
    for _ in range(repeat):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeat * 1e3


def _infer(rank, world_size, memory, nbytes, graph):
    import symmplan

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    width = 1024
    weights = _weights(rank, width, 2, device)
    torch.manual_seed(0)
    x = torch.randn(nbytes // 2 // width, width, device=device, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = _model(x, weights, eager=False)
        plain = _microseconds(lambda: _model(x, weights, eager=False))
        with symmplan.eager(memory=memory, timeout=60.0, choose="placed") as session:
            for _ in range(3):
                got = _model(x, weights, eager=True)
                session.step()
                torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)

            def served():
                _model(x, weights, eager=True)
                session.step()

            placed = _microseconds(served)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                served()
                torch.cuda.synchronize()
            if graph:
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    got = _model(x, weights, eager=True)
                session.step()
                for _ in range(3):
                    captured.replay()
                torch.cuda.synchronize()
                torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
                placed = _microseconds(captured.replay)
                del captured
            stats = session.stats
            plan = session.plan
        del got
    kernels = sorted({e.name for e in seen.events() if "nccl" in e.name or "PtoP" in e.name})
    return {
        "plain_us": plain,
        "session_us": placed,
        "kernels": kernels,
        "staged": stats.staged,
        "bound": stats.bound,
        "rendezvous": stats.rendezvous,
        "fingerprint": plan.fingerprint,
    }


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20, 8 << 20])
def test_tensor_parallel_inference(nbytes, graph):
    with ranks_on(2, timeout=100.0) as pool:
        first, second = pool.run(_infer, "nccl", nbytes, graph)
    print(nbytes, graph, first)
    assert first["fingerprint"] == second["fingerprint"]
    assert first["staged"] == 0
    assert first["bound"] == 4
    assert first["rendezvous"] == 1
    assert any("Symk" in kernel for kernel in first["kernels"]), first["kernels"]


def _raise(fault):
    if fault == "raise":
        raise ZeroDivisionError("a fault of the program")


def _diverges(rank, world_size, fault):
    import datetime as dt

    import torch.distributed as dist

    import symmplan
    from symmplan.errors import SymmplanError

    torch.cuda.set_device(rank)
    group = dist.new_group(timeout=dt.timedelta(seconds=10))
    x = torch.ones(1 << 16, device="cuda")
    kept = []
    try:
        with symmplan.eager(group, memory="nccl", choose="placed", timeout=10.0) as session:
            for turn in range(3):
                mine = fault if rank == 1 and turn == 2 else ""
                for _ in range(2):
                    y = symmplan.placed.out(torch.mul, x, 2)
                    _raise(mine)
                    dist.all_reduce(y[:8] if mine == "shape" else y, group=group)
                    kept += [y] if mine == "keep" else []
                    total = float(y.sum())  # the host waits for the device
                    assert total == 4 * x.numel(), "a wrong number"
                    del y
                if mine == "extra":
                    dist.all_reduce(symmplan.placed.out(torch.mul, x, 2), group=group)
                session.step()
    except (SymmplanError, ZeroDivisionError):
        for tensor in kept:
            assert bool((tensor == 4).all()), "a byte that was kept has changed"
        raise


@pytest.mark.parametrize("fault", ["shape", "extra", "keep", "raise"])
def test_a_rank_that_diverges_says_so(fault):
    """Rank 0's device may wait for rank 1: then the process group's own timeout ends that."""
    with ranks_on(2, timeout=90.0) as pool:
        first, second = pool.outcomes(_diverges, fault)
    assert first.hung is None, first.describe()  # torch's watchdog may have ended its process
    assert first.error is not None or first.exitcode, first.describe()
    assert second.error is not None, second.describe()
    for error in filter(None, (first.error, second.error)):
        assert "a wrong number" not in error.text, error.traceback
    error = second.error
    if fault == "raise":
        assert "a fault of the program" in error.text, error.traceback
        return
    assert "SymmplanError" in error.kinds, error.traceback
    assert "rank 1" in error.text
    assert error.fields["op"]
    assert error.fields["buffer"] or fault == "extra"


def _again(rank, world_size, holds):
    """Three sessions, one after the other; what is held of the first stays what it was."""
    import torch.distributed as dist

    import symmplan

    torch.cuda.set_device(rank)
    made, held, wrong = [], [], 0
    for session_number in range(3):
        with symmplan.eager(memory="nccl", choose="placed", timeout=30.0) as session:
            for turn in range(3):
                x = torch.full((1 << 16,), session_number + turn + 1.0, device="cuda")
                y = symmplan.placed.out(torch.mul, x, 2)
                dist.all_reduce(y)
                wrong += not bool((y == 4 * (session_number + turn + 1)).all())
                if holds and session_number == 0 and turn == 2:
                    held.append(y)
                del y
                session.step() if turn < 2 or not held or session_number else None
        made.append(session.stats.rendezvous)
    wrong += sum(not bool((y == 12).all()) for y in held)
    return made, wrong, len(segments_of_plans())


@pytest.mark.parametrize("holds", [False, True])
def test_sessions_share_a_pool(holds):
    """A session gets the segments of one that is over, unless somebody holds a tensor of those."""
    with ranks_on(2, timeout=100.0) as pool:
        for made, wrong, segments in pool.run(_again, holds):
            assert made == ([1, 1, 0] if holds else [1, 0, 0])
            assert not wrong
            assert segments == 1
