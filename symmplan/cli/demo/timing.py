"""Time the collectives of a plan one by one, in symmetric memory against torch's, and compare."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from symmplan.cli.demo.compare import relative
from symmplan.memory import Arena, realize
from symmplan.model import Problem
from symmplan.planner import plan as make_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.model import Plan

__all__ = ["Call", "calls_of", "time_collectives"]

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_REPEATS = 25


@frozen(order=True)
class Call:
    """A collective: what it does, and the bytes of its larger side on one rank."""

    kind: str
    nbytes: int


def calls_of(plan: Plan) -> Counter[Call]:
    """How often a run of the planned program makes each call."""
    nbytes: dict[str, int] = {}
    sizes = {buffer.name: buffer.nbytes for buffer in plan.problem.buffers}
    for access in plan.problem.accesses:
        if access.remote:
            size = max(nbytes.get(access.operation, 0), sizes[access.buffer])
            nbytes[access.operation] = size
    counts: Counter[Call] = Counter()
    for operation in plan.problem.operations:
        kind = next((k for k in _KINDS if f"::{k}" in operation.op), None)
        if kind is not None and operation.name in nbytes:
            counts[Call(kind, nbytes[operation.name])] += 1
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
    counts = calls_of(plan)
    calls: list[dict[str, Any]] = []
    same = True
    with _arena(counts, timeout) as arena:
        for call, count in sorted(counts.items()):
            ours, theirs, difference = _time(call, arena, group)
            same = same and difference <= (0.0 if call.kind == "all_gather" else 1e-6)
            calls.append(
                {
                    "kind": call.kind,
                    "nbytes": call.nbytes,
                    "per_step": count,
                    "symmplan_s": ours,
                    "gloo_s": theirs,
                    "difference": difference,
                }
            )
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


def _arena(counts: Counter[Call], timeout: float) -> Arena:
    """Memory for the largest call: its larger side, and its smaller one."""
    whole = max((call.nbytes for call in counts), default=256)
    problem = Problem.from_intervals([("whole", 0, 1, whole), ("part", 0, 1, whole)])
    return realize(make_plan(problem), memory="shm", timeout=timeout)


def _time(call: Call, arena: Arena, group: str) -> tuple[float, float, float]:
    """Medians of both, and the largest relative difference of the results."""
    world = dist.get_world_size()
    count = call.nbytes // 4
    small = count if call.kind == "all_reduce" else count // world
    whole = arena.tensor("whole", torch.float32, (count,))
    part = arena.tensor("part", torch.float32, (small,))
    generator = torch.Generator().manual_seed(dist.get_rank())
    source, target = (part, whole) if call.kind == "all_gather" else (whole, part)
    values = torch.randn(source.numel(), generator=generator)
    source.copy_(values)
    ours = _ours(call.kind, source, target, world, group)
    theirs = _theirs(call.kind, values, world, group)

    ours()
    difference = relative(theirs(), target.clone())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_REPEATS):  # in turns, so that a busy machine slows both
        for run, seconds in zip((ours, theirs), times, strict=True):
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1]), difference


def _ours(
    kind: str, source: Tensor, target: Tensor, world: int, group: str
) -> Callable[[], object]:
    ops = torch.ops.symmplan
    if kind == "all_gather":
        return lambda: ops.all_gather_out(source, world, group, out=target)
    if kind == "reduce_scatter":
        return lambda: ops.reduce_scatter_out(source, "sum", world, group, out=target)
    return lambda: ops.all_reduce_out(source, "sum", group, out=target)


def _theirs(kind: str, source: Tensor, world: int, group: str) -> Callable[[], Tensor]:
    """What the model without symmplan runs: torch's functional collective, and its wait."""
    ops = torch.ops._c10d_functional
    if kind == "all_gather":
        return lambda: ops.wait_tensor(ops.all_gather_into_tensor(source, world, group))
    if kind == "reduce_scatter":
        return lambda: ops.wait_tensor(ops.reduce_scatter_tensor(source, "sum", world, group))
    return lambda: ops.wait_tensor(ops.all_reduce(source, "sum", group))
