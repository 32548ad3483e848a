"""`CompileBackend.sleep` and `wake`: graphs stay compiled, and nothing is held meanwhile."""

from __future__ import annotations

import gc

import pytest
import torch
from doubles import on_devices, state
from held import segments_of_plans
from ranks import pool_of

import symmplan
from symmplan.errors import BackendError, RunError
from symmplan.memory.backends import shm
from symmplan.process import PROCESS

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=120.0)

F = torch.ops._c10d_functional


class Gather(torch.autograd.Function):
    """An all-gather whose backward reduces and scatters, and which saves what it has gathered."""

    @staticmethod
    def forward(ctx, x):
        world = torch.distributed.group.WORLD
        ctx.size, ctx.name = world.size(), world.group_name
        return F.wait_tensor(F.all_gather_into_tensor(x, ctx.size, ctx.name))

    @staticmethod
    def backward(ctx, grad):
        return F.wait_tensor(F.reduce_scatter_tensor(grad, "sum", ctx.size, ctx.name))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 8 * 8).view(8, 8))

    def forward(self, x):
        return Gather.apply(x @ self.weight).sin()


def _step(layer, turn, rank):
    """One forward, or two before the first backward: what the first one saved makes room."""
    layer.zero_grad()
    losses = [
        layer(torch.full((4, 8), 1.0 + turn + rank + more)).square().sum()
        for more in range(1 + (turn % 3 == 2))
    ]
    loss = sum(losses)
    loss.backward()
    return loss.item(), layer.weight.grad.clone()


def _same(left, right):
    """Inductor's sums may be in another order."""
    pairs = zip(left, right, strict=True)
    return all(torch.allclose(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def _turns(rank, world, inner, wakes, choose="placed", **options):
    torch._dynamo.reset()
    layer = Layer()
    expected = [_step(layer, turn, rank) for turn in range(8)]
    backend = symmplan.backend(inner=inner, timeout=30.0, choose=choose, **options)
    compiled, wrong = torch.compile(layer, backend=backend), []
    backend.sleep()  # nothing is compiled yet
    backend.wake()
    for turn in range(8):
        if not _same(_step(compiled, turn, rank), expected[turn]):
            wrong.append(turn)
        if turn % 2:
            had = backend.stats
            backend.sleep()
            backend.sleep()
            gc.collect()
            assert backend.asleep
            assert backend.stats.segment_bytes == 0 < had.segment_bytes
            assert not segments_of_plans()
            assert not PROCESS.engines_made
            if wakes:
                backend.wake()
                backend.wake()
                assert not backend.asleep
                assert backend.stats.segment_bytes == had.segment_bytes
    stats, plans = backend.stats, [plan.fingerprint for plan in backend.plans]
    backend.release()  # asleep or not
    return wrong, stats, plans


@pytest.mark.further
@pytest.mark.parametrize("wakes", [False, True])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_graphs_run_on_in_new_memory(two, inner, wakes):
    results = two.run(_turns, inner, wakes)
    for wrong, stats, plans in results:
        assert wrong == []
        assert stats.sleeps == 4
        assert stats.graphs == 1
        assert stats.rendezvous == 1 + 3 + wakes
        assert plans == results[0][2]


def _on_devices(rank, world, memory, choose):
    def run(rank, world):
        torch.distributed.all_reduce(torch.ones(1))  # the program's communicator is there before
        had = state().device.taken["communicators"]
        wrong, stats, _ = _turns(rank, world, "eager", False, choose, memory=memory)
        gc.collect()
        copies = sum("PtoP" in name for name in state().kernels)
        more = state().device.taken["communicators"] - had
        return wrong, stats, state().device.segments, more, copies

    return on_devices(rank, world, run)


@pytest.mark.parametrize(
    ("memory", "choose"), [("nccl", "placed"), ("nccl", "copy engine"), ("cuda", "placed")]
)
def test_graphs_on_devices_give_segments_and_communicators_back(two, memory, choose):
    for wrong, stats, *nbytes, copies in two.run(_on_devices, memory, choose):
        assert wrong == []
        assert stats.sleeps == 4
        assert nbytes == [0, 0]
        assert (copies > 8) == (choose == "copy engine")  # also after it slept


def _refused(rank, world):
    """One rank alone has a graph that is alive."""
    torch._dynamo.reset()
    layer = Layer()
    backend = symmplan.backend(inner="eager", timeout=30.0, choose="placed")
    compiled = torch.compile(layer, backend=backend)
    _step(compiled, 0, rank)
    kept = [compiled(torch.ones(4, 8)).sum()]
    if rank:
        kept.clear()
    with pytest.raises(RunError, match="between a compiled forward and its backward") as caught:
        backend.sleep()
    asleep = backend.asleep
    kept.clear()
    (shared,) = backend._pool._shared.values()
    shared.captured += [shared.arena] * (rank == 0)  # as where a CUDA graph was captured
    with pytest.raises(RunError, match="a captured CUDA graph has addresses"):
        backend.sleep()
    shared.captured.clear()
    backend.sleep()
    right = backend.asleep, _same(_step(compiled, 3, rank), _step(layer, 3, rank))
    backend.release()
    return str(caught.value), asleep, right


def test_nobody_sleeps_while_a_rank_has_saved_tensors(two):
    results = two.run(_refused)
    for said, asleep, right in results:
        assert said == results[0][0]
        assert not asleep
        assert right == (True, True)


def _no_room(rank, world):
    torch._dynamo.reset()
    layer, wrong = Layer(), []
    expected = [_step(layer, turn, rank) for turn in range(4)]
    backend = symmplan.backend(inner="eager", timeout=30.0, choose="placed")
    compiled, allocate = torch.compile(layer, backend=backend), shm.ShmBackend.allocate

    def full(*args, **kwargs):
        raise BackendError("no memory is left", fix="wait")

    try:
        for turn in range(4):
            if not _same(_step(compiled, turn, rank), expected[turn]):
                wrong.append(turn)
            if turn == 1:
                backend.sleep()
                if rank:
                    shm.ShmBackend.allocate = full
    finally:
        shm.ShmBackend.allocate = allocate
    reasons = backend.stats.reasons
    backend.release()
    return wrong, reasons


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_where_a_rank_cannot_have_memory_again_graphs_run_in_torchs_way(two):
    for wrong, reasons in two.run(_no_room):
        assert wrong == []
        assert any("no memory is left" in why for why, _ in reasons)
