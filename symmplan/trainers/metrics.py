"""The numbers of a handle that trainers log."""

from __future__ import annotations

from symmplan.errors import OptionError
from symmplan.fsdp import Handle

__all__ = ["watched"]

#: What a trainer logs of `symmplan.fsdp.Handle.metrics`; the rest seldom changes.
_WATCHED = ("segment_bytes", "recorded", "served", "plain", "copies", "replans", "flat")


def watched(handle: Handle) -> dict[str, int]:
    """The numbers of a handle that a trainer logs every few steps.

    Args:
        handle: What `symmplan.fsdp.apply` returned.

    Returns:
        A part of `symmplan.fsdp.Handle.metrics`. It has ``symmplan/segment_bytes`` (bytes on this
        rank that the steps use), ``recorded``, ``served``, ``plain``, ``copies``, ``replans`` and
        ``flat``; and by which algorithms planned collectives run, ``symmplan/algorithms/push`` and
        so on, without those by which none runs.

    Raises:
        OptionError: It is no such handle.

    Collective: no; it waits for nothing, also not for a device.
    """
    if not isinstance(handle, Handle):
        raise OptionError(
            f"{handle!r} is not a handle of symmplan.fsdp",
            expected="a symmplan.fsdp.Handle",
            got=f"a {type(handle).__name__}",
            fix="pass the result of symmplan.fsdp.apply(model)",
        )
    metrics = handle.metrics()
    algorithms = {name: n for name, n in metrics.items() if "/algorithms/" in name and n}
    return {f"symmplan/{name}": metrics[f"symmplan/{name}"] for name in _WATCHED} | algorithms
