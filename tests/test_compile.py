"""The compile backend on two real ranks: results, reuse of bytes, statistics, errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from programs import Program, make_inputs, programs, run
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


def _poison(backend):
    for unit in backend._units:
        for arena in unit.arenas.values():
            for segment in arena.segments.values():
                segment.tensor.fill_(255)


def _compare(rank, world_size, program: Program, inner: str, repeat: int):
    """Run the program plainly and compiled; return what differs, and the statistics."""
    import symmplan

    torch._dynamo.reset()
    inputs = make_inputs(program, rank)
    expected = run(program, _GROUPS, *(x.clone() for x in inputs))
    backend = symmplan.backend(inner=inner, timeout=30.0)
    compiled = torch.compile(
        lambda *tensors: run(program, _GROUPS, *tensors), backend=backend, fullgraph=True
    )
    try:
        for turn in range(repeat):
            got = compiled(*(x.clone() for x in inputs))
            for i, (a, b) in enumerate(zip(got, expected, strict=True)):
                torch.testing.assert_close(
                    a, b, rtol=1e-4, atol=1e-5, msg=lambda m, i=i, t=turn: f"{t}.{i}: {m}"
                )
            torch.distributed.barrier()  # nobody reads any more
            _poison(backend)
            torch.distributed.barrier()
        for plan in backend.plans:
            plan.verify()
        stats = backend.stats
        return {
            "fingerprints": [p.fingerprint for p in backend.plans],
            "rendezvous": stats.rendezvous,
            "expected_rendezvous": sum(len(s.groups) for p in backend.plans for s in p.segments),
            "placed": stats.placed,
            "parts": (stats.staged, stats.bound),
        }
    finally:
        backend.release()


def _check(pool, program, inner, repeat=3):
    first, second = pool.run(_compare, program, inner, repeat)
    assert first == second
    assert first["rendezvous"] == first["expected_rendezvous"]
    assert first["placed"] == sum(first["parts"])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(program=programs())
def test_random_programs_op_by_op(pool, program):
    _check(pool, program, "eager")


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(program=programs(max_steps=16))
def test_random_programs_through_inductor(pool, program):
    _check(pool, program, "inductor", repeat=2)
