"""A Mixtral of Hugging Face Transformers with its experts split over ranks, under FSDP2.

    torchrun --nproc-per-node 4 examples/experts/mixtral.py

Each pair of ranks splits the experts of each layer. FSDP2 shards a rank's experts over the two
ranks that have the same experts, and everything else over all four ranks. It prints

    alone    3.4800 3.4534 3.4619 3.4608
    symmplan 3.4800 3.4534 3.4619 3.4608
    <symmplan.expert_parallel: 2 ranks, at most 96 rows, 12544 bytes>

The first line has the losses of FSDP2 alone, with all experts on each rank.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import MixtralConfig, MixtralForCausalLM

import symmplan
from symmplan.trainers.experts import split_experts

TOKENS, STEPS = 24, 4
CONFIG = MixtralConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
)


def train(model: torch.nn.Module) -> list[float]:
    """The mean loss of all ranks in each step."""
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    for step in range(STEPS):
        seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(CONFIG.vocab_size, (1, TOKENS), generator=seed)
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def main() -> None:
    """What every rank runs."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replica", "experts"))
    everyone = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    alone = MixtralForCausalLM(CONFIG)
    model = copy.deepcopy(alone)

    rows = TOKENS * CONFIG.num_experts_per_tok  # that a rank sends
    group = mesh.get_group("experts")
    via = split_experts(model, group, max_tokens=2 * rows, padded=True, timeout=60.0)
    for layer in model.model.layers:
        experts = fully_shard(layer.mlp.experts, mesh=mesh["replica"])
        experts.set_gradient_divide_factor(world)  # each has the tokens of two ranks
        experts.set_force_sum_reduction_for_comms(True)  # gloo has no sums with a factor
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    handle = symmplan.fsdp.apply(model, timeout=60.0)
    losses = train(model)

    for layer in alone.model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(alone, mesh=everyone)
    expected = train(alone)
    if dist.get_rank() == 0:
        for name, found in (("alone   ", expected), ("symmplan", losses)):
            print(name, *(f"{loss:.4f}" for loss in found))
        print(via)
    handle.remove()
    dist.barrier()
    via.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
