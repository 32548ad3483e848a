"""Small models under FSDP2, trained twice on each rank: plainly, and with symmplan.

`both` is the oracle of every test of `symmplan.fsdp`: the same program on the same data, once with
FSDP2's own collectives, once in planned placements; every loss, gradient and parameter of every
step must have the same bits.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DIM = 16
#: What `both` passes to `symmplan.fsdp.apply` unless told otherwise.
CHOOSE = ["placed"]
#: Where models and data lie unless told otherwise.
DEVICE = ["cpu"]


class Block(nn.Module):
    """A residual MLP; the widths differ from block to block, so that placements do."""

    def __init__(self, dim=DIM, hidden=2 * DIM):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks between two linear layers that belong to the root."""

    def __init__(self, blocks=3, dim=DIM, tied=False):
        super().__init__()
        self.inlet = nn.Linear(dim, dim, bias=False)
        self.blocks = nn.ModuleList(Block(dim, (2 + i) * dim) for i in range(blocks))
        self.outlet = nn.Linear(dim, dim, bias=False)
        if tied:
            self.outlet.weight = self.inlet.weight
        self.order = list(range(blocks))

    def forward(self, x):
        x = self.inlet(x)
        for i in self.order:
            x = self.blocks[i](x)
        return self.outlet(x)


def mesh(*shape, names=None, device=None):
    return init_device_mesh(device or DEVICE[0], shape, mesh_dim_names=names)


def shard(model, root=True, **options):
    """``fully_shard`` each block and, unless told otherwise, the root."""
    options.setdefault("mesh", mesh(dist.get_world_size()))
    for block in model.blocks:
        fully_shard(block, **options)
    if root:
        fully_shard(model, **options)
    return model


def batch(step, rank, dim=DIM, device=None):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, dim, generator=generator).to(device or DEVICE[0])


def local(tensor):
    """A DTensor's own part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Trace:
    """Everything that must be equal."""

    def __init__(self):
        self.items = []

    def add(self, name, tensor):
        self.items.append((name, local(tensor.detach()).clone()))

    def grads(self, model, step):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.add(f"{step}.{name}.grad", parameter.grad)

    def parameters(self, model):
        for name, parameter in model.named_parameters():
            self.add(name, parameter)


def differences(left, right, close=0.0):
    """Names of what differs between two traces, or differs by more than ``close``."""
    if [n for n, _ in left.items] != [n for n, _ in right.items]:
        return ["the programs traced different things"]
    return [
        n
        for (n, a), (_, b) in zip(left.items, right.items, strict=True)
        if a.dtype != b.dtype
        or a.shape != b.shape
        or not (torch.equal(a, b) or torch.allclose(a, b, close, close, equal_nan=True))
    ]


def train_step(model, optimizer, trace, step, rank):
    """Forward, backward, optimizer."""
    loss = model(batch(step, rank)).float().pow(2).mean()
    loss.backward()
    trace.add(f"{step}.loss", loss)
    trace.grads(model, step)
    optimizer.step()
    optimizer.zero_grad()


def train(model, trace, rank, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        train_step(model, optimizer, trace, step, rank)
    trace.parameters(model)


@contextlib.contextmanager
def removed(handle):
    try:
        yield handle
    finally:
        handle.remove()


def both(build, program, rank, look=None, close=0.0, **apply):
    """Run ``program(model, trace, rank)`` on two equal models; see the module.

    Args:
        build: Makes the sharded model.
        program: Trains it.
        rank: This rank.
        look: Called with the handle before it is removed; its result is returned, too.
        close: Tolerance for sums over more than two ranks, where the order of summing counts.
        apply: Arguments of `symmplan.fsdp.apply`.

    Returns:
        ``{"differences": [...], "stats": {...}, "looked": ...}``.
    """
    import attrs

    import symmplan

    traces = []
    result = {}
    for planned in (False, True):
        torch.manual_seed(7)
        model = build()
        trace = Trace()
        traces.append(trace)
        if not planned:
            program(model, trace, rank)
            continue
        apply.setdefault("choose", CHOOSE[0])
        apply.setdefault("timeout", 30.0)
        with removed(symmplan.fsdp.apply(model, **apply)) as handle:
            program(model, trace, rank)
            result["stats"] = attrs.asdict(handle.stats)
            result["stats"]["reasons"] = dict(handle.stats.reasons)
            plan = handle.plan
            result["bytes"] = (plan.peak_bytes, plan.lower_bound_bytes, plan.unshared_bytes)
            result["barriers"] = len(plan.barriers)
            result["segments"] = len(plan.segments)
            result["looked"] = None if look is None else look(handle)
    result["differences"] = differences(*traces, close)
    return result
