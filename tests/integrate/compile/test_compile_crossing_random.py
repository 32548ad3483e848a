"""Random trainings on two ranks: forwards and backwards in any order, against eager."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from crossing_programs import Training, forward, may_keep_graphs, train, trainings
from custom_ops import GROUPS, meet
from hypothesis import HealthCheck, given, settings
from ranks import pool_of

pytestmark = pytest.mark.ranks

pool = pool_of(2, setup=meet, timeout=180.0)


def _compare(rank, world_size, training: Training, inner: str, debug: bool):
    """Train plainly and compiled; the statistics, and who still holds placements."""
    import symmplan

    torch._dynamo.reset()
    plain = [
        lambda *tensors, p=program: forward(p, GROUPS, *tensors) for program in training.programs
    ]
    expected = train(training, GROUPS, rank, plain)
    debug = debug and (inner == "eager" or "poison")  # Inductor's own code is tested
    backend = symmplan.backend(inner=inner, timeout=30.0, debug=debug)
    compiled = [torch.compile(f, backend=backend, fullgraph=True, dynamic=False) for f in plain]
    try:
        with may_keep_graphs() if training.keeps else contextlib.nullcontext():
            for _ in range(2):
                got = train(training, GROUPS, rank, compiled)
                for i, (a, b) in enumerate(zip(got, expected, strict=True)):
                    torch.testing.assert_close(
                        a, b, rtol=1e-4, atol=1e-5, msg=lambda m, i=i: f"{i}: {m}"
                    )
        for plan in backend.plans:
            plan.verify()
        gc.collect()
        held = [
            loan.place
            for shared in backend._pool._shared.values()
            for loan in shared.crossings._leases.values()
            if loan.held
        ]
        torch.distributed.barrier()
        return backend.stats, [p.fingerprint for p in backend.plans], held
    finally:
        backend.release()


def _check(pool, training, inner, *, debug=True):
    first, second = pool.run(_compare, training, inner, debug)
    assert first == second
    assert first[2] == []
    return first[0]


@pytest.mark.further
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(training=trainings())
def test_random_trainings_op_by_op(pool, training):
    _check(pool, training, "eager")


@pytest.mark.slow
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(training=trainings(max_programs=1))
def test_random_trainings_through_inductor(pool, training):
    _check(pool, training, "inductor")
