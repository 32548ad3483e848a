"""Trainers on two GPUs: what `tests/examples/test_trainers.py` runs on CPU ranks.

    python -m pytest tests/gpu/test_trainers_gpu.py -m gpu

Sums may be rounded otherwise there, so losses are compared to two digits.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from test_trainers import check, titan_trains_alike

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("needs", ["torch", "accelerate", "lightning"])
def test_a_trainer_has_the_same_losses(needs, tmp_path):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    check("fsdp2" if needs == "torch" else f"with_{needs}", tmp_path, exact=False)


def test_torchtitan_has_the_same_losses(tmp_path):
    titan_trains_alike(tmp_path, exact=False)
