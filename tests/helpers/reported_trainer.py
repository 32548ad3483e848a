"""A trainer that reports to TensorBoard, fails and trains again: for `test_hugging_face.py`.

torchrun --nproc-per-node 2 tests/helpers/trainers.py tests/helpers/reported_trainer.py
"""

from __future__ import annotations

import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from symmplan.trainers import SymmplanCallback


class Failing(TrainerCallback):
    """Fails in the third step of the first training."""

    failed = False

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3 and not self.failed:
            self.failed = True
            raise RuntimeError("the disk is full")


def main():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes))
    data = [{"input_ids": text, "labels": text} for text in torch.randint(64, (48, 8))]
    options = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments("out", fsdp=True, report_to="tensorboard", **options)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[Failing()])
    callback = SymmplanCallback(trainer, choose="push")
    trainer.add_callback(callback)
    said = {}
    try:
        trainer.train()
    except RuntimeError as error:
        said["error"] = str(error)
        said["failed"] = repr(callback.handle)
        first = callback.handle
    trainer.train()
    said["first"] = repr(first)
    said["again"] = callback.handle is not first
    said["ended"] = repr(callback.handle)
    said["order"] = [type(c).__name__ for c in trainer.callback_handler.callbacks]
    said["entries"] = trainer.state.log_history
    said["algorithms"] = callback.handle.algorithms
    if trainer.is_world_process_zero():
        print("said", json.dumps(said))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
