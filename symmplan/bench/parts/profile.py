"""What ran on a device during a step: kernels by kind, and gathers beside computation."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from symmplan.runtime.observe import DeviceEvent, kind_of, profiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["beside", "gathers_of", "profile", "profile_gathers", "summed"]

_COMMUNICATION = ("symmetric kernels", "NCCL kernels", "copy engines")
#: What a gather should hide behind.
_COMPUTATION = ("attention", "GEMM", "sums", "other")
#: Copies of one gather follow each other more closely than this, in nanoseconds.
_GAP = 20_000
#: What FSDP2 calls the host's part of a gather.
_GATHER = re.compile(r"FSDP::all_gather( \(|$)")


def summed(events: Iterable[DeviceEvent]) -> dict[str, Any]:
    """Milliseconds and numbers of each kind, and the span.

    Args:
        events: They may overlap.
    """
    spent: dict[str, int] = {}
    counts: dict[str, int] = {}
    collectives: dict[str, int] = {}
    events = list(events)
    for event in events:
        kind = kind_of(event.name)
        spent[kind] = spent.get(kind, 0) + event.end - event.begin
        counts[kind] = counts.get(kind, 0) + 1
        if kind in _COMMUNICATION:
            short = re.split(r"[(<]", event.name)[0].strip()
            collectives[short] = collectives.get(short, 0) + 1
    span = max((e.end for e in events), default=0) - min((e.begin for e in events), default=0)
    return {
        "span_ms": round(span / 1e6, 2),
        "ms": {kind: round(t / 1e6, 2) for kind, t in sorted(spent.items())},
        "counts": dict(sorted(counts.items())),
        "collectives": dict(sorted(collectives.items())),
    }


def gathers_of(
    events: Iterable[DeviceEvent], calls: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """When gathers ran on the device, ``(begin, end)`` each, in the order of their begins.

    Args:
        events: Of a program whose only copies between devices are gathers: a forward pass.
        calls: ``(begin, end)`` of the host's part of each gather, which tells whose an event is;
            where it does not, events that nearly touch each other are one gather.
    """
    calls = sorted(calls)
    begins = [begin for begin, _ in calls]
    of_call: dict[int, tuple[int, int]] = {}
    others: list[tuple[int, int]] = []
    for event in sorted(events, key=lambda e: (e.begin, e.end)):
        kind = kind_of(event.name)
        if kind not in _COMMUNICATION or (kind != "copy engines" and "Gather" not in event.name):
            continue
        call = -1 if event.launched is None else bisect_right(begins, event.launched) - 1
        if call >= 0 and event.launched is not None and event.launched <= calls[call][1]:
            begin, end = of_call.get(call, (event.begin, event.end))
            of_call[call] = (min(begin, event.begin), max(end, event.end))
        elif others and event.begin - others[-1][1] <= _GAP:
            others[-1] = (others[-1][0], max(others[-1][1], event.end))
        else:
            others.append((event.begin, event.end))
    return sorted([*of_call.values(), *others])


def beside(events: Iterable[DeviceEvent], gathers: Iterable[tuple[int, int]]) -> int:
    """How many of ``gathers`` ran while something was computed."""
    busy = [(e.begin, e.end) for e in events if kind_of(e.name) in _COMPUTATION]
    return sum(any(a < end and begin < b for a, b in busy) for begin, end in gathers)


def profile(step: Callable[[], Any]) -> dict[str, Any]:
    """Run ``step`` once under torch's profiler; see `summed`.

    Collective: as ``step``.
    """
    import torch

    return summed(profiled(step, torch.device("cuda"), host=False).events)


def profile_gathers(forward: Callable[[], Any]) -> dict[str, int]:
    """Run a forward pass under torch's profiler and count its gathers.

    Returns:
        ``gathers`` that ran, and how many of them ran ``beside`` computation. The first cannot.

    Collective: as ``forward``.
    """
    import torch

    seen = profiled(forward, torch.device("cuda"))
    calls = [(begin, end) for name, begin, end in seen.host if _GATHER.match(name)]
    gathers = gathers_of(seen.events, calls)
    return {"gathers": len(gathers), "beside": beside(seen.events, gathers)}
