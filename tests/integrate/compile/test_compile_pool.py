"""Several compiled graphs take turns in the same segments, which grow for those that need more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from programs import Program, make_inputs, programs, run
from ranks import pool_of

pytestmark = pytest.mark.ranks

F = torch.ops._c10d_functional
_GROUPS: list[str] = []


def _setup(rank, world_size):
    import custom_ops
    import torch.distributed as dist

    custom_ops.load()
    _GROUPS[:] = [dist.group.WORLD.group_name] * 2


pool = pool_of(2, setup=_setup, timeout=120.0)


def _several(rank, world_size, given_programs: list[Program], inner: str):
    """Run programs in turn, compiled with one backend; every result must be right."""
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner=inner, timeout=30.0, debug=inner == "eager" or "poison")
    ready = []
    for program in given_programs:
        inputs = make_inputs(program, rank)
        expected = run(program, _GROUPS, *(x.clone() for x in inputs))

        def act(*tensors, p=program):
            return run(p, _GROUPS, *tensors)

        ready.append(
            (torch.compile(act, backend=backend, fullgraph=True, dynamic=False), inputs, expected)
        )
    try:
        for turn in range(3):
            for compiled, inputs, expected in ready if turn != 1 else ready[::-1]:
                got = compiled(*(x.clone() for x in inputs))
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        torch.distributed.barrier()
        arenas = backend._pool.arenas
        return {
            "allocated": sum(a.segment_bytes for a in arenas),
            "stats": backend.stats,
            "largest": max((p.peak_bytes for p in backend.plans), default=0),
            "lost": sum(a.released for a in arenas),
        }
    finally:
        backend.release()


@pytest.mark.further
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(one=programs(groups=1), two=programs(groups=1))
def test_random_programs_take_turns(pool, one, two):
    first, second = pool.run(_several, [one, two], "eager")
    assert first == second
    assert first["allocated"] == first["largest"] == first["stats"].segment_bytes
    assert first["lost"] == 0
    assert first["stats"].rendezvous <= 2


@pytest.mark.further
def test_inductor_takes_turns(pool):
    small = Program((2,), (("gather", 0, 0), ("sin", 1)), (2,))
    large = Program((8,), (("gather", 0, 0), ("sin", 1), ("push", 2, 0), ("sin", 3)), (4,))
    first, second = pool.run(_several, [small, large], "inductor")
    assert first == second
    assert first["allocated"] == first["largest"] == first["stats"].lower_bound_bytes
    assert first["stats"].rendezvous == 2  # it grew once


def _broken_and_recompiled(rank, world_size):
    """A model with a graph break, called with three shapes: six graphs."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0)
    group = dist.group.WORLD.group_name

    def model(x):
        a = F.wait_tensor(F.all_gather_into_tensor(x.sin(), 2, group)) + 1
        torch._dynamo.graph_break()
        return F.wait_tensor(F.all_gather_into_tensor(a.cos(), 2, group)) * 2

    compiled = torch.compile(model, backend=backend, dynamic=False)
    bytes_of = []
    try:
        for rows in (4, 8, 4, 2, 8):
            x = torch.full((rows, 64), float(rank))
            torch.testing.assert_close(compiled(x), model(x))
            bytes_of.append(sum(a.segment_bytes for a in backend._pool.arenas))
        return bytes_of, backend.stats
    finally:
        backend.release()


def test_graph_breaks_and_recompilations_share_and_release(pool):
    (nbytes, stats), other = pool.run(_broken_and_recompiled)
    assert (nbytes, stats) == other
    assert nbytes == [8 << 10 >> 1, 8 << 10, 8 << 10, 8 << 10, 8 << 10]
    assert stats.graphs == 6
    assert stats.segment_bytes == 8 << 10


def _at_once(rank, world_size):
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0)
    group = dist.group.WORLD.group_name
    compiled = torch.compile(
        lambda x: F.wait_tensor(F.all_gather_into_tensor(x.sin(), 2, group)) + 1, backend=backend
    )
    try:
        compiled(torch.ones(4, 8))
        (shared,) = backend._pool._shared.values()
        shared.lock.acquire()  # as another thread would
        with pytest.raises(symmplan.errors.RunError, match="using the same segments") as caught:
            compiled(torch.ones(4, 8))
        shared.lock.release()
        compiled(torch.ones(4, 8))
        return caught.value.fix
    finally:
        backend.release()


def test_two_graphs_at_once_are_refused(pool):
    for fix in pool.run(_at_once):
        assert "a separate symmplan.backend()" in fix


def _late_reader(rank, world_size):
    """Rank 1 reads its peers' bytes late; rank 0 must not overwrite them with its next graph."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", timeout=30.0)
    late_sum = torch.ops.symmplan_test.late_sum
    group = dist.group.WORLD.group_name
    first = torch.compile(lambda x: late_sum(x * 1, group) + 1, backend=backend)
    second = torch.compile(
        # Meets all ranks before and after by itself, but what it is given is written before.
        lambda x: F.wait_tensor(F.reduce_scatter_tensor(x * 100, "sum", 2, group)) + 1,
        backend=backend,
    )
    x = torch.full((8,), 1.0 + rank)
    found = []
    try:
        for _ in range(2):
            found += [first(x)[0].item(), second(x)[0].item()]
        return found, backend.stats.segment_bytes, backend.stats.bound
    finally:
        dist.barrier()
        backend.release()


@pytest.mark.long
def test_peers_have_read_before_the_next_graph_writes(pool):
    for found, nbytes, bound in pool.run(_late_reader):
        assert found == [4.0, 301.0] * 2
        assert (nbytes, bound) == (256, 2)
