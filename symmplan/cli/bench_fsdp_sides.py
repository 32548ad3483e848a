"""The sides of ``symmplan bench fsdp``: one model trained in several ways, on one rank."""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import symmplan
from symmplan import _compat as compat
from symmplan.cli.bench_fsdp_mixin import PooledAllGather
from symmplan.cli.bench_fsdp_models import Llama, mlp, parts
from symmplan.cli.bench_fsdp_profile import profile

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["measure", "sides_of"]

#: Steps before the timed ones: the first is recorded, the second makes the plan.
_WARM_UP = 4
#: What FSDP2 does on the host around a collective.
_HOST = ("unshard", "wait_for_unshard", "post_backward")


def sides_of(device: str) -> tuple[str, ...]:
    """The sides that can be compared on ``device``."""
    pooled = device == "cuda" and compat.has_copy_engine_policy()
    return ("plain", *(["pooled"] if pooled else []), "symmplan", "unsharded")


def measure(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train all sides of ``options`` and tell what was seen of each.

    Collective: yes.
    """
    sides = {name: Side(name, rank, options) for name in options["sides"]}
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options["device"] == "cuda" else "CPU",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if _cuda(options) else None,
        "runs": [],
    }
    for tokens in options["tokens"]:
        for step in range(_WARM_UP + options["steps"]):
            for side in sides.values():
                if step == _WARM_UP:
                    side.restart()
                dist.barrier()
                side.step(step, tokens)
            if rank == 0 and step >= _WARM_UP and sys.stderr.isatty():
                print(f"bench fsdp: {step - _WARM_UP + 1}/{options['steps']}", file=sys.stderr)
        result["runs"].append(_run(tokens, sides, options))
    if "symmplan" in sides:
        handle = sides["symmplan"].handle
        assert handle is not None
        result["stats"] = attrs.asdict(handle.stats)
        result["choices"] = [attrs.asdict(choice) for choice in handle.choices]
        handle.remove()
    return result


def _run(tokens: int, sides: dict[str, Side], options: dict[str, Any]) -> dict[str, Any]:
    run: dict[str, Any] = {"tokens": tokens, "sides": {}}
    for name, side in sides.items():
        run["sides"][name] = {
            "step": side.steps,
            "collectives": side.collectives,
            "host": dict(side.host),
            "bytes": _bytes(side, options),
        }
    if _cuda(options) and options["profile"]:
        for name, side in sides.items():
            dist.barrier()
            run["sides"][name]["profile"] = profile(functools.partial(side.step, 0, tokens))
    if {"plain", "symmplan"} <= set(sides):
        plain, planned = sides["plain"], sides["symmplan"]
        run["losses_equal"] = plain.losses == planned.losses
        run["difference"] = max(
            (_difference(a, b) for a, b in zip(plain.kept(), planned.kept(), strict=True)),
            default=0.0,
        )
    return run


def _bytes(side: Side, options: dict[str, Any]) -> dict[str, int]:
    if not _cuda(options):
        return {}
    segments = 0 if side.handle is None else side.handle.stats.segment_bytes
    pooled = sum(PooledAllGather.blocks.values()) if side.name == "pooled" else 0
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "symmetric": segments or pooled,
    }


def _cuda(options: dict[str, Any]) -> bool:
    return bool(options["device"] == "cuda")


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    largest = float(a.abs().max()) if a.numel() else 0.0
    return float((a.float() - b.float()).abs().max()) / largest if largest else 0.0


class Side:
    """One way to train the model, and what was measured of it.

    Args:
        name: Which.
        rank: This one.
        options: Of the benchmark.
    """

    def __init__(self, name: str, rank: int, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.name = name
        self.rank = rank
        self.device = torch.device(options["device"])
        self.llama = options["model"] == "llama"
        self.dim = options["dim"]
        self.dtype = getattr(torch, options["dtype"])
        self.handle: symmplan.fsdp.Handle | None = None
        self.restart()
        with self.device:
            self.model = (Llama if self.llama else mlp)(options["layers"], self.dim)
        if name == "unsharded":
            self.model.to(self.dtype)
        else:
            self._shard(options)
        # Of the large model, gradients are compared; its masters would not fit an optimizer.
        self.optimizer = None if self.llama else torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def restart(self) -> None:
        """Forget what was measured."""
        self.steps: list[float] = []
        self.collectives: list[float] = []
        self.losses: list[float] = []
        self.host: dict[str, list[float]] = defaultdict(list)
        self._waited = 0.0
        self._gradients: list[torch.Tensor] = []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _shard(self, options: dict[str, Any]) -> None:
        mesh = self._mesh(options)
        policy = MixedPrecisionPolicy()
        if self.dtype != torch.float32:
            policy = MixedPrecisionPolicy(self.dtype, getattr(torch, options["reduce"]))
        for part in parts(self.model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        if self.name == "pooled":
            self._each(lambda gather, scatter: (PooledAllGather(mesh.get_group(), gather), scatter))
        if self.name == "symmplan":
            self.handle = symmplan.fsdp.apply(
                self.model, choose=options["choose"], timeout=options["wait"]
            )
        if self.device.type == "cpu":
            self._each(lambda gather, scatter: (_Watched(gather, self), _Watched(scatter, self)))
        for group in self._groups():
            for method in _HOST:
                setattr(group, method, self._timed(method, getattr(group, method)))

    def _mesh(self, options: dict[str, Any]) -> DeviceMesh:
        if self.name != "pooled":
            return init_device_mesh(options["device"], (options["ranks"],))
        group = dist.new_group(backend="nccl", pg_options=compat.copy_engine_options())
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return DeviceMesh.from_group(group, options["device"])

    def _groups(self) -> list[Any]:
        modules = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        return [group for module in modules for group in compat.fsdp_param_groups(module)]

    def _each(self, change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        """Give FSDP2 other collectives."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                for group in compat.fsdp_param_groups(module):
                    gather, scatter = change(*compat.fsdp_comms(group))
                    module.set_custom_all_gather(gather)
                    module.set_custom_reduce_scatter(scatter)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.host[name].append(time.perf_counter() - begin)

        return timed

    def waited(self, seconds: float) -> None:
        """A collective took so long."""
        self._waited += seconds

    def step(self, number: int, tokens: int) -> None:
        """Train once."""
        generator = torch.Generator().manual_seed(97 * number + self.rank)
        shape = (1, tokens, self.dim) if self.llama else (tokens, self.dim)
        batch = torch.randn(shape, generator=generator).to(self.device, self.dtype)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._waited = 0.0
        begin = time.perf_counter()
        loss = self.model(batch).float().pow(2).mean()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.steps.append(time.perf_counter() - begin)
        self.collectives.append(self._waited)
        self.losses.append(float(loss.detach()))
        if self.llama and self.name != "unsharded":
            # Of one layer: the others' would take the memory that is measured.
            some = list(parts(self.model)[0].parameters())
            self._gradients = [_local(p.grad) for p in some if p.grad is not None]
        self.model.zero_grad()

    def kept(self) -> list[torch.Tensor]:
        """What must be equal on two sides: gradients, or parameters after all steps."""
        if self.llama:
            return self._gradients
        return [_local(p) for p in self.model.parameters()]


def _local(tensor: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.detach().to_local()
    return result


class _Watched:
    """An FSDP2 collective whose calls are timed."""

    def __init__(self, comm: Any, side: Side) -> None:
        self._comm = comm
        self._side = side

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        """As the collective does."""
        begin = time.perf_counter()
        result = self._comm.allocate(*args, **kwargs)
        self._side.waited(time.perf_counter() - begin)
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the collective does."""
        begin = time.perf_counter()
        result = self._comm(*args, **kwargs)
        self._side.waited(time.perf_counter() - begin)
        return result
