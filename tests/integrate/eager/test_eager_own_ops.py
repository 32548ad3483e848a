"""Ops that read their peers' memory by themselves, in eager sessions: while recording, too."""

from __future__ import annotations

import functools

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks


_LIBRARIES: list[torch.library.Library] = []


def _setup(rank, world_size):
    """Ops that refuse ordinary memory, and one of torch's as devices have it."""
    import symmplan
    from symmplan.place.algorithms import Lowerings

    library = torch.library.Library("symmplan_strict", "DEF")
    library.define("mean(Tensor x, str group_name) -> Tensor")
    library.define("bump_(Tensor(a!) x, Tensor y, str group_name) -> ()")
    library.impl("mean", _mean, "CPU")
    library.impl("bump_", _bump, "CPU")
    symmplan.register_symm_mem_args("symmplan_strict::mean", ["x"], handshake=False, release=False)
    symmplan.register_symm_mem_args("symmplan_strict::bump_", ["x", "y"])
    kernel = torch.library.Library("symm_mem", "IMPL")
    kernel.impl("one_shot_all_reduce", _one_shot, "CPU")
    _LIBRARIES[:] = [library, kernel]
    refuses = Lowerings.skip

    def skip(self, spec, group, requirement):
        return None if spec.op.startswith("symm_mem::") else refuses(self, spec, group, requirement)

    Lowerings.skip = skip


pool = pool_of(2, setup=_setup, timeout=120.0)


def _peers(x):
    import symmplan

    placed = symmplan.placed.handle(x)  # raises if it is not symmetric
    return placed, [placed.peer(r) for r in range(placed.world_size)]


def _mean(x, _group):
    return functools.reduce(torch.add, _peers(x)[1]) / 2


def _bump(x, y, _group):
    placed, _ = _peers(x)
    others = _peers(y)[1]
    placed.barrier()
    x.add_(others[1 - placed.rank])
    placed.barrier()


def _one_shot(x, reduce_op, _group):
    assert reduce_op == "sum"
    placed, peers = _peers(x)
    placed.barrier()
    total = functools.reduce(torch.add, peers)
    placed.barrier()
    return total


def _program(rank, world_size, memory_of):
    import torch.distributed as dist

    import symmplan

    name = dist.group.WORLD.group_name
    strict = torch.ops.symmplan_strict
    x = torch.full((16, 8), float(rank))

    def make(fn, *args):
        return symmplan.placed.out(fn, *args) if memory_of == "out" else fn(*args)

    with symmplan.eager(timeout=20.0, memory="shm", debug=True) as session:
        for turn in range(4):
            a = make(torch.add, x, float(turn))
            b = strict.mean(a, name)
            del a
            c, d = make(torch.add, b, float(rank)), make(torch.add, x, 1.0)
            strict.bump_(c, d, name)
            e = torch.ops.symm_mem.one_shot_all_reduce(c, "sum", name)
            del c, d
            assert bool((b == turn + 0.5).all()), (turn, b)
            assert bool((e == 2 * (turn + 0.5) + 1 + 3).all()), (turn, e)
            session.step()
        stats = session.stats
    return stats.served, stats.bound, stats.staged, stats.rendezvous


@pytest.mark.parametrize("memory_of", ["out", "anywhere"])
def test_ops_get_symmetric_memory_in_every_iteration(pool, memory_of):
    first, second = pool.run(_program, memory_of)
    assert first == second
    served, bound, staged, rendezvous = first
    assert served == 9
    assert bound + staged == 4
    assert (staged == 0) == (memory_of == "out")
    assert rendezvous >= 1


def _leak(rank, world_size):
    import torch.distributed as dist

    import symmplan
    from symmplan.process import PROCESS

    name = dist.group.WORLD.group_name
    x = torch.ones(16, 8)
    counts = []
    with symmplan.eager(timeout=20.0, memory="shm") as session:
        for _ in range(3):
            torch.ops.symmplan_strict.mean(x + 1, name)
        counts.append(len(PROCESS.segments))
        session.step()
        counts.append(len(PROCESS.segments))
    with pytest.raises(ValueError, match="lies in no live segment"):
        torch.ops.symmplan_strict.mean(x, name)
    return [*counts, len(PROCESS.segments), len(session.plan.segments)]


def test_scratch_ends_with_the_recording(pool):
    first, second = pool.run(_leak)
    assert first == second == [1, 1, 0, 1]


def _shared_later(rank, world_size):
    """What is written is another argument, too, but only in the third iteration."""
    import torch.distributed as dist

    import symmplan
    from symmplan.errors import RunError

    name = dist.group.WORLD.group_name
    x, y = torch.full((8,), float(rank)), torch.ones(8)
    try:
        with symmplan.eager(timeout=20.0) as session:
            for turn in range(3):
                torch.ops.symmplan_strict.bump_(x, x if turn == 2 else y, name)
                session.step()
    except RunError as error:
        return turn, float(x[0]), error.op, "share memory as in" in error.what
    return None


@pytest.mark.further
def test_arguments_that_share_memory_later_end_the_session_before_anything_is_written(pool):
    found = pool.run(_shared_later)
    assert found == [(2, rank + 2.0, "symmplan_strict::bump_", True) for rank in range(2)]
