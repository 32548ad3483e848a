"""torchtitan's config for `PlannedTrainer`, and whose symmetric memory is used."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torchtitan", "triton")),
        reason="needs torchtitan and triton: python -m pip install '.[torchtitan]'",
    ),
    pytest.mark.filterwarnings("ignore"),  # torchtitan's own
]


def test_a_config_keeps_all_that_it_had():
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from symmplan.trainers.torchtitan import PlannedTrainer, planned

    config = llama3_debugmodel()
    made = planned(config)
    assert type(made) is PlannedTrainer.Config
    assert all(getattr(made, f.name) is getattr(config, f.name) for f in dataclasses.fields(config))
    assert dataclasses.asdict(made.symmplan) == {
        "memory": "auto",
        "choose": "auto",
        "capacity": None,
        "unsharded_modules": None,
    }


def test_symmplan_wins_and_says_so(monkeypatch, caplog):
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.trainer import Trainer

    from symmplan.trainers.torchtitan import PlannedTrainer, planned

    seen = []

    def init(self, config):
        self.model_parts = []
        seen.append(config.parallelism.enable_fsdp_symm_mem)

    monkeypatch.setattr(Trainer, "__init__", init)
    config = planned(llama3_debugmodel())
    PlannedTrainer(config)
    assert "enable_fsdp_symm_mem" not in caplog.text
    caplog.clear()
    config.parallelism.enable_fsdp_symm_mem = True
    PlannedTrainer(config)
    assert seen == [False, False]
    assert config.parallelism.enable_fsdp_symm_mem  # the user's own is left alone
    (message,) = caplog.messages
    assert message.startswith("parallelism.enable_fsdp_symm_mem is off in this run")
