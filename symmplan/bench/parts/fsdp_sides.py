"""The sides of ``symmplan bench fsdp``: one model trained in several ways, on one rank."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import symmplan
from symmplan.bench.parts.llama import Llama, mlp, parts
from symmplan.bench.parts.pooled import install, pool_bytes
from symmplan.bench.parts.profile import profile, profile_gathers
from symmplan.bench.parts.timing import device_of, meet
from symmplan.torch_private import fsdp2, nccl, symm_mem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["KEPT", "POOLED", "HostClock", "Side", "batch_of", "missing"]

#: Sides whose modules stay unsharded until backward, and sides that gather in torch's pool.
KEPT, POOLED = ("kept", "kept, pool"), ("pooled", "kept, pool")


def missing(side: str, device: str, *, graph: bool = False, program: bool = False) -> str | None:
    """Why there is no such side on ``device``, in CUDA graphs or of a user's program; or None."""
    if program and side == "unsharded":
        return "the program shards its model itself"
    if side not in POOLED:
        return None
    if graph:
        return "it meets its peers in every step"
    if device == "cpu":
        return "torch has no symmetric memory on the CPU"
    known = nccl.has_copy_engine_policy()
    return None if known else "this torch cannot ask a communicator of NCCL for copy engines"


def batch_of(options: Mapping[str, Any], rank: int, step: int, tokens: int) -> torch.Tensor:
    """A rank's input of a step, the same for all sides.

    Returns:
        ``(tokens, dim)``, for Llama ``(1, tokens, dim)`` and, as embeddings would be, one that
        requires a gradient; with a vocabulary ``(1, tokens)`` of tokens.
    """
    llama = options["model"] == "llama"
    generator = torch.Generator(options["device"]).manual_seed(97 * step + rank)
    words = options.get("vocabulary")
    if words:
        return torch.randint(words, (1, tokens), generator=generator, device=options["device"])
    batch = torch.randn(
        (1, tokens, options["dim"]) if llama else (tokens, options["dim"]),
        generator=generator,
        device=options["device"],
        dtype=getattr(torch, options["dtype"]),
    )
    return batch.requires_grad_(llama)


class HostClock:
    """Time that the host spends in FSDP2 for its collectives.

    That is, in the methods of its parameter groups that issue and await them, whatever these do:
    copies, the collectives themselves, and on the CPU the wait for peers.

    Args:
        groups: FSDP2's parameter groups.
    """

    def __init__(self, groups: list[Any]) -> None:
        self._groups = groups
        self._seconds = 0.0
        self._inside = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure what happens in here. Afterwards the methods are what they were."""
        undo = []
        for group in self._groups:
            for name in fsdp2.group_methods(group):
                before = vars(group).get(name)
                timed = self._timed(getattr(group, name))
                setattr(group, name, timed)
                undo.append((group, name, before, timed))
        try:
            yield
        finally:
            for group, name, before, timed in undo:
                if vars(group).get(name) is not timed:  # somebody else's by now
                    continue
                if before is None:
                    delattr(group, name)
                else:
                    setattr(group, name, before)

    def read(self) -> float:
        """Seconds since the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one of them calls another
                return method(*args, **kwargs)
            self._inside = True
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - begin
                self._inside = False

        return timed


class Side:
    """One way to train the model, and what was measured of it.

    Args:
        name: Which.
        rank: This one.
        options: Of the benchmark.

    Collective: yes.
    """

    def __init__(self, name: str, rank: int, options: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        self.name, self._options, self._rank = name, options, rank
        self.device = device_of(options, rank)
        self.cuda = self.device.type == "cuda"
        self.handle: symmplan.fsdp.Handle | None = None
        self.how = ""
        self.model = self._made()
        if name != "unsharded":
            self._engage()
        groups = [group for module in self._modules() for group in fsdp2.param_groups(module)]
        self._clock = HostClock(groups)
        #: What is timed of a step: gives the loss of its batches.
        self._act: Callable[[list[torch.Tensor]], torch.Tensor] = self._stepped
        self.restart()

    def restart(self) -> None:
        """Forget what was measured."""
        #: Seconds of each step: on the device, on the clock, until the host had issued all of it,
        #: and of the host in FSDP2.
        self.times: dict[str, list[float]] = {"step": [], "wall": [], "issue": [], "host": []}
        self.losses: list[float] = []

    def _made(self) -> nn.Module:
        """The model, sharded unless this side is not, and its optimizer."""
        options = self._options
        sizes = options["layers"], options["dim"]
        with self.device:
            if options["model"] == "llama":
                model: nn.Module = Llama(*sizes, options["vocabulary"] or 0)
            else:
                model = mlp(*sizes)
        blocks: Any = model.layers if isinstance(model, Llama) else model
        if options["checkpoint"]:
            for block in blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if options["compile"]:
            for block in blocks:
                block.compile()
        dtype = getattr(torch, options["dtype"])
        if self.name == "unsharded":
            model.to(dtype)
        else:
            policy = MixedPrecisionPolicy()
            if dtype != torch.float32:
                policy = MixedPrecisionPolicy(dtype, getattr(torch, options["reduce"]))
            mesh = self._mesh()
            for part in (*parts(model), model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
        parameters = model.parameters()
        self._optimizer: torch.optim.Optimizer
        if options["optimizer"] == "adamw":
            graph = options["cuda_graph"]
            self._optimizer = torch.optim.AdamW(parameters, lr=1e-4, capturable=graph)
        else:
            self._optimizer = torch.optim.SGD(parameters, lr=1e-3)
        return model

    def _engage(self) -> None:
        """Let the sharded model be trained in this side's way. Collective: with a pool yes."""
        if self.name in KEPT:
            for module in self._modules():
                module.set_reshard_after_forward(False, recurse=False)
        if self.name in POOLED:
            if symm_mem.backend_of(self.device) != "NCCL":
                symm_mem.set_backend("NCCL")
            self.how = install(self._modules())
        elif self.name not in ("plain", *KEPT):
            choose: Any = self._options["choose"][0] if self.name == "symmplan" else self.name
            self.handle = symmplan.fsdp.apply(
                self.model,
                choose=choose,
                unsharded_modules=self._options.get("unsharded_modules"),
                timeout=self._options["wait"],
            )

    def _mesh(self) -> DeviceMesh:
        if self.name not in POOLED:
            return init_device_mesh(self._options["device"], (self._options["ranks"],))
        group: Any = dist.new_group(backend="nccl", pg_options=nccl.copy_engine_options())
        # A rendezvous must not be the first thing that a communicator does.
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return DeviceMesh.from_group(group, self._options["device"])

    def _modules(self) -> list[FSDPModule]:
        return [m for m in self.model.modules() if isinstance(m, FSDPModule)]

    @property
    def collectives(self) -> int:
        """How many FSDP2 runs in a step.

        In each pass modules gather twice, or once if they are kept, and reduce; the root gathers
        once.
        """
        if self.name == "unsharded":
            return 0
        own = any(True for g in fsdp2.param_groups(self._modules()[0]) if g.fsdp_params)
        each = 2 if self.name in KEPT else 3
        passes: int = self._options["accumulate"]
        return passes * (each * len(parts(self.model)) + (2 if own else 0))

    @property
    def symmetric_bytes(self) -> int:
        """Symmetric memory that it reserved."""
        if self.name in POOLED:
            return pool_bytes(self.device)
        return 0 if self.handle is None else self.handle.stats.segment_bytes

    def step(self, number: int, tokens: int) -> None:
        """A whole step, timed; gradients stay.

        Collective: yes.
        """
        batches = self._batches(number, tokens)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.cuda else []
        meet()
        self._synchronize()
        with self._clock.running():
            begin = time.perf_counter()
            for mark in marks[:1]:
                mark.record()
            loss = self._act(batches)
            for mark in marks[1:]:
                mark.record()
            issued = time.perf_counter() - begin
            self._synchronize()
            wall = time.perf_counter() - begin
        span = marks[0].elapsed_time(marks[1]) / 1e3 if marks else wall
        seconds = {"step": span, "wall": wall, "issue": issued, "host": self._clock.read()}
        for name, value in seconds.items():
            self.times[name].append(value)
        self.losses.append(float(loss.detach()))

    def capture(self, tokens: int) -> None:
        """From now on replay a step of so many tokens.

        Collective: yes.
        """
        self._act = self._stepped
        batches = self._batches(0, tokens)
        for _ in range(2):
            self._stepped(batches)
            self._optimizer.zero_grad()
        self._synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._stepped(batches)
        gradients = [(p, p.grad) for p in self.model.parameters()]

        def replay(given: list[torch.Tensor]) -> torch.Tensor:
            with torch.no_grad():
                for mine, batch in zip(batches, given, strict=True):
                    mine.copy_(batch)
            graph.replay()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            return loss

        self._act = replay

    def advance(self) -> None:
        """Let the parameters follow the gradients, and drop these. Not in any time."""
        # The gradients of the model that is not sharded are this rank's only.
        if self._options["optimizer"] is None and self.name != "unsharded":
            self._optimizer.step()
        self._optimizer.zero_grad()

    def follow(self, other: Side) -> None:
        """Go on from another side's parameters, so that gradients of one step compare."""
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
                _local(mine).copy_(_local(theirs))

    def gradients(self) -> list[torch.Tensor]:
        """This rank's parts of all gradients."""
        return [_local(p.grad) for p in self.model.parameters() if p.grad is not None]

    def profile(self, tokens: int) -> dict[str, Any]:
        """What ran on the device in one step, and the gathers of one forward pass; see there.

        With symmplan, also what did not run as it was planned.

        Collective: yes.
        """
        batches = self._batches(0, tokens)
        losses = []
        meet()
        self._synchronize()
        found = profile(lambda: self._stepped(batches))
        self._optimizer.zero_grad()
        meet()
        self._synchronize()
        found["forward"] = profile_gathers(lambda: losses.append(self._loss(batches[0])))
        losses.pop().backward()  # FSDP2 wants it
        if self.handle is not None:
            missed = self.handle.check(lambda: self._stepped(batches)).missed
            found["disengaged"] = [list(each) for each in missed]
        self._optimizer.zero_grad()
        self._synchronize()
        return found

    def _batches(self, number: int, tokens: int) -> list[torch.Tensor]:
        """What a step is given, a batch for each of its passes."""
        count = self._options["accumulate"]
        return [
            batch_of(self._options, self._rank, number * count + i, tokens) for i in range(count)
        ]

    def _stepped(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """All that is timed of a step; the loss, a mean over the batches."""
        losses = []
        for batch in batches:
            loss = self._loss(batch) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        if self._options["optimizer"] is not None:
            self._optimizer.step()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        made = self.model(batch).float()
        result: torch.Tensor = made.pow(2).mean()
        if self._options.get("vocabulary"):  # each token says which one comes next
            result = functional.cross_entropy(made.flatten(0, 1), batch.roll(-1, 1).flatten())
        return result

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
