"""Adapters that apply symmplan inside other people's trainers.

`SymmplanCallback` is for Hugging Face's ``Trainer`` and the trainers of TRL;
`symmplan.trainers.torchtitan` has torchtitan's trainer. The extras ``trainers`` and ``torchtitan``
install what they need, in the versions that are tested. `symmplan.trainers.versions` refuses
others when an adapter is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symmplan.fsdp import Handle
    from symmplan.trainers.hugging_face import SymmplanCallback as SymmplanCallback

__all__ = ["SymmplanCallback", "watched"]

#: What a trainer logs of `symmplan.fsdp.Handle.metrics`; the rest seldom changes.
_WATCHED = ("segment_bytes", "recorded", "served", "plain", "copies", "replans", "flat")


def watched(handle: Handle) -> dict[str, int]:
    """The numbers of a handle that a trainer logs every few steps.

    Args:
        handle: What `symmplan.fsdp.apply` returned.

    Returns:
        Of `symmplan.fsdp.Handle.metrics`: ``symmplan/segment_bytes`` (bytes on this rank that the
        steps use), ``recorded``, ``served``, ``plain``, ``copies``, ``replans``, ``flat``, and by
        which algorithms planned collectives run: ``symmplan/algorithms/push`` and so on, without
        those by which none runs.

    Collective: no; it waits for nothing, also not for a device.
    """
    metrics = handle.metrics()
    algorithms = {name: n for name, n in metrics.items() if "/algorithms/" in name and n}
    return {f"symmplan/{name}": metrics[f"symmplan/{name}"] for name in _WATCHED} | algorithms


def __getattr__(name: str) -> Any:
    if name != "SymmplanCallback":
        raise AttributeError(f"module 'symmplan.trainers' has no attribute {name!r}")
    from symmplan.trainers.hugging_face import SymmplanCallback

    return SymmplanCallback
