"""Compare two runs of the same program: number by number, and collective by collective."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import define

from symmplan.memory import Arena, realize
from symmplan.model import Problem
from symmplan.planner import plan as make_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from symmplan.model import Plan

__all__ = ["Difference", "relative", "time_collectives"]

#: A collective -> what the model without symmplan runs: torch's functional one.
_PLAIN = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
}
_REPEATS = 25


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


def _calls_of(plan: Plan) -> Counter[tuple[str, int]]:
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


def time_collectives(plan: Plan, group: str, *, timeout: float) -> dict[str, Any]:
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
