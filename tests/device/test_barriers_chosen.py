"""Collectives chosen by their times on devices: barriers cost only where the plan has any."""

from __future__ import annotations

from unittest import mock

import custom_ops
import pytest
import torch
from doubles import on_devices
from ranks import pool_of

import symmplan

pytestmark = [pytest.mark.ranks, pytest.mark.all_cases]

F = torch.ops._c10d_functional

two = pool_of(2, setup=custom_ops.meet, timeout=120)


def _sums(x, group):
    """Each sum is a meeting for the bytes of the one before."""
    for _ in range(4):
        x = x + F.wait_tensor(F.all_reduce(x.sin(), "sum", group))
    return x


def _one_sided(x, group):
    """Peers may touch what this op has at any time: it gets barriers."""
    return torch.ops.symmplan_test.scale(x.sin(), group).cos()


def _both(x, group):
    return _one_sided(_sums(x, group), group)


def _apart(x, group):
    """The barriers are another group's."""
    return _one_sided(_sums(x, group), custom_ops.GROUPS[1])


def _overlapping(x, group):
    """A product runs while the sum does."""
    sums = F.all_reduce(x.sin(), "sum", group)
    product = x @ x.t()
    return F.wait_tensor(sums) + product.sum()


def _gathers(x, group):
    return F.wait_tensor(F.all_gather_into_tensor(x.sin(), 2, group)).cos()


def _compiled(program, xs, group):
    torch._dynamo.reset()
    backend = symmplan.backend("eager", choose="measure", memory="nccl", timeout=30.0)
    compiled = torch.compile(lambda x: program(x, group), backend=backend)
    for x in xs:
        assert torch.equal(compiled(x), program(x, group))
    barriers = {b.group for plan in backend.plans for b in plan.barriers}
    backend.release()
    return backend, barriers


def _session(program, xs, group):
    with symmplan.eager(choose="measure", memory="nccl", timeout=30.0) as session:
        for x in xs:
            program(x, group)
            session.step()
    return session, {barrier.group for barrier in session.plan.barriers}


def _chosen(rank, world, make, program, faster):
    """Whether sums are placed, and groups with barriers; placed sums are faster by so many us."""
    from symmplan.choose import trials

    def seconds_of(clock, acts, *_, **__):
        return {name: 1e-6 * (50 - faster * (name != "ordinary")) for name in acts}

    group, other = custom_ops.GROUPS
    xs = [torch.arange(32.0).view(4, 8) * (rank + 1) + step for step in range(3)]
    with mock.patch.object(trials, "seconds_of", seconds_of):
        user, barriers = {"compiled": _compiled, "session": _session}[make](program, xs, group)
    (choice,) = user.choices
    return choice.placed, {group: "sums", other: "other"}, barriers


@pytest.mark.parametrize(
    ("program", "faster", "placed", "where"),
    [
        (_sums, 5, True, []),
        (_sums, 1, False, []),
        (_both, 15, True, ["sums"]),
        pytest.param(_both, 5, False, ["sums"], marks=pytest.mark.long),
        pytest.param(_apart, 5, True, ["other"], marks=pytest.mark.long),
        pytest.param(_overlapping, 5, False, [], marks=pytest.mark.long),
        pytest.param(_gathers, 5, False, [], marks=pytest.mark.long),
    ],
)
def test_barriers_are_charged_where_the_plan_has_any(two, program, faster, placed, where):
    for found, names, barriers in two.run(on_devices, _chosen, "compiled", program, faster):
        assert found == placed
        assert [names[group] for group in barriers] == where


@pytest.mark.parametrize(("faster", "placed"), [(5, False), (15, True)])
def test_sessions_are_always_charged(two, faster, placed):
    """Their host takes longer for what is placed."""
    for found, _, barriers in two.run(on_devices, _chosen, "session", _sums, faster):
        assert (found, barriers) == (placed, set())
