"""Trainers on two GPUs: what `tests/examples/test_trainers.py` runs on CPU ranks.

    python -m pytest tests/gpu/test_trainers_gpu.py -m gpu

Sums may be rounded otherwise there, so losses are compared to two digits.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch
from test_trainers import NEEDS, check, titan_trains_alike

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("name", ["fsdp2", *NEEDS])
def test_a_trainer_has_the_same_losses(name, tmp_path):
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    check(name, tmp_path, exact=False)


def test_captured_steps_have_the_losses_of_eager_ones(tmp_path):
    printed = check("captured", tmp_path, exact=False)
    lines = dict(re.findall(r"^(symmplan|captured) +([\d. ]+)$", printed, re.MULTILINE))
    assert lines["captured"] == lines["symmplan"]


def test_torchtitan_has_the_same_losses(tmp_path):
    titan_trains_alike(tmp_path, exact=False)


def test_torchtitans_own_symmetric_memory_is_replaced(tmp_path):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("torchtitan has it for compute capability 9.0 and newer")
    printed = titan_trains_alike(tmp_path, "--parallelism.enable_fsdp_symm_mem", exact=False)
    assert "parallelism.enable_fsdp_symm_mem is off in this run" in printed
