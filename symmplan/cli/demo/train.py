"""What one rank of the demo does: train two models side by side, compare, time, report."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import asdict, define
from torch import Tensor

import symmplan
from symmplan.cli.demo.model import Config, Transformer, sync_replicated
from symmplan.cli.doctor import cxx_compiler
from symmplan.cli.files import write_text
from symmplan.memory import Arena, realize
from symmplan.model import Problem
from symmplan.planner import plan as make_plan
from symmplan.report import plan_facts
from symmplan.testing.ranks import mark

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Difference", "relative", "run_rank"]

#: A collective -> what the model without symmplan runs: torch's functional one.
_PLAIN = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
}
_REPEATS = 25
#: Seconds that a rank waits for the other in shared memory.
_TIMEOUT = 60.0

#: Something real to learn from: the opening of Lewis Carroll's Alice's Adventures in Wonderland.
_TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to
do: once or twice she had peeped into the book her sister was reading, but it had no pictures or
conversations in it, "and what is the use of a book," thought Alice "without pictures or
conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very
sleepy and stupid), whether the pleasure of making a daisy-chain would be worth the trouble of
getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her.
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
    config = Config(world=world)
    backend = symmplan.backend(inner=inner, memory="shm", timeout=_TIMEOUT)
    # The same inner compiler; "aot_eager" because symmplan's "eager", too, runs what AOTAutograd
    # made of the model. (Dynamo's own "eager" loses these gradients on torch 2.11.)
    without = {"inductor": "inductor", "eager": "aot_eager"}[inner]
    plain = _Trainee(config, rank, group, backend=without)
    planned = _Trainee(config, rank, group, backend=backend)

    difference = Difference()
    for step, (inputs, targets) in enumerate(_batches(config, setup["steps"]), start=1):
        where = f"step {step} of {setup['steps']}"
        compiling = f", compile with {inner}" if step == 1 else ""
        mark(f"{where} without symmplan{compiling}")
        plain.step(inputs, targets)
        mark(f"{where} with symmplan{compiling}")
        planned.step(inputs, targets)
        difference.losses(plain.losses[-1], planned.losses[-1])
        difference.tensors(plain.gradients(), planned.gradients())
    difference.tensors(plain.parameters(), planned.parameters())

    mark("verify the plan")
    (plan,) = backend.plans  # of one graph
    plan.verify()
    stats = asdict(backend.stats)
    mark("time the collectives against gloo's")
    timing = _time_collectives(plan, group, timeout=_TIMEOUT)
    mark("write the plan")
    if rank == 0:
        write_text(Path(setup["out"]) / "plan.json", plan.to_json())
        plan.to_html(Path(setup["out"]) / "plan.html")
    words = ("operation", "op", "where", "reason")
    staged = [dict(zip(words, found, strict=True)) for found in backend.staged()]
    dist.barrier()
    backend.release()
    return {
        "inner": inner,
        "losses": {"symmplan": planned.losses, "plain": plain.losses},
        "step_s": {"symmplan": planned.seconds(), "plain": plain.seconds()},
        "difference": asdict(difference),
        "parity": difference.within(sums=1e-6) and timing["same"],
        "timing": timing,
        "stats": stats,
        "plan": plan_facts(plan),
        "staged": staged,
        "summary": plan.summary(),
        "parameters": sum(p.numel() for p in planned.model.parameters()),
    }


class _Trainee:
    """A model with its optimizer, and what became of it."""

    def __init__(self, config: Config, rank: int, group: str, *, backend: Any) -> None:
        self.model = Transformer(config, rank, group)
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

    def parameters(self) -> dict[str, Tensor]:
        """By name."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def seconds(self) -> float:
        """The median time of a step, without the first, which compiles."""
        return statistics.median_high(self._seconds[1:] or self._seconds)


def _batches(config: Config, steps: int) -> list[tuple[Tensor, Tensor]]:
    """``steps`` times (inputs, targets), each (seq, batch); the same on all ranks."""
    text = torch.frombuffer(bytearray(_TEXT.encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps):
        last = len(text) - config.seq - 1
        starts = torch.randint(last, (config.batch,), generator=generator).tolist()
        rows = torch.stack([text[at : at + config.seq + 1] for at in starts], dim=1)
        batches.append((rows[:-1].contiguous(), rows[1:].contiguous()))
    return batches


@define
class Difference:
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
        self.compared += 1
        self.bitwise = self.bitwise and left == right
        difference = abs(left - right) / max(abs(left), 1e-30)
        # NaN compares as false with everything, and would be forgotten by max().
        self.loss = max(self.loss, difference if math.isfinite(difference) else math.inf)

    def tensors(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
        """Take in tensors by name."""
        if left.keys() != right.keys():
            self.tensor, self.bitwise = math.inf, False
            return
        for name, one in left.items():
            self.compared += one.numel()
            self.bitwise = self.bitwise and one.equal(right[name])
            self.tensor = max(self.tensor, relative(one, right[name]))

    def within(self, *, sums: float) -> bool:
        """Whether something was compared and nothing differed by more than ``sums``."""
        return self.compared > 0 and self.loss <= sums and self.tensor <= sums


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


def _calls_of(plan: symmplan.Plan) -> Counter[tuple[str, int]]:
    """How often a run makes each call: what it does, and the bytes of its larger side on a rank."""
    nbytes: dict[str, int] = {}
    sizes = {buffer.name: buffer.nbytes for buffer in plan.problem.buffers}
    for access in plan.problem.accesses:
        if access.remote:
            size = max(nbytes.get(access.operation, 0), sizes[access.buffer])
            nbytes[access.operation] = size
    counts: Counter[tuple[str, int]] = Counter()
    for operation in plan.problem.operations:
        kind = next((k for k in _PLAIN if f"::{k}" in operation.op), None)
        if kind is not None and operation.name in nbytes:
            counts[kind, nbytes[operation.name]] += 1
    return counts


def _time_collectives(plan: symmplan.Plan, group: str, *, timeout: float) -> dict[str, Any]:
    """Time every distinct call of ``plan`` both ways, and check that the results agree.

    Args:
        plan: Whose collectives to time.
        group: Name of the process group.
        timeout: Seconds that ranks wait for each other.

    Returns:
        Medians in seconds by call, their sums over a run of the program, and whether gathers were
        equal bit for bit and sums to 1e-6 of the largest value.

    Collective: yes.
    """
    counts = _calls_of(plan)
    calls: list[dict[str, Any]] = []
    same = True
    # Memory for the largest call: its larger side, and its smaller one.
    whole = max((nbytes for _, nbytes in counts), default=256)
    problem = Problem.from_intervals([("whole", 0, 1, whole), ("part", 0, 1, whole)])
    with realize(make_plan(problem), memory="shm", timeout=timeout) as arena:
        for (kind, nbytes), count in sorted(counts.items()):
            timed = _time(kind, nbytes, arena, group)
            same = same and timed["difference"] <= (0.0 if kind == "all_gather" else 1e-6)
            calls.append({"kind": kind, "nbytes": nbytes, "per_step": count, **timed})
        dist.barrier()
    ours = sum(c["per_step"] * c["symmplan_s"] for c in calls)
    theirs = sum(c["per_step"] * c["gloo_s"] for c in calls)
    return {
        "calls": calls,
        "symmplan_s": ours,
        "gloo_s": theirs,
        "speedup": theirs / ours if ours else None,
        "same": bool(calls) and same,
    }


def _time(kind: str, nbytes: int, arena: Arena, group: str) -> dict[str, float]:
    """Medians of both, and the largest relative difference of the results."""
    world = dist.get_world_size()
    count = nbytes // 4
    small = count if kind == "all_reduce" else count // world
    whole = arena.tensor("whole", torch.float32, (count,))
    part = arena.tensor("part", torch.float32, (small,))
    generator = torch.Generator().manual_seed(dist.get_rank())
    source, target = (part, whole) if kind == "all_gather" else (whole, part)
    values = torch.randn(source.numel(), generator=generator)
    source.copy_(values)

    settings = {"all_gather": (world, group), "reduce_scatter": ("sum", world, group)}
    more = settings.get(kind, ("sum", group))
    placed = getattr(torch.ops.symmplan, f"{kind}_out")
    plain = getattr(torch.ops._c10d_functional, _PLAIN[kind])

    def ours() -> Any:
        return placed(source, *more, out=target)

    def theirs() -> Any:
        return torch.ops._c10d_functional.wait_tensor(plain(values, *more))

    ours()
    difference = relative(theirs(), target.clone())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_REPEATS):  # in turns, so that a busy machine slows both
        for run, seconds in zip((ours, theirs), times, strict=True):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    ours_s, theirs_s = map(statistics.median, times)
    return {"symmplan_s": ours_s, "gloo_s": theirs_s, "difference": difference}
