"""A small mixture of experts, trained expert-parallel on two ranks of this machine.

    python examples/moe.py

Each rank has one half of the experts. A token goes to the rank of the expert that its gate chose,
and its result comes back. All layers use one segment of symmetric memory, which is planned for the
largest number of rows that a rank may receive. If a gate sends more rows to one rank, all ranks
plan again.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import symmplan

WIDTH, EXPERTS, TOKENS, LAYERS = 32, 4, 64, 3


class MoE(nn.Module):
    """A layer with a gate and this rank's experts."""

    def __init__(self, via: Any, experts: range) -> None:
        super().__init__()
        self.via = via
        self.mine = experts
        self.gate = nn.Linear(WIDTH, EXPERTS)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]  # the same on all ranks
        self.experts = nn.ModuleList(layers[i] for i in experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each token through the expert that its gate likes best."""
        weight, expert = self.gate(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)  # by expert, and so by rank
        counts = expert.bincount(minlength=EXPERTS).view(-1, len(self.mine)).sum(1)
        routes = self.via.routes(counts)
        inside = self.via.dispatch(x[order], routes)
        kinds = self.via.dispatch(expert[order].to(x.dtype).view(-1, 1), routes).view(-1)
        made = torch.zeros_like(inside)
        for number, module in zip(self.mine, self.experts, strict=True):
            at = (kinds == number).nonzero().view(-1)
            made = made.index_add(0, at, torch.relu(module(inside[at])))
        outside = torch.zeros_like(x).index_copy(0, order, self.via.combine(made, routes))
        return x + weight.unsqueeze(-1) * outside


def train(rank: int, world_size: int, store: str) -> None:
    """What every rank runs."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    half = EXPERTS // world_size
    mine = range(rank * half, (rank + 1) * half)
    capacity = int(1.25 * TOKENS)
    with symmplan.expert_parallel(max_tokens=capacity, timeout=60.0) as via:
        torch.manual_seed(0)
        model = nn.Sequential(*(MoE(via, mine) for _ in range(LAYERS)))
        torch.manual_seed(0)
        whole = nn.Sequential(*(MoE(_Alone(), range(EXPERTS)) for _ in range(LAYERS)))
        steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole)]
        for number in range(5):
            generator = torch.Generator().manual_seed(number)
            batch = torch.randn(world_size, TOKENS, WIDTH, generator=generator)
            loss = model(batch[rank]).square().mean()
            loss.backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is None:  # nobody chose that expert
                    parameter.grad = torch.zeros_like(parameter)
                if "experts" not in name:
                    dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            sum(whole(part).square().mean() for part in batch).div(world_size).backward()
            for step in steps:
                step.step()
                step.zero_grad()
            expected = whole(batch[rank])
            torch.testing.assert_close(model(batch[rank]), expected, rtol=1e-4, atol=1e-4)
        if rank == 0:
            print(f"loss {loss.item():.4f}")
            print(via, via.stats)
        dist.barrier()
    dist.destroy_process_group()


class _Alone:
    """The model on a rank that has all experts."""

    def routes(self, _counts: torch.Tensor) -> None:
        return None

    def dispatch(self, rows: torch.Tensor, _routes: None) -> torch.Tensor:
        return rows

    combine = dispatch


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(train, args=(2, f"{directory}/store"), nprocs=2)
