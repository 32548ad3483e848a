"""The sides of `concurrent_groups.py`: two programs of two groups of the same ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import symmplan
from symmplan.errors import SymmplanError
from symmplan.launcher.rank_process import root_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.choose.choice import Choice

__all__ = ["FORCED", "TwoGroups"]

#: The algorithms that are forced, by program.
FORCED = {
    "compiled": ("placed", "copy engine", "ordinary"),
    "FSDP2": ("placed", "copy engine", "push", "ordinary"),
}
_WARM_UP = 4


class TwoGroups:
    """A program with one algorithm to choose.

    Args:
        program: ``"compiled"`` or ``"FSDP2"``.
        side: How its collectives are chosen; ``"plain"``: without symmplan.
        settings: Of the benchmark.
        groups: Over which it gathers, and over which it sums.
        x: Its input, on this rank.

    Raises:
        SymmplanError: There is no such side here.
    """

    def __init__(
        self,
        program: str,
        side: str,
        settings: dict[str, Any],
        groups: Sequence[Any],
        x: torch.Tensor,
    ) -> None:
        self._program = program
        self._run, self._chooser = _MAKERS[program](side, settings, groups, x)
        try:
            for _ in range(_WARM_UP):
                self()
        except Exception as error:  # noqa: BLE001
            self.end()
            root = root_of(error)
            raise (root if isinstance(root, SymmplanError) else error) from None

    def __call__(self, _turn: int = 0) -> torch.Tensor:
        """Run it once; returns what must be equal on all sides."""
        return self._run()

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What was measured."""
        return () if self._chooser is None else tuple(self._chooser.choices)

    def end(self) -> None:
        """Give back what it has."""
        if self._chooser is not None:
            (self._chooser.release if self._program == "compiled" else self._chooser.remove)()


def _compiled(
    side: Any, settings: dict[str, Any], groups: Sequence[Any], x: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], Any]:
    """A graph whose weights are gathered two layers ahead, and whose results are summed."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    size, width, inner = settings["ranks"], settings["width"], settings["inner"]
    shards = [_weights(width // size, width, generator).to(x) for _ in range(settings["layers"])]
    backend = None
    if side != "plain":
        # Copy engines are no property of gloo; there, collectives of the process group do as well.
        backend = symmplan.backend(inner, choose=side, timeout=60.0, collectives="process group")
    program = torch.compile(_layers, backend=backend or inner, fullgraph=True)
    return lambda: program(x, shards, size, *(g.group_name for g in groups)), backend


def _layers(
    x: torch.Tensor, shards: list[torch.Tensor], ranks: int, data: str, tensor: str
) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    gathers = [ops.all_gather_into_tensor(shard, ranks, data) for shard in shards[:2]]
    for i in range(len(shards)):
        weight = ops.wait_tensor(gathers[i])
        if i + 2 < len(shards):
            gathers.append(ops.all_gather_into_tensor(shards[i + 2], ranks, data))
        # Two sums beside each gather, as of attention and of what follows it.
        for _ in range(2):
            x = ops.wait_tensor(ops.all_reduce(torch.relu(x @ weight), "sum", tensor)) / ranks
    return x


def _sharded(
    side: Any, settings: dict[str, Any], groups: Sequence[Any], x: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], Any]:
    """FSDP2 with tensor-parallel sums over another group, a step forward and backward."""
    generator = torch.Generator().manual_seed(0)
    blocks = [
        _SummedBlock(settings["width"], generator, groups[1]) for _ in range(settings["layers"])
    ]
    model: Any = nn.Sequential(*blocks).to(x)
    mesh = DeviceMesh.from_group(groups[0], x.device.type)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    handle = None
    if side != "plain":
        handle = symmplan.fsdp.apply(model, choose=side, timeout=60.0)

    def step() -> torch.Tensor:
        out = model(x)
        (out.float().pow(2).sum() / out.numel()).backward()
        grads = [p.grad.to_local().float().norm() for p in model.parameters()]
        model.zero_grad()
        return torch.cat([out.detach().flatten()[:1024].float(), torch.stack(grads)])

    return step, handle


class _SummedBlock(nn.Module):
    """Two times two products whose second sums over a group, as a tensor-parallel layer has."""

    def __init__(self, width: int, generator: torch.Generator, group: Any) -> None:
        super().__init__()
        self.group = group
        self.weights = nn.ParameterList(_weights(width, width, generator) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.weights[::2], self.weights[1::2], strict=True):
            hidden = torch.relu(_sum(x, self.group, False, True) @ up)
            x = x + _sum(hidden @ down, self.group, True, False) / self.group.size()
        return x


class _GroupSum(torch.autograd.Function):
    """Results, or gradients, are summed over a group."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Any, results: bool, gradients: bool
    ) -> torch.Tensor:
        ctx.group = group if gradients else None
        return _summed(x, group) if results else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (grad if ctx.group is None else _summed(grad, ctx.group)), None, None, None


_sum: Any = _GroupSum.apply


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    total: torch.Tensor = x.clone()
    dist.all_reduce(total, group=group)
    return total


def _weights(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    scale: float = columns**-0.5
    return torch.randn(rows, columns, generator=generator) * scale


_MAKERS = {"compiled": _compiled, "FSDP2": _sharded}
