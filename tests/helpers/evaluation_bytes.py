"""Bytes of FSDP2's plan before and after evaluations, in programs of the shape of three trainers.

`torchrun --nproc-per-node 2 tests/helpers/evaluation_bytes.py` prints a row for each program: the
bytes of the plan of training steps, of the last plan, and the most unsharded bytes that the program
has at once, as FSDP2 unshards them.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import symmplan

LAYERS, WIDTH, WORDS = 32, 64, 128


class Model(nn.Module):
    """Residual blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of tokens."""
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def sharded(*, embedding: bool, keep_last: bool) -> Model:
    """The model with one FSDP module for each block, and one for the tail."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    for number, block in enumerate(model.blocks):
        kept = keep_last and number == LAYERS - 1
        fully_shard(block, mesh=mesh, reshard_after_forward=not kept)
    if embedding:
        fully_shard(model.embed, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def at_once(models: nn.Module) -> int:
    """Bytes of the parameters that are unsharded now."""
    found = 0
    for module in models.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if group.is_unsharded:
                    found += sum(p._orig_size.numel() * 4 for p in group.fsdp_params)
    return found


def measured(name: str, model: Model, reference: Model | None, *, evaluates: bool) -> None:
    """Train four steps, with an evaluation behind the second and the third; print a row."""
    both = nn.ModuleList([m for m in (model, reference) if m is not None])
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, at_once(both))

    for module in both.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            module.register_forward_pre_hook(look)
            if module.weight.requires_grad:
                module.register_full_backward_pre_hook(look)
    handle = symmplan.fsdp.apply(both)
    before = 0
    for step in range(4):
        tokens = torch.randint(WORDS, (4, 6))
        with torch.no_grad():
            target = 0.0 if reference is None else reference(tokens)
        (model(tokens) - target).square().mean().backward()
        model.zero_grad()
        if step == 0:
            handle.freeze()
        before = before or handle.plan.peak_bytes
        if evaluates and step > 0:
            with torch.no_grad():
                model(tokens)
    if dist.get_rank() == 0:
        sys.stdout.write(f"| {name} | {before:,} | {handle.plan.peak_bytes:,} | {most:,} |\n")
    handle.remove()


def main() -> None:
    """Print the table."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        sys.stdout.write("| program | before | after | unsharded at once |\n")
        sys.stdout.write("| --- | --- | --- | --- |\n")
    accelerate = sharded(embedding=True, keep_last=False)
    measured("Trainer, evaluates", accelerate, None, evaluates=True)
    reference = sharded(embedding=True, keep_last=False).requires_grad_(requires_grad=False)
    policy = sharded(embedding=True, keep_last=False)
    measured("DPO with a reference model", policy, reference, evaluates=True)
    titan = sharded(embedding=True, keep_last=True)
    measured("torchtitan, validates", titan, None, evaluates=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
