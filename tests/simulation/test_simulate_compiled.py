"""Compiled graphs in a world that is not there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import symmplan


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


@pytest.mark.parametrize("memory", ["nccl", "shm"])
@pytest.mark.parametrize("backward", [False, True])
def test_collectives_of_a_compiled_graph_may_be_placed(memory, backward):
    torch._dynamo.reset()
    report = symmplan.simulate(lambda: _compiled(backward), ranks=4, memory=memory)
    (plan,) = report.plans
    whole = 4 * 16 * 32 * 4
    assert plan.peak_bytes == 2 * whole, "what is gathered, and what is scattered"
    assert report.ordinary_bytes.total < 4 * whole, "what is placed lies there alone"
