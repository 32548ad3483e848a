"""Declared ops that write views of tensors whose other views are read later."""

from __future__ import annotations

import functools

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks

TURNS = 4


def _sum_(x, group_name):
    """Each rank's tensor becomes the sum of all ranks' tensors."""
    import torch.distributed as dist

    import symmplan
    from symmplan.memory import locate

    group = dist.distributed_c10d._resolve_process_group(group_name)
    if locate(x) is None:
        total = x.contiguous()
        dist.all_reduce(total, group=group)
        x.copy_(total)
        return
    placed = symmplan.placed.handle(x, group_name)
    placed.barrier()
    total = sum(placed.peer(i).clone() for i in range(placed.world_size))
    placed.barrier()
    x.copy_(total)


@functools.cache
def _op():
    import symmplan

    op = torch.library.custom_op("symmplan_views::sum_", _sum_, mutates_args=("x",), schema=_SCHEMA)
    op.register_fake(lambda *_: None)
    facts = {"group": "group_name", "handshake": True, "release": True}
    symmplan.register_symm_mem_args("symmplan_views::sum_", ["x"], **facts)


_SCHEMA = "(Tensor(a!) x, str group_name) -> ()"


def _load(rank, world_size):
    _op()


two = pool_of(2, setup=_load, timeout=200.0)


def _written(x):
    torch.ops.symmplan_views.sum_(x, "0")


def rows(a):
    whole = torch.ones(8, 8) * a
    _written(whole[:4])
    return whole[:4] * 1


def rows_of_cat(a):
    whole = torch.cat([torch.ones(4, 8) * a, torch.ones(4, 8)])
    _written(whole[4:])
    return whole * 1


def reshaped(a):
    whole = torch.ones(4, 8) * a
    _written(whole.view(8, 4))
    return whole * 1


def overlapping(a):
    whole = torch.cumsum(torch.ones(8, 8) * a, 0)
    before = whole + 1
    _written(whole[:4])
    _written(whole[2:6])
    return whole + before


def turned(a):
    whole = torch.cat([torch.ones(4, 8) * a, torch.ones(4, 8) * a])
    before = whole.sum()
    _written(whole[:4].t())
    return whole.t() + before


def strided(a):
    whole = torch.cumsum(torch.ones(8, 8) * a, 1)
    _written(whole[::2, 1:5])
    after = whole.sin()
    _written(whole)
    return after + whole[1]


def of_an_input(a):
    grown = a.expand(8, 8).contiguous()
    _written(grown[3])
    _written(a)
    return grown.diagonal() + a


def as_strided(a):
    whole = torch.ones(8, 8) * a
    _written(whole.as_strided((4, 4), (8, 1), 12))
    return whole.flip(0)


PROGRAMS = [rows, rows_of_cat, reshaped, overlapping, turned, strided, of_an_input, as_strided]


def _inputs(rank, turn):
    return torch.arange(1.0, 9.0) * (rank + 1) + turn


def _eager(rank, world_size, names, options):
    import symmplan
    from symmplan.coordination.own import own_work

    served = []
    for name in names:
        program = globals()[name]
        with symmplan.eager(timeout=30.0, memory="shm", **options) as session:
            for turn in range(TURNS):
                mine, other = _inputs(rank, turn), _inputs(rank, turn)
                got = program(mine)
                with own_work:
                    want = program(other)
                assert torch.equal(got, want), (name, turn, got, want)
                assert torch.equal(mine, other), (name, turn)
                del got, mine
                session.step()
            served.append(session.stats.served)
    return served


def _compiled(rank, world_size, names, inner):
    import symmplan

    placed = []
    for name in names:
        program = globals()[name]
        torch._dynamo.reset()
        backend = symmplan.backend(inner, memory="shm", timeout=30.0)
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        for turn in range(TURNS):
            mine, other = _inputs(rank, turn), _inputs(rank, turn)
            got, want = compiled(mine), program(other)
            torch.testing.assert_close(got, want)
            assert torch.equal(mine, other), (name, turn)
        placed.append(backend.stats.unplanned)
        backend.release()
    return placed


def _names():
    return [program.__name__ for program in PROGRAMS]


@pytest.mark.further
def test_sessions_write_views(two):
    assert all(min(served) >= TURNS - 1 for served in two.run(_eager, _names(), {}))


@pytest.mark.further
def test_sessions_write_views_without_races(two):
    two.run(_eager, _names(), {"debug": True})


@pytest.mark.further
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_graphs_write_views(two, inner):
    assert two.run(_compiled, _names(), inner) == [[0] * len(PROGRAMS)] * 2
