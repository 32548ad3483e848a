"""Configs for torchtitan 0.3 that put FSDP2's collectives into planned symmetric memory.

`planned` is the only change; start training with torchtitan's own command. These commands train its
debug model on two GPUs, without and with symmplan; `assets.py` makes the tokenizer and the texts:

    python examples/torchtitan/assets.py assets
    export PYTHONPATH=examples/torchtitan
    torchrun --nproc-per-node 2 -m torchtitan.train --module registry --config plain
    torchrun --nproc-per-node 2 -m torchtitan.train --module registry --config with_symmplan

Both print the same training and validation losses. `--checkpoint.load_step 4` resumes from the
fourth step. The second command also prints the plan and the counters:

    [titan] ... symmplan - INFO - FSDP2: plan ...; algorithms: ...
    [titan] ... step 6: symmplan/segment_bytes ..., symmplan/plain 0, ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from symmplan.trainers.torchtitan import PlannedTrainer, planned

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


def plain() -> Trainer.Config:
    """Six steps; every second is validated, and saved."""
    config = llama3_debugmodel()
    config.hf_assets_path = "assets"
    texts = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path="assets/texts")
    config.dataloader = config.validator.dataloader = texts
    config.training.local_batch_size, config.training.seq_len = 2, 128
    config.training.steps, config.debug.seed = 6, 0
    config.validator.enable, config.validator.freq, config.validator.steps = True, 2, 2
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=2, folder="plain", last_save_model_only=False
    )
    return config


def with_symmplan() -> PlannedTrainer.Config:
    """The steps of `plain` with symmplan, and a folder of their own for what is saved."""
    config = planned(plain())
    config.checkpoint.folder = "with_symmplan"
    return config
