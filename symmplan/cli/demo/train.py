"""What one rank of the demo does: train two models side by side, compare, time, report."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, define
from torch import Tensor

import symmplan
from symmplan.bench.comm import OPS, compare
from symmplan.cli.demo.model import BATCH, SEQ, Transformer, sync_replicated
from symmplan.cli.doctor import cxx_compiler
from symmplan.cli.files import write_text
from symmplan.launcher.ranks import mark
from symmplan.report import plan_facts

__all__ = ["LargestDifference", "relative", "run_rank"]

_REPEATS = 25
#: The part of the demo's time that its steps take, about.
_TRAINING = 0.7
_COUNTED = ("segment_bytes", "rendezvous", "placed", "bound", "staged")

#: Something real to learn from: the opening of Lewis Carroll's Alice's Adventures in Wonderland.
_TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to
do: once or twice she had peeped into the book her sister was reading, but it had no pictures or
conversations in it, "and what is the use of a book," thought Alice "without pictures or
conversations?"
"""


def run_rank(rank: int, world: int, setup: dict[str, Any]) -> dict[str, Any]:
    """Train with and without symmplan; what came out, as plain data.

    Collective: yes, over the ranks of the demo.
    """
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    inner = setup["inner"]
    if inner == "auto":
        inner = "eager" if cxx_compiler() is None else "inductor"
    backend = symmplan.backend(inner=inner, memory="shm", timeout=setup["timeout"])
    # The same inner compiler; "aot_eager" because symmplan's "eager", too, runs what AOTAutograd
    # made of the model. (Dynamo's own "eager" loses these gradients on torch 2.11.)
    without = {"inductor": "inductor", "eager": "aot_eager"}[inner]
    plain = _Trainee(rank, world, group, backend=without)
    planned = _Trainee(rank, world, group, backend=backend)

    difference = LargestDifference()
    for step, (inputs, targets) in enumerate(_batches(setup["steps"]), start=1):
        compiling = f", compile with {inner}" if step == 1 else ""
        for trainee, how in ((plain, "without"), (planned, "with")):
            part = _TRAINING * (step - 1) / setup["steps"]
            mark(f"step {step} of {setup['steps']} {how} symmplan{compiling}", part)
            trainee.step(inputs, targets)
        difference.losses(plain.losses[-1], planned.losses[-1])
        difference.tensors(plain.gradients(), planned.gradients())
    difference.tensors(plain.model.state_dict(), planned.model.state_dict())

    mark("verify the plan")
    (plan,) = backend.plans  # of one graph
    plan.verify()
    counted = asdict(backend.stats)
    mark("time the collectives against gloo's")
    calls = _timed(plan)
    mark("write the plan")
    if rank == 0:
        write_text(Path(setup["out"]) / "plan.json", plan.to_json())
        plan.to_html(Path(setup["out"]) / "plan.html")
    words = ("operation", "op", "where", "reason")
    staged = [dict(zip(words, found, strict=True)) for found in backend.staged()]
    dist.barrier()
    backend.release()
    return {
        "difference": asdict(difference),
        "parity": difference.within(sums=1e-6) and not any(c["difference"] for c in calls),
        "plan": plan_facts(plan),
        "told": {
            "inner": inner,
            "losses": {"symmplan": planned.losses, "plain": plain.losses},
            "parameters": sum(p.numel() for p in planned.model.parameters()),
            **{name: counted[name] for name in _COUNTED},
            "staged_because": staged,
            "collectives": calls,
            "step_s": {"symmplan": planned.seconds(), "plain": plain.seconds()},
            "summary": plan.summary(),
        },
    }


class _Trainee:
    """A model with its optimizer, and what became of it."""

    def __init__(self, rank: int, world: int, group: str, *, backend: Any) -> None:
        self.model = Transformer(rank, world, group)
        self.group = group
        # Plain descent: Adam divides by the gradient's size, and would blow up the last bit of a
        # gradient near zero to a whole step.
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self._compiled = torch.compile(self.model, backend=backend, fullgraph=True, dynamic=False)
        self.losses: list[float] = []
        self._seconds: list[float] = []

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One step; the gradients stay until the next."""
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self._compiled(inputs, targets)
        loss.backward()
        sync_replicated(self.model, self.group)
        self._optimizer.step()
        self._seconds.append(time.perf_counter() - begin)
        self.losses.append(loss.item())

    def gradients(self) -> dict[str, Tensor]:
        """By parameter name."""
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}

    def seconds(self) -> float:
        """The median time of a step, without the first, which compiles."""
        return statistics.median_high(self._seconds[1:] or self._seconds)


def _batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """``steps`` times (inputs, targets), each (seq, batch); the same on all ranks."""
    text = torch.frombuffer(bytearray(_TEXT.encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    last = len(text) - SEQ - 1
    starts = torch.randint(last, (steps, BATCH), generator=generator).tolist()
    rows = [torch.stack([text[at : at + SEQ + 1] for at in step], 1) for step in starts]
    return [(row[:-1].contiguous(), row[1:].contiguous()) for row in rows]


@define
class LargestDifference:
    """The largest differences seen so far, relative to the largest value of a tensor.

    Attributes:
        loss: Of any loss.
        tensor: Of any gradient or parameter.
        bitwise: Whether everything compared was equal, bit for bit.
        compared: How many numbers were compared.
    """

    loss: float = 0.0
    tensor: float = 0.0
    bitwise: bool = True
    compared: int = 0

    def losses(self, left: float, right: float) -> None:
        """Take in the losses of one step."""
        one, other = torch.tensor([[left], [right]], dtype=torch.float64)
        self.loss = max(self.loss, self._of(one, other))

    def tensors(self, left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
        """Take in tensors by name."""
        same = left.keys() == right.keys()
        found = [self._of(left[name], right[name]) for name in left] if same else [math.inf]
        self.bitwise = self.bitwise and same
        self.tensor = max(self.tensor, *found)

    def within(self, *, sums: float) -> bool:
        """Whether something was compared and nothing differed by more than ``sums``."""
        return self.compared > 0 and self.loss <= sums and self.tensor <= sums

    def _of(self, one: Tensor, other: Tensor) -> float:
        self.compared += one.numel()
        self.bitwise = self.bitwise and one.equal(other)
        return relative(one, other)


def relative(left: Tensor, right: Tensor) -> float:
    """The largest difference of two tensors, over the largest value of ``left``.

    Infinite if the shapes differ or a number is not finite.
    """
    if left.shape != right.shape:
        return math.inf
    if not left.numel():
        return 0.0
    one, two = left.double(), right.double()
    difference = (one - two).abs().max().item() / max(one.abs().max().item(), 1e-30)
    return difference if math.isfinite(difference) else math.inf


def _timed(plan: symmplan.Plan) -> list[dict[str, Any]]:
    """Every distinct collective of ``plan``, timed in shared memory and by gloo.

    Returns:
        Of each its ``kind``, the bytes of its larger side on a rank, how often a run makes it, the
        medians in seconds and the largest difference of the results: of whole numbers, so that
        sums are exact in any order.

    Collective: yes.
    """
    sizes = {buffer.name: buffer.nbytes for buffer in plan.problem.buffers}
    larger: dict[str, int] = {}
    for access in plan.problem.accesses:
        if access.remote:
            name = access.operation
            larger[name] = max(larger.get(name, 0), sizes[access.buffer])
    counts: Counter[tuple[str, int]] = Counter()
    for operation in plan.problem.operations:
        for kind in OPS:
            if f"::{kind}" in operation.op and operation.name in larger:
                counts[kind, larger[operation.name]] += 1
    calls = []
    for (kind, nbytes), count in sorted(counts.items()):
        part = nbytes if kind == "all_reduce" else nbytes // dist.get_world_size()
        found = compare(kind, part, "float32", _REPEATS)
        ours, gloo = (statistics.median(found["seconds"][side]) for side in ("shm", "gloo"))
        call = {"kind": kind, "nbytes": nbytes, "per_step": count, "symmplan_s": ours}
        calls.append({**call, "gloo_s": gloo, "difference": found["difference"]})
    return calls
