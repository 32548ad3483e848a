"""A plan as plain data: its facts in numbers, and what the HTML page draws.

[Note: the time axis]
    A program with several streams is only partly ordered, and a picture has one axis. The axis is
    the position in one topological order of happens-before: the earliest-listed operation whose
    predecessors are all done comes next. Two buffers that share bytes are ordered in every such
    order, so their rectangles never overlap; rectangles that overlap in time may, on the machine,
    run in another order. Streams are drawn as lanes below, so that it can be seen which is which.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import networkx as nx
from attrs import asdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from symmplan.model import Plan, Problem

__all__ = ["drawing", "live_ranges", "plan_facts", "topological"]


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The decisions of a plan in numbers, as under every command's ``--json``. Sizes are bytes.

    This is a summary: `Plan.to_json` writes the plan itself.
    """
    return {
        "fingerprint": plan.fingerprint,
        "optimal": plan.optimal,
        "buffers": len(plan.placements),
        "operations": len(plan.problem.operations),
        "segments": len(plan.segments),
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "unshared_bytes": plan.unshared_bytes,
        "segment": [
            asdict(s, filter=lambda f, _: f.name not in ("witness", "proof")) for s in plan.segments
        ],
        "barriers": [asdict(b) for b in plan.barriers],
        "unplanned": [asdict(u) for u in plan.unplanned],
    }


def topological(problem: Problem) -> list[int]:
    """Indices of the operations in the order of [Note: the time axis]."""
    index = {operation.name: i for i, operation in enumerate(problem.operations)}
    order = nx.lexicographical_topological_sort(problem.graph(), key=index.__getitem__)
    return [index[name] for name in order]


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


def drawing(
    plan: Plan, advice: Iterable[Any] | None = (), trades: Iterable[Any] = ()
) -> dict[str, Any]:
    """Everything the page shows. Equal plans give equal data.

    Args:
        plan: The plan.
        advice: What `Plan.advice` said; None if it was not asked.
        trades: What `Plan.trades` said.
    """
    problem = plan.problem
    order = topological(problem)
    live = live_ranges(problem, order)
    position = {problem.operations[i].name: at for at, i in enumerate(order)}
    index = {buffer.name: i for i, buffer in enumerate(problem.buffers)}
    uses: list[list[int]] = [[] for _ in problem.buffers]
    for access in problem.accesses:
        uses[index[access.buffer]].append(position[access.operation])
    frames: dict[str, int] = {}
    streams = list(dict.fromkeys(operation.stream for operation in problem.operations))
    kinds = sorted({buffer.op for buffer in problem.buffers})
    segments = [segment.name for segment in plan.segments]
    buffers = []
    for buffer, used in zip(problem.buffers, uses, strict=True):
        placement = plan.placements[buffer.name]
        begin, end = live[buffer.name]
        buffers.append(
            {
                "name": buffer.name,
                "label": buffer.label,
                "op": kinds.index(buffer.op),
                "where": buffer.where,
                "type": _type(buffer.dtype, buffer.shape),
                "segment": segments.index(placement.segment),
                "a": placement.offset,
                "b": placement.end,
                "s": begin,
                "t": end,
                "persistent": buffer.persistent,
                "uses": sorted(set(used)),
            }
        )
    buffers.sort(key=lambda b: (b["segment"], b["a"], b["s"], b["name"]))
    shown = {
        "fingerprint": plan.fingerprint[:12],
        "kinds": kinds,
        "streams": streams,
        "operations": [
            {
                "name": operation.name,
                "op": operation.op,
                "stream": streams.index(operation.stream),
                "group": operation.group or "",
                # Frames are numbers: many operations share them.
                "stack": [frames.setdefault(f, len(frames)) for f in operation.stack],
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
        "edges": sorted({(position[a], position[b]) for a, b in problem.edges}),
        "together": [sorted(pair) for pair in sorted(problem.together)],
        "times": _times([problem.operations[i].time for i in order]),
        "barriers": [
            {**asdict(barrier), "at": position[barrier.before]} for barrier in plan.barriers
        ],
        "unplanned": [asdict(u) for u in plan.unplanned],
        "advice": None if advice is None else _changes(advice),
        "trades": _changes(trades),
        "peaks": _peaks(plan),
    }
    shown["frames"] = list(frames)
    return shown


def _changes(found: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"saves": a.saves, "text": a.text, "buffers": list(a.buffers[:20])} for a in found]


def _peaks(plan: Plan) -> list[dict[str, Any]]:
    """Which buffers make the peak of each segment."""
    nbytes = {b.name: b.nbytes for b in plan.problem.buffers}
    peaks = []
    for segment in plan.segments:
        names = sorted(segment.witness, key=lambda n: (-nbytes[n], n))
        if names:
            text = (
                f"{len(names)} buffers that are live together make the peak of {segment.name!r}, "
                f"{segment.nbytes:,} bytes; the largest has {nbytes[names[0]]:,} bytes"
            )
            peaks.append({"saves": 0, "text": text, "buffers": names[:20]})
    return peaks


def _times(clock: list[tuple[int, ...]]) -> list[int]:
    """Where each operation begins on the program's own clock, and the end; empty without one."""
    whole = all(len(time) == 2 for time in clock) and clock
    if not whole or any(a[1] != b[0] for a, b in pairwise(clock)):
        return []
    return [*(time[0] for time in clock), clock[-1][1]]


def _type(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]" if dtype else ""
