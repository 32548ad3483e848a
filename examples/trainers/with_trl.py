"""TRL's `SFTTrainer`, first with all parameters and then with LoRA's: one callback.

`torchrun --nproc-per-node 2 examples/trainers/with_trl.py`, on two GPUs, prints

    {'loss': ...
    alone    4.877 4.858 4.837 4.826 4.815 4.849 | evaluated 4.675 4.657 4.656
    ...
"""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from symmplan.trainers import SymmplanCallback, watched

words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(127)} | {"end": 127}, "end"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
special = dict.fromkeys(("eos_token", "pad_token"), "end")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
texts = [" ".join(f"w{i * j % 127}" for j in range(16)) for i in range(48)]


def train(name: str, *, planned: bool, lora: LoraConfig | None, resume: str | None = None) -> None:
    """Six steps of two micro-batches; evaluated after every second, saved after the fourth."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_attention_heads=4, **sizes))
    data, callback = Dataset.from_dict({"text": texts}), SymmplanCallback()
    options = {"max_steps": 6, "logging_steps": 1, "eval_steps": 2, "save_steps": 4, "bf16": False}
    options |= {"eval_strategy": "steps", "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    options |= {"gradient_accumulation_steps": 2, "disable_tqdm": True, "report_to": "none"}
    args = SFTConfig("with_lora" if lora else "with_trl", fsdp=True, **options)
    options = {"processing_class": tokenizer, "peft_config": lora, "train_dataset": data}
    options |= {"callbacks": [callback] if planned else []}  # the one line
    trainer = SFTTrainer(model, args, eval_dataset=data.select(range(8)), **options)
    trainer.train(resume_from_checkpoint=resume)
    entries = [e for e in trainer.state.log_history if resume is None or e["step"] > 4]
    losses = [f"{entry['loss']:.3f}" for entry in entries if "loss" in entry]
    evaluated = [f"{entry['eval_loss']:.3f}" for entry in entries if "eval_loss" in entry]
    if trainer.is_world_process_zero():
        print(f"{name:<8}", *losses, "| evaluated", *evaluated)
        if planned:
            print(watched(callback.handle))


for lora in (None, LoraConfig(task_type="CAUSAL_LM", r=4)):
    saved = "with_lora/checkpoint-4" if lora else "with_trl/checkpoint-4"
    train("alone", planned=False, lora=lora)
    train("symmplan", planned=True, lora=lora)
    train("resumed", planned=True, lora=lora, resume=saved)
torch.distributed.destroy_process_group()
