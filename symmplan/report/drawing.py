"""What the HTML page draws, as plain data: positions in time, bytes, names.

[Note: the time axis]
    A program with several streams is only partly ordered, and a picture has one axis. The axis is
    the position in one topological order of happens-before: the earliest-listed operation whose
    predecessors are all done comes next. Two buffers that share bytes are ordered in every such
    order, so their rectangles never overlap; rectangles that overlap in time may, on the machine,
    run in another order. Streams are drawn as lanes below, so that it can be seen which is which.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symmplan.model import Plan, Problem

__all__ = ["drawing", "live_ranges", "topological"]


def topological(problem: Problem) -> list[int]:
    """Indices of the operations in the order of [Note: the time axis]."""
    operations = problem.operations
    index = {operation.name: i for i, operation in enumerate(operations)}
    after: list[list[int]] = [[] for _ in operations]
    waiting = [0] * len(operations)
    last: dict[str, int] = {}
    for i, operation in enumerate(operations):
        if operation.stream in last:
            after[last[operation.stream]].append(i)
            waiting[i] += 1
        last[operation.stream] = i
    for earlier, later in problem.edges:
        after[index[earlier]].append(index[later])
        waiting[index[later]] += 1

    ready = [i for i, count in enumerate(waiting) if not count]
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, j)
    assert len(order) == len(operations), "check_problem lets no cycle through"
    return order


def live_ranges(problem: Problem, order: list[int]) -> dict[str, tuple[int, int]]:
    """``{buffer: (begin, end)}``: half-open positions in ``order`` from first to last access."""
    position = {problem.operations[i].name: at for at, i in enumerate(order)}
    live: dict[str, tuple[int, int]] = {}
    for access in problem.accesses:
        at = position[access.operation]
        begin, end = live.get(access.buffer, (at, at + 1))
        live[access.buffer] = (min(begin, at), max(end, at + 1))
    for buffer in problem.buffers:
        if buffer.persistent or buffer.name not in live:
            live[buffer.name] = (0, max(1, len(order)))
    return live


def drawing(plan: Plan) -> dict[str, Any]:
    """Everything the page shows. Equal plans give equal data."""
    problem = plan.problem
    order = topological(problem)
    live = live_ranges(problem, order)
    position = {problem.operations[i].name: at for at, i in enumerate(order)}
    streams = list(dict.fromkeys(operation.stream for operation in problem.operations))
    kinds = sorted({buffer.op for buffer in problem.buffers})
    segments = [segment.name for segment in plan.segments]
    buffers = []
    for buffer in problem.buffers:
        placement = plan.placements[buffer.name]
        begin, end = live[buffer.name]
        buffers.append(
            {
                "name": buffer.name,
                "op": kinds.index(buffer.op),
                "where": buffer.where,
                "type": _type(buffer.dtype, buffer.shape),
                "segment": segments.index(placement.segment),
                "a": placement.offset,
                "b": placement.end,
                "s": begin,
                "t": end,
                "persistent": buffer.persistent,
            }
        )
    buffers.sort(key=lambda b: (b["segment"], b["a"], b["s"], b["name"]))
    return {
        "kinds": kinds,
        "streams": streams,
        "operations": [
            {
                "name": operation.name,
                "op": operation.op,
                "stream": streams.index(operation.stream),
                "group": operation.group or "",
            }
            for operation in (problem.operations[i] for i in order)
        ],
        "segments": [
            {
                "name": segment.name,
                "groups": ", ".join(segment.groups),
                "nbytes": segment.nbytes,
                "bound": segment.lower_bound_bytes,
            }
            for segment in plan.segments
        ],
        "buffers": buffers,
        "barriers": [
            {
                "before": barrier.before,
                "at": position[barrier.before],
                "group": barrier.group,
                "buffers": ", ".join(barrier.buffers),
            }
            for barrier in plan.barriers
        ],
        "unplanned": [
            {"name": u.name, "op": u.op, "where": u.where, "nbytes": u.nbytes, "reason": u.reason}
            for u in plan.unplanned
        ],
    }


def _type(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]" if dtype else ""
