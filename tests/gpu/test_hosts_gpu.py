"""Groups of devices on several hosts, in two levels: two hosts of two by NCCL_HOSTID.

    python -m pytest -m gpu tests/gpu/test_hosts_gpu.py                 # four devices
    SHARE_DEVICE=1 python -m pytest -m gpu tests/gpu/test_hosts_gpu.py  # four ranks on fewer

NCCL takes them for hosts, and keeps off NVLink between them.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
from devices import finish, needs_devices, ranks_on
from ranks import RankPool

pytestmark = needs_devices(4)


def _of_two(rank):
    """Be a rank of a host of two."""
    os.environ["NCCL_HOSTID"] = f"host {rank // 2}"


def _alone(rank):
    """Be the only rank of a host."""
    os.environ["NCCL_HOSTID"] = f"host {rank}"


def _on_host(rank, size, enter):
    enter(rank)


@pytest.fixture(scope="module")
def four():
    """Two hosts of two ranks each."""
    with ranks_on(4, enter=_of_two, timeout=240.0) as ranks:
        ranks.run(_on_host, _of_two)  # who share a device had others when they met
        yield ranks
        RankPool.outcomes(ranks, finish)


def _late(rank, step):
    time.sleep(random.Random(100 * step + rank).choice([0.0, 0.0, 0.02]))


def _collectives(rank, size):
    """Which results of symmplan's own collectives are wrong; and a segment's ranks on this host."""
    import torch.distributed as dist

    from symmplan.memory import realize
    from symmplan.memory.meeting.topology import survey
    from symmplan.model import Problem
    from symmplan.planner import plan

    device = torch.device("cuda", torch.cuda.current_device())
    survey({"default": dist.group.WORLD}, device, 60.0)
    count, ops, wrong = 1 << 18, torch.ops.symmplan, []
    problem = Problem.from_intervals([("x", 0, 1, 4 * count * size)])
    with realize(plan(problem), memory="cuda", device=device, timeout=60) as arena:
        (segment,) = arena.segments.values()
        for turn in range(6):
            _late(rank, turn)
            dtype = (torch.float32, torch.bfloat16)[turn % 2]
            base = torch.arange(count, device=device) % 61
            whole = arena.tensor("x", dtype)[: count * size]
            every = [(base + 7 * r + turn).to(dtype) for r in range(size)]
            ops.all_gather_out(every[rank], size, "default", out=whole)
            wrong += [] if torch.equal(whole, torch.cat(every)) else [("gather", turn)]
            given = [torch.arange(count * size, device=device) % 5 + r + turn for r in range(size)]
            total = sum(given)
            whole.copy_(given[rank])
            part = torch.empty(count, dtype=dtype, device=device)
            ops.reduce_scatter_out(whole, "sum", size, "default", out=part)
            want = total.view(size, -1)[rank].to(dtype)
            wrong += [] if torch.equal(part, want) else [("scatter", turn)]
            segment.barrier()
            whole.copy_(given[rank])
            ops.all_reduce_out(whole, "sum", "default", out=whole)
            wrong += [] if torch.equal(whole, total.to(dtype)) else [("sum", turn)]
            segment.barrier()
        near = segment.meeting("default").near
        torch.cuda.synchronize()
    return wrong, near


def test_collectives_in_two_levels(four):
    found = four.run(_collectives)
    assert [near for _, near in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert not any(wrong for wrong, _ in found)


def _model():
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(3)]
    for block in blocks:
        block.weight.data.mul_(64).round_()
    return torch.nn.Sequential(*blocks)


def _trained(rank, size, choose, memory="cuda"):
    """Steps in which planned FSDP2 differs from plain; what was placed and how it ran; reasons."""
    from torch.distributed.fsdp import fully_shard

    import symmplan
    from symmplan.process import PROCESS

    def step(model, number):
        model.zero_grad()
        _late(rank, number)
        generator = torch.Generator("cuda").manual_seed(100 * number + rank)
        x = torch.randint(-2, 3, (4, 1024), generator=generator, device="cuda").float()
        loss = (model(x) * (rank + 1)).sum()
        loss.backward()
        return [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]

    models = _model(), _model()
    for model in models:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    plain, planned = models
    handle = symmplan.fsdp.apply(planned, memory=memory, choose=choose, timeout=60.0)
    wrong = []
    for number in range(6):
        pairs = zip(step(planned, number), step(plain, number), strict=True)
        wrong += [number for got, want in pairs if not torch.allclose(got, want, rtol=1e-5)]
        if number % 2:
            handle.sleep()
            wrong += ["connected"] if len(PROCESS.device_counterparts) else []
    checked = handle.check(lambda: step(planned, 0))
    ran = sorted({(seen.planned.algorithm, seen.algorithm) for seen in checked.calls})
    stats = handle.stats
    reasons = sorted({u.reason for u in handle.plan.unplanned} | {r for r, _ in stats.reasons})
    choices = [(c.op, sorted(c.seconds), c.algorithm) for c in handle.choices]
    handle.remove()
    return wrong, stats.placed, ran, reasons, choices


@pytest.mark.first
def test_fsdp_in_two_levels(four):
    for wrong, placed, ran, _, _ in four.run(_trained, "placed"):
        assert not wrong
        assert placed > 0
        assert ran == [("two-level", "two-level")]


def _by_default(rank, size):
    """The same with the memory that a program gets, where NCCL's must not be chosen."""
    from symmplan.memory.backends import torch_symm
    from symmplan.memory.meeting.topology import facts_of
    from symmplan.torch_private import symm_mem

    def never(_):
        raise AssertionError("NCCL's memory was asked for")

    device = torch.device("cuda", torch.cuda.current_device())
    before, torch_symm.serves_nccl = torch_symm.serves_nccl, never
    try:
        wrong, placed, ran, *_ = _trained(rank, size, "placed", "auto")
    finally:
        torch_symm.serves_nccl = before
    return wrong, placed, ran, symm_mem.backend_of(device), facts_of(device)["host"]


def test_fsdp_over_hosts_gets_cuda_s_memory_by_default(four):
    found = four.run(_by_default)
    assert len({host for *_, host in found}) == 2
    for wrong, placed, ran, allocator, _ in found:
        assert not wrong
        assert placed > 0
        assert ran == [("two-level", "two-level")]
        assert allocator == "CUDA"


def test_fsdp_measures_two_levels_beside_the_ordinary_way(four):
    first, *others = four.run(_trained, "measure")
    wrong, _, _, _, choices = first
    assert not wrong
    assert all(other[4] == choices for other in others)
    assert choices
    assert all(measured == ["ordinary", "two-level"] for _, measured, _ in choices)


def test_one_rank_on_each_host_is_ordinary():
    with ranks_on(2, enter=_alone, timeout=240.0) as ranks:
        ranks.run(_on_host, _alone)
        for wrong, placed, _, reasons, _ in ranks.run(_trained, "placed"):
            assert not wrong
            assert placed == 0
            assert any("several ranks on each host" in reason for reason in reasons)
        RankPool.outcomes(ranks, finish)
