"""Eager sessions on two real ranks: results, plans as FX makes them, faults, release."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=120.0) as ranks:
        ranks.run(_setup)
        yield ranks


_GROUPS: list[str] = []


def _setup(rank, world_size):
    import custom_ops
    import torch.distributed as dist

    custom_ops.load()
    second = dist.new_group([0, 1])
    _GROUPS[:] = [dist.group.WORLD.group_name, second.group_name]


def _thin(rank, world_size):
    import torch.distributed as dist

    import symmplan

    name = dist.group.WORLD.group_name
    ops = torch.ops._c10d_functional

    def step(x):
        y = ops.wait_tensor(ops.all_gather_into_tensor(x, 2, name))
        z = ops.wait_tensor(ops.reduce_scatter_tensor(y, "sum", 2, name))
        del y
        w = z * 2
        dist.all_reduce(w)
        buffer = symmplan.empty(8, 8)
        dist.all_gather_into_tensor(buffer, w)
        m = symmplan.out(torch.mm, buffer, buffer)
        r = ops.wait_tensor(ops.all_reduce(m, "sum", name))
        return torch.ops.symmplan_test.peer_mean(r, name) + 1

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    expected = step(x)
    with symmplan.eager(timeout=20.0) as session:
        for _ in range(4):
            got = step(x.clone())
            torch.testing.assert_close(got, expected)
            session.step()
        stats = session.stats
        text = [str(c) for c in session.copies]
        session.plan.verify()
    again = step(x)
    torch.testing.assert_close(again, expected)
    return str(stats), text, session.plan.fingerprint


def test_thin(pool):
    first, second = pool.run(_thin)
    assert first == second
    print(first)
