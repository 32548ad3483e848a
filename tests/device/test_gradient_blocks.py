"""Where FSDP2's sharded gradients are allocated: what they had holds activations in forward."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from doubles import installed
from doubles.streams import streams
from fsdp_models import mesh as mesh_of
from ranks import pool_of

import symmplan
from symmplan.integrate.fsdp.program_usage import ProgramUsage
from symmplan.torch_private import fsdp2

pytestmark = [pytest.mark.ranks, pytest.mark.all_cases]

two = pool_of(2, timeout=120)

LAYERS = 3


class Noted:
    """FSDP2's reduce-scatter; notes whether it allocates on the program's stream."""

    def __init__(self, plain, program, seen):
        self._plain, self._program, self._seen = plain, program, seen

    def allocate(self, size, **how):
        self._seen.append(streams().current is self._program)
        return self._plain.allocate(size, **how)

    def __call__(self, **how):
        return self._plain(**how)


def _train(rank, world, case, *, planned):
    """Gradients of each step, and for each reduction of the last one which stream allocated."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(LAYERS)))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for module in (*model, model):
        fully_shard(module, mesh=mesh_of(world), mp_policy=policy)
    seen, handle = [], None
    if planned:
        handle = symmplan.fsdp.apply(model, choose="push", timeout=30.0)
        for group in (group for module in model for group in fsdp2.param_groups(module)):
            _, scatter = fsdp2.comms(group)
            scatter._plain = Noted(scatter._plain, streams().current, seen)
    if case == "hooks":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.add_(1.0))
    gradients = []
    for step in range(5):
        seen.clear()
        for last in (False, True) if case == "several passes" else (True,):
            model.set_is_last_backward(last)
            made = model(torch.full((4, 64), 0.1 * (rank + step + 1)))
            if case == "freed late":
                model.zero_grad()
            made.float().square().mean().backward()
        gradients.append([p.grad.to_local().clone() for p in model.parameters()])
        if case != "freed late":
            model.zero_grad()
    if handle is not None:
        assert handle.stats.served
        handle.remove()
    return gradients, seen


def _both(rank, world, case):
    # These devices have no history of an allocator, by which that is decided.
    move = mock.patch.object(ProgramUsage, "gradients_move", return_value=True)
    with move, installed(races=True):
        made, seen = _train(rank, world, case, planned=True)
    alone, _ = _train(rank, world, case, planned=False)
    torch.testing.assert_close(made, alone)
    return seen


@pytest.mark.parametrize(
    ("case", "moved"),
    [
        ("freed after the step", True),
        ("hooks", False),
        pytest.param("freed late", False, marks=pytest.mark.long),
        pytest.param("several passes", False, marks=pytest.mark.long),
    ],
)
def test_gradients_have_blocks_that_activations_may_have(two, case, moved):
    for seen in two.run(_both, case):
        assert set(seen) == {moved}
        assert len(seen) >= LAYERS
