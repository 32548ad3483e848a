"""Ranks of several groups that make one plan choose alike, by the slowest of all of them."""

from __future__ import annotations

import pytest
import torch
from ranks import pool_of

import symmplan

F = torch.ops._c10d_functional


def _two_groups(x, w, data, tensor):
    """A sharded gather and tensor-parallel sums."""
    whole = F.wait_tensor(F.all_gather_into_tensor(w.sin(), 2, data))
    summed = F.wait_tensor(F.all_reduce(x @ x, "sum", tensor))
    return F.wait_tensor(F.all_reduce(summed @ whole[:16], "sum", tensor))


def _unlike(algorithm, seconds_on):
    """A timer that runs all, and says of an algorithm what ``seconds_on(turn)`` does."""
    turn = [0]

    def seconds_of(clock, acts, group, nbytes, *, beside, enough):
        turn[0] += 1
        for act in acts.values():
            clock.span(act, 1, 0, group)
        return {name: seconds_on(turn[0]) if name == algorithm else 5.0 for name in acts}

    return seconds_of


def _mesh(rank, size, seconds_on):
    """What was chosen over rows and columns of a mesh."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from symmplan.choose import trials

    trials.forget()
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    groups = [mesh.get_group(n).group_name for n in ("data", "tensor")]
    original = trials.seconds_of
    trials.seconds_of = _unlike("symmetric", seconds_on)
    backend = symmplan.backend("eager", timeout=20.0, choose="measure", collectives="process group")
    try:
        x, w = torch.randn(16, 16), torch.randn(16, 16)
        compiled = torch.compile(_two_groups, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, w, *groups), _two_groups(x, w, *groups))
        return [(c.op, c.algorithm, dict(c.seconds)) for c in backend.choices]
    finally:
        trials.seconds_of = original
        backend.release()
        for name in groups:
            dist.barrier(dist.distributed_c10d._resolve_process_group(name))


def _mesh_by_rows(rank, size):
    """Tensor-parallel sums are slow in one row, and what is sharded in one column."""

    def seconds_on(turn):
        return 9.0 if rank in ((0, 2) if turn == 1 else (2, 3)) else 4.0

    return _mesh(rank, size, seconds_on)


four = pool_of(4, timeout=120.0)


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.all_cases
def test_all_ranks_of_a_mesh_choose_alike(four):
    first, *others = four.run(_mesh_by_rows)
    assert {algorithm for _, algorithm, *_ in first} == {"ordinary"}
    assert all(other == first for other in others)


def _inner_groups(rank, size):
    """What a model with inner groups chose, when its outer group is known, and those differ."""
    from torch.distributed.fsdp import fully_shard

    from symmplan.choose import trials

    trials.forget()
    original = trials.seconds_of
    choices = []
    for after in (True, 2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
        for block in model:
            fully_shard(block, reshard_after_forward=after)
        slow = 9.0 if after == 2 and rank >= 2 else 4.0
        trials.seconds_of = _unlike("symmetric", lambda _, slow=slow: slow)
        handle = symmplan.fsdp.apply(model, choose="measure", timeout=20.0)
        try:
            for _ in range(3):
                model(torch.ones(4, 8)).sum().backward()
            choices.append([(c.op, c.ranks, c.algorithm) for c in handle.choices])
        finally:
            trials.seconds_of = original
            handle.remove()
    return choices


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
def test_inner_groups_of_a_plan_choose_alike_when_only_theirs_is_new(four):
    first, *others = four.run(_inner_groups)
    outer, inner = first
    assert {algorithm for *_, algorithm in outer} == {"symmetric"}
    assert ("all_gather", 2, "ordinary") in inner
    assert all(other == first for other in others)
