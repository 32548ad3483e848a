"""Right numbers on CUDA devices over NCCL, however their streams are delayed.

Ranks that share a device have CUDA's mappings instead. The programs of `test_right_numbers`, with
sleep kernels as pauses. ``SYMMPLAN_EXAMPLES=100`` draws so many random programs for each
integration.
"""

from __future__ import annotations

import functools

import pytest
import torch
from devices import SHARED, needs_devices, ranks_on
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from one_sided_programs import one_sided_programs
from test_right_numbers import (
    EXAMPLES,
    PAUSES,
    SEEDS,
    SEEN,
    _check,
    _compiled,
    _eager,
    _late,
    _program,
    _setup,
)

pytestmark = [*needs_devices(), pytest.mark.timeout(900)]

#: Iterations of each program; each is run with every rank late in two ways.
TURNS = 25
_MEMORY = "cuda" if SHARED else "nccl"


@pytest.fixture(scope="module")
def pool():
    with ranks_on(2, timeout=300.0) as ranks:
        ranks.run(_setup_device)
        yield ranks


def _setup_device(rank, world_size):
    torch.cuda.set_device(rank)
    _setup(rank, world_size)


def _on_device(work, rank, world_size, *given, **more):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", torch.cuda.current_device())
    return work(rank, world_size, *given, device=device, memory=_MEMORY, **more)


def _eager_there(rank, world_size, *given, **more):
    return _on_device(_eager, rank, world_size, *given, **more)


def _compiled_there(rank, world_size, *given, **more):
    return _on_device(_compiled, rank, world_size, *given, **more)


def _inductor_there(rank, world_size, *given, **more):
    return _on_device(
        functools.partial(_compiled, inner="inductor"), rank, world_size, *given, **more
    )


def _late_there(rank, world_size, program, work):
    return _late(rank, world_size, program, "auto", work, turns=TURNS)


@pytest.mark.parametrize(
    "work", [_eager_there, _compiled_there, _inductor_there], ids=["eager", "compiled", "inductor"]
)
@pytest.mark.parametrize("name", [name for name, (_, ranks, *_) in SEEN.items() if 2 in ranks])
def test_what_was_seen(pool, name, work):
    *_, steps, outputs = SEEN[name]
    _check(pool, _late_there, _program(2, *steps, outputs=outputs), work)


MANY = settings(max_examples=EXAMPLES, deadline=None, phases=[Phase.generate])


@pytest.mark.parametrize("work", [_eager_there, _compiled_there], ids=["eager", "compiled"])
@MANY
@given(data=st.data())
def test_random_programs(pool, work, data):
    program = data.draw(one_sided_programs(2, in_place=work is _eager_there))
    _check(pool, work, program, "auto", data.draw(PAUSES), data.draw(SEEDS))
