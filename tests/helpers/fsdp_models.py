"""Small models under FSDP2, trained twice on each rank: plainly, and with symmplan.

`both` is the oracle of every test of `symmplan.fsdp`: the same program on the same data, once with
FSDP2's own collectives, once in planned placements; every loss, gradient and parameter of every
step must have the same bits. `same` and `check` judge what it returns.
"""

from __future__ import annotations

import contextlib

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils import _pytree as pytree

import symmplan
from symmplan.device import device_of
from symmplan.process import PROCESS

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


class Words(Net):
    """Begins with an embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, DIM)

    def forward(self, x):
        return super().forward(x + self.words((x[:, 0] * 7).long().abs() % 8))


def synchronize():
    """FSDP2's gathers wait for what was queued before the last forward pass, and for nothing since.

    They may read shards that are written after that at any moment.
    """
    device_of(torch.device(DEVICE[0])).synchronize()


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


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def update(model, optimizer, trace, step):
    """What follows the backward passes of a step."""
    trace.grads(model, step)
    optimizer.step()
    optimizer.zero_grad()


def train_step(model, optimizer, trace, step, rank):
    """Forward, backward, optimizer."""
    loss = model(batch(step, rank)).float().pow(2).mean()
    loss.backward()
    trace.add(f"{step}.loss", loss)
    update(model, optimizer, trace, step)


def train(model, trace, rank, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        train_step(model, optimizer, trace, step, rank)
    trace.parameters(model)


def changing(change, steps=5):
    """A program: ``change(model, step, trace, rank)`` before each step."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(steps):
            change(model, step, trace, rank)
            train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    return program


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
        result["cached"] = len(PROCESS.cache)  # segments that may serve again
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


class Stop(BaseException):
    """Like KeyboardInterrupt."""


def stop(*_):
    """A hook that ends a pass in the middle."""
    raise Stop


@contextlib.contextmanager
def hooked(block, where, hook):
    """``hook`` runs at a moment of a pass through a block."""
    handle = {
        "forward": block.down.register_forward_hook,
        "before backward": block.down.register_full_backward_pre_hook,
        "backward": block.up.register_full_backward_hook,
    }[where](hook)
    try:
        yield
    finally:
        handle.remove()


def needs(name, owner=FSDPModule):
    """Skip where this torch lacks something."""
    return pytest.mark.skipif(not hasattr(owner, name), reason=f"this torch has no {name}")


def cases_of():
    """A list for `pytest.mark.parametrize`, and what marks a program with its cases in it.

    ``@mark(*args)`` above a program is one case: the program is called with ``args``.
    """
    cases = []

    def mark(*args, marks=()):
        def marked(program):
            # The first case stands on top, and is noted last.
            at = [i for i, case in enumerate(cases) if case.values[0] is program]
            cases.insert(min(at, default=len(cases)), pytest.param(program, args, marks=marks))
            return program

        return marked

    return cases, mark


def same(results, **wanted):
    """Same bits on every rank; ``wanted`` says how often something was counted."""
    for result in results:
        assert result["differences"] == []
        assert result["stats"]["served"] > 0
        for name, count in wanted.items():
            assert result["stats"][name] == count, result["stats"]
    return results


def check(results, *, plain=0, copies=0, replans=0, rendezvous=1, reordered=0):
    """Same bits on every rank, and how the collectives were served.

    A number must be met exactly; None leaves it open. A segment that devices have kept of an
    earlier program may serve again, and has met its group already.
    """
    for result in results:
        assert result["differences"] == []
        stats = result["stats"]
        assert stats["served"] > 0
        assert stats["placed"] == stats["bound"]
        assert result["barriers"] == 0
        for name, wanted in {
            "plain": plain,
            "copies": copies,
            "replans": replans,
            "rendezvous": rendezvous,
            "reordered": reordered,
        }.items():
            saved = name == "rendezvous" and result.get("cached", 0) > 0
            less = saved and stats[name] < wanted
            assert wanted is None or less or stats[name] == wanted, (name, stats)
        peak, bound, _ = result["bytes"]
        assert peak == bound
    first, *others = (result["stats"] for result in results)
    for other in others:
        apart = {n: (x, other[n]) for n, x in first.items() if x != other[n]}
        assert all("beyond" in name or "owner" in name for name in apart), apart  # measured
    return first


# A weight that FSDP2 gathers as bytes and a scale, through the extensions that float8 uses.

_aten = torch.ops.aten
#: Ops that keep the weight a `_Quantized`; all others give its plain tensor.
_KEEP = {
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
    _aten.clone.default,
    _aten.detach.default,
}


class _Quantized(torch.Tensor):
    """A float32 shard that is gathered as one byte per element, and one scale per rank."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    def __init__(self, tensor):
        self._plain = tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t._plain, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func not in _KEEP:
            return result
        return pytree.tree_map_only(torch.Tensor, cls, result)

    def __tensor_flatten__(self):
        return ["_plain"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return _Quantized(inner["_plain"])

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        scale = self._plain.abs().max().clamp(min=1e-6) / 127
        quantized = (self._plain / scale).round().to(torch.int8)
        return (quantized, scale.reshape(1)), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        quantized, scales = outputs
        parts = quantized.chunk(scales.numel())
        whole = torch.cat([p.float() * s for p, s in zip(parts, scales, strict=True)])
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (quantized, scales)


def quantized(linear: nn.Linear) -> None:
    """Make the weight of ``linear`` one that is gathered in bytes."""
    linear.weight = nn.Parameter(_Quantized(linear.weight.detach()))
