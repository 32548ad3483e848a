"""A plan for viewers that people have open: ui.perfetto.dev and pytorch.org/memory_viz."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symmplan.report.data import drawing

if TYPE_CHECKING:
    import os

    from symmplan.model import Plan

__all__ = ["memory_snapshot", "perfetto_trace", "write_memory_viz", "write_perfetto"]

#: Microseconds for each position on the time axis: a plan knows order and no durations.
_STEP = 10
#: Where the first segment of a snapshot begins, and how far apart segments are, in bytes.
_BASE, _APART = 1 << 44, 1 << 40


def perfetto_trace(plan: Plan) -> dict[str, Any]:
    """The plan as a Chrome trace: a track for each stream, for each buffer, and live bytes.

    Equal plans give equal traces. Collective: no.
    """
    data = drawing(plan)
    at = _clock(data)
    events: list[dict[str, Any]] = [_name("process", 1, 0, "program")]
    for i, stream in enumerate(data["streams"]):
        events.append(_name("thread", 1, i + 1, f"stream {stream}"))
    for i, operation in enumerate(data["operations"]):
        args = {"op": operation["op"], "group": operation["group"]}
        args["stack"] = "\n".join(data["frames"][f] for f in operation["stack"])
        what = {"name": operation["name"], "cat": "operation", "args": args}
        timed = {"ts": at[i], "dur": at[i + 1] - at[i], "pid": 1, "tid": operation["stream"] + 1}
        events.append({"ph": "X", **what, **timed})
    for barrier in data["barriers"]:
        what = {"name": f"barrier {barrier['group']}", "cat": "barrier", "s": "g"}
        timed = {"ts": at[barrier["at"]], "pid": 1, "tid": 1}
        events.append(
            {"ph": "i", **what, **timed, "args": {"protects": ", ".join(barrier["buffers"])}}
        )
    for number, segment in enumerate(data["segments"]):
        pid = number + 2
        events.append(_name("process", pid, 0, f"segment {segment['name']}"))
        mine = [(i, b) for i, b in enumerate(data["buffers"]) if b["segment"] == number]
        for i, b in mine:
            args = {"op": data["kinds"][b["op"]], "where": b["where"], "type": b["type"]}
            args |= {"offset": b["a"], "end": b["b"], "nbytes": b["b"] - b["a"]}
            what = {"name": b["name"], "cat": segment["name"], "id": i, "pid": pid, "tid": 0}
            events.append({"ph": "b", "ts": at[b["s"]], **what, "args": args})
            events.append({"ph": "e", "ts": at[b["t"]], **what})
        for ts, live in _live([b for _, b in mine], at):
            count = {"live bytes": live, "free bytes": segment["nbytes"] - live}
            events.append({"ph": "C", "name": "bytes", "ts": ts, "pid": pid, "args": count})
    about = {"plan": plan.fingerprint, "time": "order, not durations"}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def memory_snapshot(plan: Plan) -> dict[str, Any]:
    """The plan as a snapshot of torch's memory shows it: segments, allocations, frees.

    Equal plans give equal snapshots. Collective: no.
    """
    data = drawing(plan)
    at = _clock(data)
    segments, trace = [], []
    for number, segment in enumerate(data["segments"]):
        base = _BASE + number * _APART
        whole = {"address": base, "size": segment["nbytes"], "requested_size": 0, "frames": []}
        sizes = {"total_size": segment["nbytes"], "allocated_size": 0, "active_size": 0}
        where = {"device": 0, "address": base, "stream": 0, "segment_type": "large"}
        pool = {"segment_pool_id": (0, number), "is_expandable": False, "frames": []}
        block = {**whole, "state": "inactive"}
        segments.append({**where, **sizes, "requested_size": 0, **pool, "blocks": [block]})
        made = {"addr": base, "size": segment["nbytes"], "stream": 0, "time_us": 0}
        trace.append((-1, 0, {"action": "segment_alloc", **made, "frames": _frames(data, None, 0)}))
    for b in data["buffers"]:
        lies = {
            "addr": _BASE + b["segment"] * _APART + b["a"],
            "size": b["b"] - b["a"],
            "stream": 0,
        }
        first, last = (b["uses"] or [b["s"]])[0], (b["uses"] or [b["s"]])[-1]
        for action, moment, order, operation in (
            ("alloc", b["s"], 1, first),
            ("free_requested", b["t"], 0, last),
            ("free_completed", b["t"], 0, last),
        ):
            entry = {"action": action, **lies, "time_us": at[moment]}
            trace.append((at[moment], order, {**entry, "frames": _frames(data, b, operation)}))
    trace.sort(key=lambda entry: entry[:2])  # at one moment bytes are freed before they are used
    return {"segments": segments, "device_traces": [[entry for *_, entry in trace]]}


def write_perfetto(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `perfetto_trace` as JSON.

    Raises:
        OSError: It cannot be written.
    """
    text = json.dumps(perfetto_trace(plan), separators=(",", ":"))
    Path(path).write_text(text, encoding="utf-8", newline="\n")


def write_memory_viz(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `memory_snapshot` in the only form that the page reads, a pickle of plain values.

    Raises:
        OSError: It cannot be written.
    """
    Path(path).write_bytes(pickle.dumps(memory_snapshot(plan), protocol=4))


def _clock(data: dict[str, Any]) -> list[int]:
    """Microseconds at which each operation begins, and the end."""
    times: list[int] = data["times"]
    if times:
        return [_STEP * (time - times[0]) for time in times]
    return [_STEP * i for i in range(max(1, len(data["operations"])) + 1)]


def _live(buffers: list[dict[str, Any]], at: list[int]) -> list[tuple[int, int]]:
    """``(microseconds, live bytes)`` at each change."""
    change: dict[int, int] = {}
    for b in buffers:
        change[at[b["s"]]] = change.get(at[b["s"]], 0) + b["b"] - b["a"]
        change[at[b["t"]]] = change.get(at[b["t"]], 0) - (b["b"] - b["a"])
    live, found = 0, []
    for ts in sorted(change):
        live += change[ts]
        found.append((ts, live))
    return found


def _frames(data: dict[str, Any], buffer: dict[str, Any] | None, i: int) -> list[dict[str, Any]]:
    """What memory_viz shows as a stack: the buffer, the operation, and where it was called."""
    if buffer is None:
        return [{"name": "segment", "filename": "symmplan", "line": 0}]
    found = [{"name": buffer["name"], "filename": "buffer", "line": 0}]
    if i < len(data["operations"]):
        operation = data["operations"][i]
        found.append({"name": operation["name"], "filename": operation["op"] or "", "line": i})
        for number in reversed(operation["stack"]):
            where, _, function = data["frames"][number].rpartition(" in ")
            file, _, line = where.rpartition(":")
            found.append({"name": function, "filename": file, "line": int(line)})
    return found


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """What a process or thread of a trace is called."""
    what = {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid}
    return {**what, "args": {"name": name}}
