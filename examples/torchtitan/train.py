"""torchtitan's own trainer, its FSDP2 collectives in planned symmetric memory.

`PlannedTrainer` is all the wiring, for torchtitan 0.2; its options follow the script. Its debug
model on two GPUs, with the tokenizer and texts that `assets.py` makes, with and without symmplan:

    python examples/torchtitan/assets.py assets
    options="--model.name llama3 --model.flavor debugmodel --model.hf_assets_path assets
        --training.dataset c4_test --training.dataset_path assets/texts --debug.seed 0"
    torchrun --nproc-per-node 2 examples/torchtitan/train.py $options
    torchrun --nproc-per-node 2 -m torchtitan.train $options

Both print the same losses, and the first prints its plan:

    [titan] ... step:  1  loss: ...
    [titan] ... plan ...: 23 buffers in 1 segment, ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer, main

import symmplan

if TYPE_CHECKING:
    from torchtitan.config import JobConfig


class PlannedTrainer(Trainer):
    """Models are built and sharded in ``__init__``; ``close`` is called in the end."""

    def __init__(self, job_config: JobConfig) -> None:
        super().__init__(job_config)
        self.handles = [symmplan.fsdp.apply(part) for part in self.model_parts]

    def close(self) -> None:
        """Say what was planned, and give the memory back."""
        for handle in self.handles:
            if handle.planned and torch.distributed.get_rank() == 0:
                logger.info(handle.plan.summary())
            handle.remove()
        self.handles.clear()
        super().close()


if __name__ == "__main__":
    main(PlannedTrainer)
