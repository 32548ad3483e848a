"""What belongs to one process is not pickled, and deep copies share it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=100.0)


def _refused(rank, world_size):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import symmplan
    from symmplan.errors import OneProcessError

    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))
    made = [
        symmplan.backend(),
        symmplan.eager(),
        symmplan.expert_parallel(max_tokens=8),
        symmplan.fsdp.apply(model),
    ]
    said = []
    for one in made:
        with pytest.raises(OneProcessError) as caught:
            pickle.dumps({"state": one})
        assert isinstance(caught.value, TypeError)
        said.append(str(caught.value))
        assert copy.deepcopy([one])[0] is one
        assert copy.copy(one) is one
    made[-1].remove()
    made[-2].release()
    return said


def test_backends_sessions_and_handles_say_that_they_cannot_be_pickled(two):
    texts, _ = two.run(_refused)
    for text, name in zip(
        texts, ["CompileBackend", "Session", "ExpertParallel", "Handle"], strict=True
    ):
        assert "cannot be pickled" in text
        assert f"got an object of type {name}, with memory and peers of its process" in text
        assert "fix: leave it out of what is saved or sent, and make one in each process" in text
