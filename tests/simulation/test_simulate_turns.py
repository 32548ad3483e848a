"""What simulations say of sessions in FSDP2's segments, and of segments that sleep."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net
from gathering_optimizers import Gathering
from ranks import pool_of
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import symmplan

two = pool_of(2, timeout=60.0)
#: What a rendezvous sets up for good, of each segment and group.
RENDEZVOUS = 38 << 20


def _program(*, session, steps=3, style="in place"):
    """FSDP2, and an optimizer that gathers, maybe in a session."""
    torch.manual_seed(0)
    model = Net(blocks=3, dim=64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    handle = symmplan.fsdp.apply(fully_shard(model, mesh=mesh), choose="placed")
    optimizer = Gathering(model.parameters(), style, dist.group.WORLD)
    with symmplan.eager(choose="placed") if session else contextlib.nullcontext() as entered:
        for _ in range(steps):
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            if entered is not None:
                entered.step()
        held = sum(s.nbytes for s in symmplan.segments())
    return model, handle, entered, held


@pytest.mark.further
@pytest.mark.parametrize(
    ("ranks", "memory", "style"),
    [
        (8, "shm", "in place"),
        (8, "cuda", "in place"),
        (512, "nccl", "in place"),
        (8, "shm", "unequal"),
        (8, "cuda", "unequal"),
        (8, "nccl", "unequal"),
    ],
)
def test_a_session_takes_nothing_beside_fsdp2(ranks, memory, style):
    def told(session, steps):
        program = lambda: _program(session=session, steps=steps, style=style)  # noqa: E731
        return symmplan.simulate(program, ranks=ranks, memory=memory)

    alone = told(session=False, steps=1)
    for steps in (1, 2):
        both = told(session=True, steps=steps)
        assert both.peak_bytes == alone.peak_bytes
        assert both.beyond_bytes == alone.beyond_bytes
        assert max(p.peak_bytes for p in both.plans) == alone.peak_bytes
        assert len(both.plans) == 2


def _held(rank, world):
    *_, held = _program(session=True)
    return held


@pytest.mark.long
@pytest.mark.ranks
def test_that_is_what_ranks_hold(two):
    report = symmplan.simulate(lambda: _program(session=True), ranks=2, memory="shm")
    assert two.run(_held) == [report.peak_bytes] * 2


@pytest.mark.further
@pytest.mark.parametrize(
    ("memory", "stays"), [("shm", 0), ("cuda", 0), ("nccl", RENDEZVOUS), ("nvshmem", None)]
)
def test_what_stays_of_segments_that_sleep(memory, stays):
    program = lambda: _program(session=False, steps=1)  # noqa: E731
    report = symmplan.simulate(program, ranks=8, memory=memory)
    awake = report.peak_bytes + report.beyond_bytes
    assert report.asleep_bytes == (awake if stays is None else stays)
    assert f"{report.asleep_bytes}" in report.to_json()
    assert "asleep" in report.summary()


@pytest.mark.further
def test_segments_of_nccl_on_several_hosts_do_not_sleep():
    program = lambda: _program(session=False, steps=1)  # noqa: E731
    hosts = {"ranks_per_host": 4, "ranks_per_domain": 8}
    apart = symmplan.simulate(program, ranks=8, memory="nccl", **hosts)
    assert apart.asleep_bytes == apart.peak_bytes + apart.beyond_bytes > apart.beyond_bytes


def test_inputs_that_are_pinned_do_not_sleep():
    def program():
        torch._dynamo.reset()
        layer = torch.nn.Linear(64, 64, bias=False)

        @torch.compile(backend=symmplan.backend(inner="eager", bind=True, choose="placed"))
        def gathered(x):
            return funcol.all_gather_tensor(layer.weight, 0, dist.group.WORLD).sum() + x.sum()

        return gathered(torch.ones(2)), gathered

    report = symmplan.simulate(program, ranks=4, memory="nccl")
    pinned = 64 * 64 * 4
    assert report.asleep_bytes == report.beyond_bytes + pinned < report.peak_bytes + RENDEZVOUS * 2
