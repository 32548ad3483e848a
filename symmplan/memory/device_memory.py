"""Bytes of a device, by its driver and by torch's caching allocator.

[Note: bytes beyond segments]
    Communicators, signal pads, mappings of peers' memory and kernels take bytes of a device that
    only its driver counts. It does not say whose they are. So the driver's number is read before
    and after each thing that may take some. What grew beyond segments and torch's allocator is
    counted as taken by that. Another process on the device may change it meanwhile, also to less
    than nothing. What first uses the program's own communicators counts what these take then.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from symmplan.coordination.world import current
from symmplan.device import DeviceMemory, device_of
from symmplan.errors import BackendError
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = [
    "beyond_segments",
    "counting",
    "device_memory",
    "empty_cache",
    "most_lately",
    "require_left",
]

#: Bytes of a device without which nothing is registered: who fails there alone, in the midst of a
#: collective of NCCL's, leaves its peers waiting.
_TO_REGISTER = 64 << 20


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The bytes of a device now; None if torch has no caching allocator. Collective: no.

    A simulated device is as large as it must be: all bytes are free that tensors do not have.
    """
    world = current()
    if world is not None:
        now, most = world.allocated()
        return DeviceMemory(1 << 60, now, most, now, most) if world.devices else None
    return device_of(device).memory()


def most_lately(there: DeviceMemory, before: int, asker: object) -> int:
    """The most bytes that tensors had since ``asker`` asked before. Collective: no.

    Torch says only what was the most so far: a peak below that is not seen.

    Args:
        there: What the device has now.
        before: ``there.most_allocated`` as it was then.
        asker: Who asks; there are several where a program has several models.
    """
    world = current()
    if world is not None:
        return world.lately(asker)
    return there.most_allocated if there.most_allocated > before else there.allocated


def empty_cache(device: torch.device) -> None:
    """Return the bytes that torch's allocator has cached to the driver. Collective: no."""
    there = device_of(device)
    with there.current():
        there.synchronize()
        there.empty_cache()


def require_left(device: torch.device) -> None:
    """See that enough of a device is left to register memory there, if need be without the cache.

    Raises:
        BackendError: Too little is left, even if torch's allocator has nothing cached.

    Collective: no.
    """
    there = device_memory(device)
    if there is not None and there.free < _TO_REGISTER:
        empty_cache(device)
        there = device_memory(device)
    if there is not None and there.free < _TO_REGISTER:
        raise BackendError(
            f"{there.free} bytes of {device} would be left, too few to register memory",
            expected=f"{_TO_REGISTER} bytes",
            got=f"{there.free} of {there.total} bytes free",
            fix="make the plan smaller (capacity=), or free device memory first",
            free_bytes=there.free,
        )


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
    yield
    more = _beyond(device) - before - (sum(PROCESS.beyond.values()) - counted)
    if more:
        PROCESS.beyond[cause] = PROCESS.beyond.get(cause, 0) + more


def beyond_segments() -> dict[str, Any]:
    """What was counted so far, as `symmplan.runtime.stats.Stats` has it. Collective: no."""
    by_cause = sorted(PROCESS.beyond.items(), key=lambda item: (-item[1], item[0]))
    return {
        "bytes_beyond_segments": sum(PROCESS.beyond.values()),
        "beyond_segments": tuple(by_cause),
    }


def _beyond(device: torch.device) -> int:
    """Bytes of a device that neither segments nor torch's allocator have; 0 where there is none."""
    there = None if current() is not None else device_memory(device)
    if there is None:
        return 0
    held: int = sum(
        segment.nbytes
        for segment in PROCESS.segments
        if segment.tensor.device.type == device.type
        and device.index in (None, segment.tensor.device.index)
        and segment.address not in PROCESS.pools  # which the allocator has
    )
    return there.total - there.free - there.reserved - held
