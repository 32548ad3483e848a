"""What one rank of the demo does: train two models side by side, compare, time, report."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import asdict
from torch import Tensor

import symmplan
from symmplan.cli.demo.compare import Difference, time_collectives
from symmplan.cli.demo.model import Config, Transformer, sync_replicated
from symmplan.cli.doctor import cxx_compiler
from symmplan.cli.files import write_text
from symmplan.report import plan_facts

if TYPE_CHECKING:
    from symmplan.cli.demo.worker import Reporter

__all__ = ["run_rank"]

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


def run_rank(setup: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Train with and without symmplan; what came out, as plain data.

    Collective: yes, over the ranks of the demo.
    """
    torch.set_num_threads(setup["threads"])
    reporter.mark("meet the other ranks")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(  # type: ignore[attr-defined]
            setup["store"], setup["world"]
        ),
        rank=setup["rank"],
        world_size=setup["world"],
        timeout=dt.timedelta(seconds=setup["timeout"]),
    )
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    inner = setup["inner"]
    if inner == "auto":
        inner = "eager" if cxx_compiler() is None else "inductor"
    config = Config(world=setup["world"])
    backend = symmplan.backend(inner=inner, memory="shm", timeout=setup["timeout"])
    # The same inner compiler; "aot_eager" because symmplan's "eager", too, runs what AOTAutograd
    # made of the model. (Dynamo's own "eager" loses these gradients on torch 2.11.)
    without = {"inductor": "inductor", "eager": "aot_eager"}[inner]
    plain = _Trainee(config, setup["rank"], group, backend=without)
    planned = _Trainee(config, setup["rank"], group, backend=backend)

    difference = Difference()
    for step, (inputs, targets) in enumerate(_batches(config, setup["steps"]), start=1):
        where = f"step {step} of {setup['steps']}"
        compiling = f", compile with {inner}" if step == 1 else ""
        reporter.mark(f"{where} without symmplan{compiling}")
        plain.step(inputs, targets)
        reporter.mark(f"{where} with symmplan{compiling}")
        planned.step(inputs, targets)
        difference.losses(plain.losses[-1], planned.losses[-1])
        difference.tensors(plain.gradients(), planned.gradients())
    difference.tensors(plain.parameters(), planned.parameters())

    reporter.mark("verify the plan")
    (plan,) = backend.plans  # of one graph
    plan.verify()
    stats = asdict(backend.stats)
    reporter.mark("time the collectives against gloo's")
    timing = time_collectives(plan, group, timeout=setup["timeout"])
    reporter.mark("write the plan")
    if setup["rank"] == 0:
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
        times = sorted(self._seconds[1:] or self._seconds)
        return times[len(times) // 2]


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
