"""All-reduces through workspaces: the kernel, interpreted, between real ranks that are late."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
import torch
from interpreted import interpreted_pool_of, needs_triton

import symmplan
from symmplan.memory import realize
from symmplan.memory.meeting import workspace as workspaces
from symmplan.memory.meeting.workspace import Workspace, kernels_run, workspace_nbytes, workspace_of

interpreted = interpreted_pool_of(2, 3, timeout=280.0)


def _tensors(choice, world):
    """All ranks' inputs; bfloat16 of small numbers, since Triton's interpreter does not round."""
    numel = choice.choice([2, 4, 6, 1022, 1024, 1026])
    dtype = choice.choice([torch.float32, torch.bfloat16])
    generator = torch.Generator().manual_seed(choice.randrange(1 << 30))
    given = [torch.randn(numel, generator=generator) for _ in range(world)]
    if dtype == torch.bfloat16:
        given = [(x * 4).round().to(dtype) for x in given]
    if choice.random() < 0.3:
        which = given[choice.randrange(world)]
        which[choice.randrange(numel)] = choice.choice([float("inf"), float("-inf"), -0.0])
        which.view(torch.int32)[choice.randrange(numel * dtype.itemsize // 4)] = -1  # no number
    return given


def _summed(rank, world, seeds):
    problem = symmplan.Problem.from_intervals([("x", 0, 1, workspace_nbytes(world, 8192))])
    choice, apart, wrong = random.Random(0), random.Random(rank), []
    with realize(symmplan.plan(problem), memory="shm", timeout=60.0) as arena:
        (segment,) = arena.segments.values()
        segment.tensor.fill_(rank)
        assert kernels_run(segment.meeting().group, segment.tensor.device, 60.0)
        workspace = workspace_of(segment.meeting(), 60.0)
        for seed in seeds:
            given = _tensors(choice, world)
            mine = given[rank].clone()
            if apart.random() < 0.3:
                time.sleep(apart.random() * 0.02)
            assert workspace.takes(mine)
            workspace.all_reduce(mine)
            total = torch.zeros(mine.shape)
            for each in given:
                total += each.float()
            if not torch.allclose(mine, total.to(mine.dtype), rtol=0, atol=0, equal_nan=True):
                wrong.append((seed, mine, total))
        segment.barrier()  # nobody unmaps what a peer still writes
    return wrong


@needs_triton
@pytest.mark.ranks
@pytest.mark.parametrize("seeds", [range(150)])
def test_late_ranks_have_the_same_sums(interpreted, seeds):
    assert interpreted.run(_summed, seeds) == [[]] * interpreted.world_size


def test_other_tensors_are_not_taken():
    workspace = Workspace([torch.empty(workspace_nbytes(1, 64), dtype=torch.uint8)], 0, 1.0)
    sizes = {512: True, 513: False, 0: False, 15: True}
    for numel, taken in sizes.items():
        assert workspace.takes(torch.zeros(numel)) == taken
    assert not workspace.takes(torch.zeros(3, dtype=torch.bfloat16))
    assert not workspace.takes(torch.zeros(4, dtype=torch.float16))


class _Broken:
    """A kernel that Triton cannot compile."""

    def __getitem__(self, grid):
        raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize("kernel", [_Broken(), None])
def test_without_a_compiler_there_are_no_kernels(kernel, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(workspaces, "_kernel", lambda: kernel)
    group = SimpleNamespace(size=2, rank=1)
    assert not kernels_run(group, torch.device("cpu"), 1.0)
    assert ("C compiler" in caplog.text) == (kernel is not None)


@pytest.mark.parametrize(
    ("ranks", "nbytes", "found"),
    [(2, 1 << 20, 4 << 20), (2, 4 << 20, 4 << 20), (2, 8, 8192), (8, 4096, 65536)],
)
def test_a_workspace_has_room_for_what_is_worth_it(ranks, nbytes, found):
    assert workspace_nbytes(ranks, nbytes) == found
