"""The steps that `symmplan bench fsdp --model llama --sequence 4096` takes, to be simulated.

    symmplan simulate tests/helpers/llama_steps.py:train --ranks 2
    WORDS=32768 symmplan simulate tests/helpers/llama_steps.py:train --ranks 2
    COMPILE=1 OPTIMIZER=1 symmplan simulate tests/helpers/llama_steps.py:train --ranks 2

12 layers of Llama 3 8B with 4,096 tokens in bfloat16; ``WORDS`` is the vocabulary of an embedding
and a head, 0 for neither.
"""

from __future__ import annotations

import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import symmplan
from symmplan.bench.parts.llama import Llama, parts

TOKENS, DIM = 4096, 4096


def steps(count, words=0, *, compiled=False, optimized=False, capacity=None):
    """Take steps; yields behind each."""
    model = Llama(12, DIM, words)
    if compiled:
        for layer in model.layers:
            layer.compile()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    for part in (*parts(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters()) if optimized else None
    symmplan.fsdp.apply(model, capacity=capacity)
    for _ in range(count):
        if words:
            x = torch.randint(words, (1, TOKENS))
        else:
            x = torch.randn(1, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
        made = model(x).float()
        if words:
            loss = functional.cross_entropy(made.flatten(0, 1), x.roll(-1, 1).flatten())
        else:
            loss = made.pow(2).mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        yield


def train():
    """Two steps of what the environment asks for."""
    words = int(os.environ.get("WORDS", "0"))
    given = {"compiled": "COMPILE" in os.environ, "optimized": "OPTIMIZER" in os.environ}
    for _ in steps(2, words, **given):
        pass
