"""What ran on a device during a step: kernels by kind, in milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["kind_of", "profile", "summed"]

#: The first kind one of whose words is in a kernel's name.
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("symmetric kernels", ("ncclSymk", "ncclSymDev")),
    ("NCCL kernels", ("nccl",)),
    ("copy engines", ("Memcpy PtoP",)),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("GEMM", ("gemm", "nvjet", "cutlass", "xmma", "cublas")),
    ("copies out", ("split_with_sizes",)),
    ("copies in", ("chunk_cat", "multi_tensor", "foreach", "Memcpy DtoD")),
    ("sums", ("reduce_kernel",)),
)

Event = tuple[str, int, int]


def kind_of(name: str) -> str:
    """The kind of a kernel or copy with this name."""
    lower = name.lower()
    for kind, words in _KINDS:
        if any(word.lower() in lower for word in words):
            return kind
    return "other"


def summed(events: Iterable[Event]) -> dict[str, Any]:
    """Milliseconds and numbers of each kind, and the span.

    Args:
        events: ``(name, begin, end)`` in nanoseconds. They may overlap.
    """
    spent: dict[str, float] = {}
    counts: dict[str, int] = {}
    collectives: dict[str, int] = {}
    events = list(events)
    for name, begin, end in events:
        kind = kind_of(name)
        spent[kind] = spent.get(kind, 0.0) + (end - begin) / 1e6
        counts[kind] = counts.get(kind, 0) + 1
        if kind in ("symmetric kernels", "NCCL kernels", "copy engines"):
            short = name.split("(")[0][:60]
            collectives[short] = collectives.get(short, 0) + 1
    span = max((e for _, _, e in events), default=0) - min((b for _, b, _ in events), default=0)
    return {
        "span_ms": round(span / 1e6, 2),
        "ms": {kind: round(t, 2) for kind, t in sorted(spent.items())},
        "counts": dict(sorted(counts.items())),
        "collectives": dict(sorted(collectives.items())),
    }


def profile(step: Callable[[], Any]) -> dict[str, Any]:
    """Run ``step`` once under torch's profiler.

    Collective: as ``step``.
    """
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kineto: Any = seen.profiler
    return summed(
        (e.name(), e.start_ns(), e.start_ns() + e.duration_ns())
        for e in kineto.kineto_results.events()
        if "CUDA" in str(e.device_type()) and not e.name().startswith("Memset")
    )
