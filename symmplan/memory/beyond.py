"""Bytes of a device beyond segments and torch's allocator, by what took them.

[Note: bytes beyond segments]
    Communicators, signal pads, mappings of peers' memory and kernels take bytes of a device that
    only its driver counts. It does not say whose they are. So the driver's number is read before
    and after each thing that may take some. What grew beyond segments and torch's allocator is
    counted as taken by that. Another process on the device may change it meanwhile, also to less
    than nothing. What first uses the program's own communicators counts what these take then.

    Trials run kernels that the program has not, and the driver may have back later what it took for
    them. So if less is in use than was counted, the trials have that much less.

    What is in use beyond all of these, and was not when something was first counted, has no owner:
    the program's later communicators, kernels that are loaded when they first run, and other
    processes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from symmplan.coordination.world import current
from symmplan.device import device_of
from symmplan.memory.device_memory import device_memory
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    import torch

__all__ = ["beyond_segments", "counting", "expected_beyond"]

#: What NCCL 2.28.9 takes on an H100 of two: for a communicator of copy engines, for the first
#: segment that is registered with one, and for the first of each group.
_COMMUNICATOR, _WINDOW, _RENDEZVOUS = 10 << 20, 36 << 20, 38 << 20


def expected_beyond(
    memory: str, segments: Iterable[Collection[str]], engines: Collection[str]
) -> int:
    """Bytes of a device that a backend's communicators and rendezvous take.

    Args:
        memory: Name of the memory backend.
        segments: Names of the groups over which each segment is reached, or was.
        engines: Names of the groups of which copy engines run some collective.

    Collective: no.
    """
    if memory != "nccl":
        return 0
    met, engines = {group for groups in segments for group in groups}, {*engines}
    first = len(met) * _RENDEZVOUS + len(engines & met) * _WINDOW
    return first + len(engines) * _COMMUNICATOR


@contextlib.contextmanager
def counting(cause: str, device: torch.device) -> Iterator[None]:
    """Count what is taken inside, beyond segments, for a cause, unless it is counted within.

    See [Note: bytes beyond segments]. If it fails, nothing is counted.

    Args:
        cause: A word for people.
        device: Where it is taken.

    Collective: no.
    """
    counted, before = sum(PROCESS.beyond.values()), _beyond(device)
    if before is not None:
        PROCESS.beyond_before.setdefault(device_of(device).device, before)
    yield
    now = _beyond(device)
    if before is None or now is None:
        return
    more = now - before - (sum(PROCESS.beyond.values()) - counted)
    if more:
        PROCESS.beyond[cause] = PROCESS.beyond.get(cause, 0) + more


def beyond_segments() -> dict[str, Any]:
    """What was counted so far, as `symmplan.runtime.stats.Stats` has it. Collective: no."""
    by_cause = dict(PROCESS.beyond)
    grown = [
        now - before
        for device, before in PROCESS.beyond_before.items()
        if (now := _beyond(device)) is not None
    ]
    without = sum(grown) - sum(by_cause.values()) if grown else 0
    returned = min(-without, by_cause.get("trials", 0))
    if returned > 0:
        by_cause["trials"] -= returned
        without += returned
    return {
        "bytes_beyond_segments": sum(by_cause.values()),
        "beyond_segments": tuple(sorted(by_cause.items(), key=lambda item: (-item[1], item[0]))),
        "bytes_without_owner": without,
    }


def _beyond(device: torch.device) -> int | None:
    """Bytes of a device that neither segments nor torch's allocator have; None if unknown."""
    there = None if current() is not None else device_memory(device)
    if there is None:
        return None
    held: int = sum(
        segment.nbytes
        for segment in PROCESS.segments
        if segment.tensor.device.type == device.type
        and device.index in (None, segment.tensor.device.index)
    )
    # What this rank has released stays there until no rank needs it.
    windows = {id(w): w for of in PROCESS.windows.values() for w in of if w is not None and w.ended}
    ended: int = sum(window.tensor.numel() for window in windows.values())
    return there.total - there.free - there.reserved - held - ended
