"""Hugging Face's `Trainer`: one callback.

`torchrun --nproc-per-node 2 examples/trainers/with_transformers.py`, on two GPUs, prints

    {'loss': ...
    alone    4.881 4.878 4.868 4.876 4.882 4.840 | evaluated 4.702 4.677 4.667
    {...
    symmplan 4.881 4.878 4.868 4.876 4.882 4.840 | evaluated 4.702 4.677 4.667
    {... 'symmplan/plain': 0, ... 'symmplan/flat': 0, 'symmplan/algorithms/symmetric': ...}
    ...
    resumed  4.882 4.840 | evaluated 4.667
    ...
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from symmplan.trainers import SymmplanCallback, watched


def train(name: str, callback: SymmplanCallback | None = None, resume: str | None = None) -> None:
    """Six steps of two micro-batches; evaluated after every second, saved after the fourth."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_attention_heads=4, **sizes))
    data = [{"input_ids": text, "labels": text} for text in torch.randint(128, (48, 16))]
    options = {"max_steps": 6, "logging_steps": 1, "eval_steps": 2, "save_steps": 4}
    options |= {"eval_strategy": "steps", "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    options |= {"gradient_accumulation_steps": 2, "disable_tqdm": True, "report_to": "none"}
    args = TrainingArguments("with_transformers", fsdp=True, **options)
    callbacks = [] if callback is None else [callback]  # the one line
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    entries = [e for e in trainer.state.log_history if resume is None or e["step"] > 4]
    losses = [f"{entry['loss']:.3f}" for entry in entries if "loss" in entry]
    evaluated = [f"{entry['eval_loss']:.3f}" for entry in entries if "eval_loss" in entry]
    if trainer.is_world_process_zero():
        print(f"{name:<8}", *losses, "| evaluated", *evaluated)
        if callback is not None:
            print(watched(callback.handle))


train("alone")
train("symmplan", SymmplanCallback())
train("resumed", SymmplanCallback(), "with_transformers/checkpoint-4")
torch.distributed.destroy_process_group()
