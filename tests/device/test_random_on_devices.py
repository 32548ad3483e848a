"""Random programs on the doubles of a device: the same bits as without symmplan.

Models under FSDP2 with acts of their users, and programs of one-sided ops beside collectives, eager
and compiled, over NCCL's memory.
"""

from __future__ import annotations

import sys
from unittest import mock

import pytest
from doubles import installed, state
from fsdp_machine import compared, verdict
from fsdp_programs import drawn
from hypothesis import given
from hypothesis import strategies as st
from one_sided_programs import one_sided_programs
from paths import TESTS
from ranks import pool_of

from symmplan.integrate.fsdp.program_usage import ProgramUsage

sys.path.append(str(TESTS / "runtime"))
import test_right_numbers as numbers

pytestmark = [pytest.mark.ranks, pytest.mark.further]

two = pool_of(2, timeout=120.0)
pair = pool_of(2, setup=numbers._setup, timeout=120.0)


@pytest.mark.parametrize("seed", range(12))
def test_models(two, seed):
    results = two.run(_compared, drawn(seed, ranks=2), seed % 2 == 1)
    assert not verdict(results)


def _compared(rank, world, program, moved):
    move = mock.patch.object(ProgramUsage, "gradients_move", return_value=moved)
    with move, installed(races=True):
        found = compared(rank, world, program)
        assert not state().memory.used, "torch's symmetric memory is the program's"
        assert state().races == []
    return found


def _work(rank, world, work, *given, **more):
    with installed(races=work == "_eager"):
        found = getattr(numbers, work)(rank, world, *given, memory="nccl", **more)
        assert state().streams.sanitizer is None or state().races == []
    return found


class _OnDevices:
    """The pool, whose programs run on devices."""

    def __init__(self, pool):
        self._pool = pool

    def run(self, work, *args):
        return self._pool.run(_work, work, *args)


@pytest.mark.parametrize("work", ["_eager", "_compiled"])
@numbers.MANY
@given(data=st.data())
def test_one_sided_ops(pair, work, data):
    program = data.draw(one_sided_programs(2, in_place=work == "_eager"))
    more = data.draw(numbers.PAUSES), data.draw(numbers.SEEDS)
    numbers._check(_OnDevices(pair), work, program, "auto", *more)
