"""What ran on a device during a step: kernels by kind, and gathers beside computation."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Event", "beside", "gathers_of", "kind_of", "profile", "profile_gathers", "summed"]

#: The first kind one of whose words is in a kernel's name.
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("symmetric kernels", ("ncclsymk", "ncclsymdev")),
    ("NCCL kernels", ("nccl",)),
    ("copy engines", ("memcpy ptop",)),
    ("local copies", ("memcpy",)),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("GEMM", ("gemm", "nvjet", "cutlass", "xmma", "cublas")),
    ("copies out", ("split_with_sizes",)),
    ("gradient copies in", ("chunk_cat",)),
    ("shard copies in", ("multi_tensor", "foreach")),
    ("sums", ("reduce_kernel",)),
)
_COMMUNICATION = ("symmetric kernels", "NCCL kernels", "copy engines")
#: What a gather should hide behind.
_COMPUTATION = ("attention", "GEMM", "sums", "other")
#: Copies of one gather follow each other more closely than this, in nanoseconds.
_GAP = 20_000
#: What FSDP2 calls the host's part of a gather.
_GATHER = re.compile(r"FSDP::all_gather( \(|$)")
#: Calls of the CUDA runtime or driver; ops have correlation numbers too, but others.
_LAUNCH = re.compile(r"cu(da)?[A-Z]")


@frozen
class Event:
    """A kernel or copy on a device.

    Attributes:
        name: As the profiler has it.
        begin: Nanoseconds.
        end: Nanoseconds.
        launched: When the host launched it, in nanoseconds; None if that is not known.
    """

    name: str
    begin: int
    end: int
    launched: int | None = None


def kind_of(name: str) -> str:
    """The kind of a kernel or copy with this name."""
    lower = name.lower()
    for kind, words in _KINDS:
        if any(word in lower for word in words):
            return kind
    return "other"


def summed(events: Iterable[Event]) -> dict[str, Any]:
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
    events: Iterable[Event], calls: Sequence[tuple[int, int]] = ()
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


def beside(events: Iterable[Event], gathers: Iterable[tuple[int, int]]) -> int:
    """How many of ``gathers`` ran while something was computed."""
    busy = [(e.begin, e.end) for e in events if kind_of(e.name) in _COMPUTATION]
    return sum(any(a < end and begin < b for a, b in busy) for begin, end in gathers)


def profile(step: Callable[[], Any]) -> dict[str, Any]:
    """Run ``step`` once under torch's profiler; see `summed`.

    Collective: as ``step``.
    """
    events, _ = _profiled(step, host=False)
    return summed(events)


def profile_gathers(forward: Callable[[], Any]) -> dict[str, int]:
    """Run a forward pass under torch's profiler and count its gathers.

    Returns:
        ``gathers`` that ran, and how many of them ran ``beside`` computation. The first cannot.

    Collective: as ``forward``.
    """
    events, calls = _profiled(forward, host=True)
    gathers = gathers_of(events, calls)
    return {"gathers": len(gathers), "beside": beside(events, gathers)}


def _profiled(act: Callable[[], Any], *, host: bool) -> tuple[list[Event], list[tuple[int, int]]]:
    """What ran on the device, and when the host was in FSDP2's gathers."""
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if host else [])]
    with torch.profiler.profile(activities=activities) as seen:
        act()
        torch.cuda.synchronize()
    kineto: Any = seen.profiler
    on_device, launches, calls = [], {}, []
    for event in kineto.kineto_results.events():
        name, begin = event.name(), event.start_ns()
        end = begin + event.duration_ns()
        if "CUDA" not in str(event.device_type()):
            if _LAUNCH.match(name):
                launches[event.correlation_id()] = begin
            elif _GATHER.match(name):
                calls.append((begin, end))
        elif not name.startswith(("Memset", "FSDP::")) and not _annotates(event):
            on_device.append((name, begin, end, event.correlation_id()))
    return [Event(n, b, e, launches.get(c)) for n, b, e, c in on_device], calls


def _annotates(event: Any) -> bool:
    """Whether an event is the device's part of a ``record_function``, no kernel."""
    asked = getattr(event, "is_user_annotation", None)
    return bool(asked is not None and asked())
