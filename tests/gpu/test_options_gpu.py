"""Ranks on CUDA devices that were given different options, and what torch's allocators add."""

from __future__ import annotations

import pytest
import torch
from devices import needs_devices, pool_on
from test_options import PROGRAMS, differing, judge

pytestmark = [*needs_devices(), pytest.mark.all_cases]

pool = pool_on(2, scope="function", timeout=300)


def _on_device(rank, world, *given):
    import fsdp_models

    fsdp_models.DEVICE[0] = "cuda"
    torch.cuda.set_device(rank)
    return differing(rank, world, *given)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("option", "mine", "theirs"),
    [
        ("choose", "ordinary", "placed"),
        ("choose", "measure", "placed"),
        ("memory", "cuda", "nccl"),
    ],
)
def test_an_option_that_one_rank_has_alone(pool, program, option, mine, theirs, tmp_path):
    found = pool.run(_on_device, program, option, mine, theirs, 1, str(tmp_path))
    judge(found, option, mine, theirs, 1)
