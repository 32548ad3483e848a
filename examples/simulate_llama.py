"""How much memory a rank of a Llama run needs, found on a laptop: no GPU, no cluster.

    python examples/simulate_llama.py                                     # a small one, seconds
    LLAMA=405B MESH=1,512,8 symmplan simulate examples/simulate_llama.py:train --ranks 4096
    LLAMA=405B MESH=8,64,8 symmplan simulate examples/simulate_llama.py:train --ranks 4096 --rank 17

The model and its parallelism follow torchtitan's Llama 3: sequence-parallel tensor parallelism,
FSDP2 for each block, pipeline stages. ``train`` is an ordinary training script. Only its device is
special: it is "cpu", because there is no GPU.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import symmplan


@frozen
class Llama:
    """A configuration, as torchtitan has them."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    sequence: int


CONFIGS = {
    "debug": Llama(256, 4, 8, 8, 768, 2048, 512),
    "8B": Llama(4096, 32, 32, 8, 14336, 128256, 8192),
    "405B": Llama(16384, 126, 128, 8, 53248, 128256, 8192),
}
DEVICE = "cpu"


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, c: Llama) -> None:
        super().__init__()
        self.size = c.dim // c.heads
        self.groups = c.heads // c.kv_heads
        self.wq = nn.Linear(c.dim, c.heads * self.size, bias=False)
        self.wk = nn.Linear(c.dim, c.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(c.dim, c.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(c.heads * self.size, c.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: batch x sequence x dim, in and out."""
        q, k, v = (
            w(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Llama) -> None:
        super().__init__()
        self.w1 = nn.Linear(c.dim, c.hidden, bias=False)
        self.w2 = nn.Linear(c.hidden, c.dim, bias=False)
        self.w3 = nn.Linear(c.dim, c.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: batch x sequence x dim, in and out."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A transformer block, recomputed in the backward pass."""

    def __init__(self, c: Llama) -> None:
        super().__init__()
        self.attention = Attention(c)
        self.feed_forward = FeedForward(c)
        self.attention_norm = nn.RMSNorm(c.dim)
        self.ffn_norm = nn.RMSNorm(c.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: batch x sequence x dim, in and out."""
        return checkpoint(self._forward, x, use_reentrant=False)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Some layers of a Llama, with the embeddings and the output if they are the first or last."""

    def __init__(self, c: Llama, layers: range) -> None:
        super().__init__()
        first, last = layers.start == 0, layers.stop == c.layers
        self.tok_embeddings = nn.Embedding(c.vocabulary, c.dim) if first else None
        self.layers = nn.ModuleDict({str(i): Block(c) for i in layers})
        self.norm = nn.RMSNorm(c.dim) if last else None
        self.output = nn.Linear(c.dim, c.vocabulary, bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: batch x sequence (x dim) to batch x sequence x dim, or x vocabulary."""
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for block in self.layers.values():
            x = block(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x)


def apply_tp(model: Transformer, mesh: DeviceMesh) -> None:
    """Sequence-parallel tensor parallelism: between blocks, activations are sharded by sequence."""
    shard, whole = Shard(1), Replicate()
    outside: dict[str, object] = {}
    if model.tok_embeddings is not None:
        outside["tok_embeddings"] = RowwiseParallel(input_layouts=whole, output_layouts=shard)
    if model.output is not None:
        outside["norm"] = SequenceParallel()
        outside["output"] = ColwiseParallel(input_layouts=shard, output_layouts=whole)
    parallelize_module(model, mesh, outside)
    for block in model.layers.values():
        gather = PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(whole,))
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": gather,
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=shard),
            "ffn_norm": SequenceParallel(),
            "feed_forward": gather,
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=shard),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def apply_fsdp(model: Transformer, mesh: DeviceMesh) -> None:
    """Each block is gathered in bfloat16 and reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def build(c: Llama, layers: range, mesh: DeviceMesh) -> Transformer:
    """Some layers on this rank, without initial values."""
    with torch.device("meta"):
        model = Transformer(c, layers)
    if mesh["tp"].size() > 1:
        apply_tp(model, mesh["tp"])
    apply_fsdp(model, mesh["dp"])
    model.to_empty(device=DEVICE)
    symmplan.fsdp.apply(model)
    return model


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(0, 1))


def train() -> None:
    """One step, on a mesh of pipeline stages x shards x tensor-parallel ranks.

    With -1 there are as many shards as the world has room for.
    """
    c = CONFIGS[os.environ.get("LLAMA", "debug")]
    pp, dp, tp = (int(n) for n in os.environ.get("MESH", "2,4,2").split(","))
    dp = dist.get_world_size() // (pp * tp) if dp == -1 else dp
    mesh = init_device_mesh(DEVICE, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    if pp == 1:
        model = build(c, range(c.layers), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(c.vocabulary, (1, c.sequence), device=DEVICE)
        loss_of(model(tokens), tokens).backward()
        optimizer.step()
        return
    rank = mesh.get_local_rank("pp")
    count, micro = 2 * pp, pp
    stages, models = [], []
    for index in range(rank, count, pp):
        begin, end = (c.layers * i // count for i in (index, index + 1))
        model = build(c, range(begin, end), mesh)
        models.append(model)
        hidden = torch.empty(1, c.sequence // tp, c.dim, dtype=torch.bfloat16, device=DEVICE)
        hidden.requires_grad_()
        first, last = index == 0, index == count - 1
        tokens = torch.empty(1, c.sequence, dtype=torch.int64, device=DEVICE)
        logits = torch.empty(1, c.sequence, c.vocabulary, dtype=torch.bfloat16, device=DEVICE)
        stages.append(
            PipelineStage(
                model,
                index,
                count,
                torch.device(DEVICE),
                input_args=tokens if first else hidden,
                output_args=logits.requires_grad_() if last else hidden,
                group=mesh.get_group("pp"),
            )
        )
    schedule = ScheduleInterleaved1F1B(stages, micro, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
    tokens = torch.randint(c.vocabulary, (micro, c.sequence), device=DEVICE)
    given = (tokens,) if rank == 0 else ()
    schedule.step(*given, **({"target": tokens} if rank == pp - 1 else {}))
    optimizer.step()


if __name__ == "__main__":
    report = symmplan.simulate(train, ranks=16, rank=5, memory="nccl")
    print(report.summary())
