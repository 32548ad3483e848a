"""How much memory a rank of a mixture of experts needs, found on a laptop: no GPU, no cluster.

    python examples/simulate_moe.py                                     # 16 ranks, seconds
    MOE=671B EP=64 symmplan simulate examples/simulate_moe.py:train --ranks 2048 --rank 17

Each layer's experts are split over ``EP`` ranks. FSDP2 shards them over the ranks that have the
same experts, and the rest of the layer over all ranks. Layers are recomputed in backward, so no
layer keeps the rows that its experts receive. ``train`` is an ordinary training script. Without
values the number of rows is not known, so the simulation assumes the worst case,
``max_tokens`` of `symmplan.expert_parallel`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from attrs import frozen
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import symmplan


@frozen
class Config:
    """A configuration; the larger one has the sizes of DeepSeek-V3's experts."""

    dim: int
    layers: int
    hidden: int  # of one expert
    experts: int
    top_k: int
    sequence: int


CONFIGS = {
    "debug": Config(256, 4, 512, 16, 2, 512),
    "671B": Config(7168, 58, 2048, 256, 8, 4096),
}
DEVICE = "cpu"


class Experts(nn.Module):
    """This rank's experts, each a SwiGLU; rows come sorted by expert, in equal parts at most."""

    def __init__(self, c: Config, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, c.dim, c.hidden))
        self.w2 = nn.Parameter(torch.empty(count, c.hidden, c.dim))
        self.w3 = nn.Parameter(torch.empty(count, c.dim, c.hidden))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Shapes: rows x dim, in and out."""
        count = self.w1.shape[0]
        room = -(-rows.shape[0] // count)
        parts = F.pad(rows, (0, 0, 0, room * count - rows.shape[0])).view(count, room, -1)
        made = torch.bmm(F.silu(torch.bmm(parts, self.w1)) * torch.bmm(parts, self.w3), self.w2)
        return made.flatten(0, 1)[: rows.shape[0]]


class Layer(nn.Module):
    """A gate, experts on all ranks of the group, and a product that stands for attention."""

    def __init__(self, c: Config, via: Any, ranks: int) -> None:
        super().__init__()
        self.c, self.via, self.ranks = c, via, ranks
        self.mix = nn.Linear(c.dim, c.dim, bias=False)
        self.norm = nn.RMSNorm(c.dim)
        self.gate = nn.Linear(c.dim, c.experts, bias=False)
        self.experts = Experts(c, c.experts // ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: tokens x dim, in and out."""
        x = x + self.mix(x)
        h = self.norm(x)
        weight, expert = self.gate(h).softmax(-1).topk(self.c.top_k)
        order = expert.flatten().argsort(stable=True)  # by expert, and so by rank
        counts = F.one_hot(expert.flatten(), self.c.experts).sum(0).view(self.ranks, -1).sum(1)
        routes = self.via.routes(counts)
        inside = self.via.dispatch(h[order // self.c.top_k], routes)
        outside = self.via.combine(self.experts(inside), routes)
        back = torch.zeros_like(outside).index_copy(0, order, outside)
        return x + (back.view(*weight.shape, -1) * weight.unsqueeze(-1)).sum(1)


def train() -> None:
    """One step, on a mesh of replicas of the experts x ranks that share them."""
    c = CONFIGS[os.environ.get("MOE", "debug")]
    shared = int(os.environ.get("EP", "8"))
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh(DEVICE, (world // shared, shared), mesh_dim_names=("replica", "ep"))
    everyone = init_device_mesh(DEVICE, (world,))
    rows = c.sequence * c.top_k  # that a rank sends
    via = symmplan.expert_parallel(mesh.get_group("ep"), max_tokens=int(1.25 * rows))
    with torch.device("meta"):
        layers = [Layer(c, via, shared) for _ in range(c.layers)]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [checkpoint_wrapper(layer) for layer in layers]
    for layer in layers:
        fully_shard(layer.experts, mesh=mesh["replica"], mp_policy=policy)
        fully_shard(layer, mesh=everyone, mp_policy=policy)
    model = nn.Sequential(*layers)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    model.to_empty(device=DEVICE)
    symmplan.fsdp.apply(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(
        torch.randn(c.sequence, c.dim, device=DEVICE, dtype=torch.bfloat16)
    ).float().square().mean().backward()
    optimizer.step()
    via.release()


if __name__ == "__main__":
    report = symmplan.simulate(train, ranks=16, rank=5, memory="nccl")
    print(report.summary())
