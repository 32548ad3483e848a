"""The sides of ``symmplan bench company``: two programs of two groups of the same ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import symmplan
from symmplan.errors import SymmplanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.place.choice import Choice

__all__ = ["FORCED", "PROGRAMS"]

#: The ways that are forced, by program.
FORCED = {
    "compiled": ("placed", "copy engine", "ordinary"),
    "FSDP2": ("placed", "copy engine", "push", "ordinary"),
}
_WARM_UP = 4


class Compiled:
    """A graph whose weights are gathered two layers ahead, and whose results are summed.

    Args:
        side: How its collectives are chosen.
        options: Of the benchmark.
        groups: Over which it gathers, and over which it sums.
        x: Its input, on this rank.

    Raises:
        SymmplanError: There is no such side here.
    """

    def __init__(
        self, side: str, options: dict[str, Any], groups: Sequence[Any], x: torch.Tensor
    ) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        size, width = options["ranks"], options["width"]
        self._shards = [
            _weights(width // size, width, generator).to(x) for _ in range(options["layers"])
        ]
        self._args = size, *(g.group_name for g in groups)
        self._x = x
        # Copy engines are no property of gloo; there, collectives of the process group do as well.
        self._backend = (
            None
            if side == "plain"
            else symmplan.backend(
                options["inner"], choose=side, timeout=60.0, collectives="process group"
            )
        )
        self._program = torch.compile(
            _layers, backend=self._backend or options["inner"], fullgraph=True
        )
        try:
            for _ in range(_WARM_UP):
                self()
        except torch._dynamo.exc.BackendCompilerFailed as error:
            inner = getattr(error, "inner_exception", error)
            raise (inner if isinstance(inner, SymmplanError) else error) from None

    def __call__(self) -> torch.Tensor:
        """Run it once; returns what must be equal on all sides."""
        result: torch.Tensor = self._program(self._x, self._shards, *self._args)
        return result

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What was measured."""
        return () if self._backend is None else self._backend.choices

    def end(self) -> None:
        """Give back what it has."""
        if self._backend is not None:
            self._backend.release()


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


class Sharded:
    """FSDP2 with tensor-parallel sums over another group, a step forward and backward.

    Args and errors as of `Compiled`.
    """

    def __init__(
        self, side: str, options: dict[str, Any], groups: Sequence[Any], x: torch.Tensor
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        blocks = [_Block(options["width"], generator, groups[1]) for _ in range(options["layers"])]
        self._model = nn.Sequential(*blocks).to(x)
        mesh = DeviceMesh.from_group(groups[0], x.device.type)
        for module in (*blocks, self._model):
            fully_shard(module, mesh=mesh)
        self._x = x
        self._handle = (
            None if side == "plain" else symmplan.fsdp.apply(self._model, choose=side, timeout=60.0)
        )
        try:
            for _ in range(_WARM_UP):
                self()
        except SymmplanError:
            self.end()
            raise

    def __call__(self) -> torch.Tensor:
        """Run a step; returns what must be equal on all sides."""
        assert isinstance(self._model, FSDPModule)
        out = self._model(self._x)
        (out.float().pow(2).sum() / out.numel()).backward()
        grads = []
        for parameter in self._model.parameters():
            assert parameter.grad is not None
            grads.append(parameter.grad.to_local().float().norm())  # type: ignore[attr-defined]
            parameter.grad = None
        return torch.cat([out.detach().flatten()[:1024].float(), torch.stack(grads)])

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What was measured."""
        return () if self._handle is None else self._handle.choices

    def end(self) -> None:
        """Give back what it has."""
        if self._handle is not None:
            self._handle.remove()


class _Block(nn.Module):
    """Two times two products whose second sums over a group, as a tensor-parallel layer has."""

    def __init__(self, width: int, generator: torch.Generator, group: Any) -> None:
        super().__init__()
        self.group = group
        self.weights = nn.ParameterList(_weights(width, width, generator) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.weights[::2], self.weights[1::2], strict=True):
            hidden = torch.relu(_enter(x, self.group) @ up)
            x = x + _leave(hidden @ down, self.group) / self.group.size()
        return x


class _Enter(torch.autograd.Function):
    """Gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    """Results are summed."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


_enter: Any = _Enter.apply
_leave: Any = _Leave.apply


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    total: torch.Tensor = x.clone()
    dist.all_reduce(total, group=group)
    return total


def _weights(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    scale: float = columns**-0.5
    return torch.randn(rows, columns, generator=generator) * scale


#: What makes a side of each program.
PROGRAMS: dict[str, Callable[..., Compiled | Sharded]] = {"compiled": Compiled, "FSDP2": Sharded}
