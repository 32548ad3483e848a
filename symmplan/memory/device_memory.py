"""Bytes of a device, by its driver and by torch's caching allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan.coordination.world import current
from symmplan.device import DeviceMemory, device_of
from symmplan.errors import BackendError

if TYPE_CHECKING:
    import torch

    from symmplan.device import Allocation, HeldBlock

__all__ = [
    "Allocations",
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
        if not world.devices:
            return None
        now, most, reserved, allocations = world.allocated()
        return DeviceMemory(1 << 60, now, reserved, now, most, allocations=allocations)
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


class Allocations:
    """What torch's allocator allocates and frees on a device for a while."""

    def __init__(self) -> None:
        self._begun: tuple[torch.device, int, list[HeldBlock]] | None = None

    def begin(self, device: torch.device) -> None:
        """Note it from now on, where the allocator can. Collective: no."""
        self.end()
        world = current()
        begun = device_of(device).note_allocations() if world is None else world.note()
        self._begun = None if begun is None else (device, *begun)

    def end(self) -> tuple[list[HeldBlock], list[Allocation]]:
        """What it had when that began, and what was noted; nothing if that is not all.

        Collective: no.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return [], []
        device, since, held = begun
        world = current()
        noted = device_of(device).noted_allocations if world is None else world.noted
        return held, noted(since)


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
