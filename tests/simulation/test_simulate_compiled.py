"""Compiled graphs in a world that is not there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import symmplan

MEMORIES = ["nccl", pytest.param("shm", marks=pytest.mark.further)]


def _compiled(backward):
    """A graph whose collectives run in placements, three times."""
    ops = torch.ops._c10d_functional
    name, size = dist.group.WORLD.group_name, dist.get_world_size()

    def model(x, weight):
        whole = ops.wait_tensor(ops.all_gather_into_tensor(x @ weight, size, name))
        part = ops.wait_tensor(ops.reduce_scatter_tensor(whole * 2, "sum", size, name))
        return ops.wait_tensor(ops.all_reduce(part, "sum", name))

    backend = symmplan.backend(inner="eager", choose="symmetric")
    compiled = torch.compile(model, backend=backend)
    weight = torch.randn(32, 32, requires_grad=backward)
    for _ in range(3):
        found = compiled(torch.randn(16, 32), weight)
        if backward:
            found.sum().backward()


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("backward", [False, True])
def test_collectives_of_a_compiled_graph_may_be_placed(memory, backward):
    torch._dynamo.reset()
    report = symmplan.simulate(lambda: _compiled(backward), ranks=4, memory=memory)
    (plan,) = report.plans
    whole = 4 * 16 * 32 * 4
    assert plan.peak_bytes == 2 * whole, "what is gathered, and what is scattered"
    assert report.ordinary_bytes.total < 4 * whole, "what is placed lies there alone"


class _Gathered(torch.autograd.Function):
    """What is gathered is saved for backward, which scatters the gradient's sum."""

    @staticmethod
    def forward(ctx, shard, group, size):
        ctx.group, ctx.size = group, size
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_gather_into_tensor(shard * 1, size, group))

    @staticmethod
    def backward(ctx, grad):
        ops = torch.ops._c10d_functional
        part = ops.reduce_scatter_tensor(grad.contiguous(), "sum", ctx.size, ctx.group)
        return ops.wait_tensor(part), None, None


def _saving():
    name, size = dist.group.WORLD.group_name, dist.get_world_size()

    def loss(x, shard):
        whole = _Gathered.apply(shard, name, size)
        return ((x @ whole).relu() @ whole.t()).sin().sum()

    compiled = torch.compile(loss, backend=symmplan.backend(inner="eager", choose="symmetric"))
    shard = torch.randn(8, 32, requires_grad=True)
    for _ in range(3):
        compiled(torch.randn(16, 32), shard).backward()


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_is_gathered_may_be_saved_for_backward(memory):
    torch._dynamo.reset()
    (plan,) = symmplan.simulate(_saving, ranks=4, memory=memory).plans
    assert plan.peak_bytes >= 4 * 8 * 32 * 4, "what is gathered is placed"


def _pinning():
    name, size = dist.group.WORLD.group_name, dist.get_world_size()

    class Layer(torch.nn.Linear):
        def forward(self, x):
            ops = torch.ops._c10d_functional
            return (
                x @ ops.wait_tensor(ops.reduce_scatter_tensor(self.weight, "sum", size, name)).t()
            )

    backend = symmplan.backend(inner="eager", choose="symmetric", bind=True)
    compiled = torch.compile(Layer(32, 32), backend=backend)
    with torch.no_grad():
        for _ in range(3):
            compiled(torch.randn(16, 32))
    assert (backend.stats.missed, backend.staged()) == (0, ())


@pytest.mark.parametrize("memory", MEMORIES)
def test_pinned_inputs_have_no_addresses_to_look_at(memory):
    torch._dynamo.reset()
    plans = symmplan.simulate(_pinning, ranks=4, memory=memory).plans
    assert [b.persistent for b in plans[-1].problem.buffers] == [True]
    assert plans[-1].peak_bytes == 32 * 32 * 4
