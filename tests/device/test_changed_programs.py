"""FSDP2 programs that do something else after a while, for which their plans have no room."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from doubles import on_devices, state
from fsdp_models import mesh as mesh_of
from ranks import pool_of

import symmplan
from symmplan.integrate.fsdp import lacking as lacking_module
from symmplan.integrate.fsdp.lacking import Lacking

pytestmark = [pytest.mark.ranks, pytest.mark.all_cases]

two = pool_of(2, timeout=120)

LAYERS, WIDTH = 8, 1280


def _steps(rank, world, resharded, planned=True, **options):
    """Sums of each step's gradients, and the counters behind each.

    ``resharded`` says for each step whether its modules reshard after forward.
    """
    from torch.distributed.fsdp import fully_shard

    from symmplan.integrate.fsdp import program_usage, step_plans
    from symmplan.memory import room

    torch.manual_seed(7)
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    model = torch.nn.Sequential(*layers)
    for module in (*model, model):
        fully_shard(module, mesh=mesh_of(world))
    sums, stats, handle = [], [], None
    with (  # its plans do not count as small
        mock.patch.object(room, "SMALL", 0),
        mock.patch.object(program_usage, "SMALL", 0),
        mock.patch.object(step_plans, "expected_beyond", return_value=0),
    ):
        if planned:
            handle = symmplan.fsdp.apply(model, choose="symmetric", timeout=30.0, **options)
        for step, reshard in enumerate(resharded):
            for layer in list(model)[:-1]:
                layer.set_reshard_after_forward(reshard)
            model(torch.full((64, WIDTH), 0.1 * (rank + step + 1))).square().mean().backward()
            sums.append([float(p.grad.to_local().sum()) for p in model.parameters()])
            model.zero_grad()
            if handle is not None:
                assert state().device.segments == handle.stats.segment_bytes
                if handle.stats.replans:  # no more than the plan needs; none while it is recorded
                    assert handle.stats.segment_bytes in (0, handle.plan.peak_bytes)
                assert handle.planned == (step > 0)
                stats.append(handle.stats)
    if handle is not None:
        handle.remove()
    return sums, stats


def _both(rank, world, resharded, **options):
    run = functools.partial(_steps, **options)
    sums, stats = on_devices(rank, world, run, resharded, had=0, counted=True)
    alone, _ = _steps(rank, world, resharded, planned=False)
    assert sums == alone
    return [(s.placed, s.plain, s.recorded, s.replans) for s in stats]


@pytest.mark.further
def test_a_program_that_changes_for_good_is_recorded_and_planned_as_in_the_beginning(two):
    """Its parameters take more bytes than all that it had in its first step."""
    run = functools.partial(_both, resharded=[True] * 2 + [False] * 4)
    for found in two.run(run):
        first, *_, changed, recorded, _, last = found
        calls = first[2]
        assert found[1] == (calls, 0, calls, 0)
        assert changed == found[1]  # that step has its places, and goes where it needs more
        assert recorded == (0, 0, 2 * calls - (LAYERS - 1), 1)
        assert last == (calls - (LAYERS - 1), 0, recorded[2], 1)


@pytest.mark.further
def test_steps_of_two_kinds_in_turn_come_to_one_plan(two):
    """Where all that one kind keeps has no room in what the other had, nothing is placed."""
    for found in two.run(_both, [True, False] * 4):
        before, last = found[-2:]
        assert last[3] <= 3
        assert before[2:] == last[2:]


@pytest.mark.further
def test_a_capacity_that_was_given_is_no_reason_to_begin_again(two):
    run = functools.partial(_both, resharded=[True] * 2 + [False] * 4, capacity="40MiB")
    for found in two.run(run):
        assert len({recorded for _, _, recorded, _ in found}) == 1
        assert found[-1][3] == 1


def _emptied(rank, world, resharded):
    """How often the allocator gave back its cache since what was done had no place."""
    real = lacking_module.empty_cache
    with mock.patch.object(lacking_module, "empty_cache", wraps=real) as emptied:
        on_devices(rank, world, _steps, resharded, had=0, counted=True)
    return emptied.call_count


@pytest.mark.parametrize("changes", [True, pytest.param(False, marks=pytest.mark.further)])
def test_a_step_that_does_other_than_planned_begins_without_what_is_cached(two, changes):
    assert two.run(_emptied, [True] * 2 + [not changes]) == [int(changes)] * 2


def test_a_program_that_does_something_new_in_each_step_keeps_what_is_cached():
    lacking = Lacking(mock.Mock(), 3)
    with mock.patch.object(lacking_module, "empty_cache") as emptied:
        lacking._memory.facade.is_capturing.return_value = False
        for step in range(8):
            lacking.note("crowded", "a", step)
            lacking.note("crowded", "b", step)
            assert emptied.call_count == min(step + 1, 3)
            lacking.begin()
