"""Graphs of many shapes, as a server has them: what they take together."""

from __future__ import annotations

import functools

import pytest
import torch

import symmplan

F = torch.ops._c10d_functional
WIDTH = 64


def decoded(shapes):
    """A graph for each number of tokens; each adds up over all ranks twice."""
    import torch.distributed as dist

    torch._dynamo.reset()
    group, weight = dist.group.WORLD.group_name, torch.randn(WIDTH, WIDTH)

    def step(x):
        for _ in range(2):
            x = x + F.wait_tensor(F.all_reduce(x @ weight, "sum", group))
        return x

    backend = symmplan.backend(inner="eager")
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=400):
        for tokens in shapes:
            compiled(torch.zeros(tokens, WIDTH))


@pytest.mark.parametrize(
    "shapes",
    [(512, 64, 8, 1), pytest.param(range(512, 312, -1), marks=pytest.mark.further)],
    ids=len,
)
def test_all_shapes_take_what_the_largest_takes(shapes):
    report = symmplan.simulate(functools.partial(decoded, shapes), ranks=8, memory="cuda")
    assert len(report.plans) == len(shapes)
    assert report.peak_bytes == 512 * WIDTH * 4
    ((found,),) = [{(c.op, c.algorithm) for c in report.collectives}]
    assert found == ("symmplan::kernel_all_reduce_", "symmetric")
