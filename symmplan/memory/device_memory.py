"""Bytes of a device, by its driver and by torch's caching allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from symmplan.coordination.world import current

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceMemory", "device_memory", "empty_cache", "most_lately"]


@frozen
class DeviceMemory:
    """Bytes of a device at a moment.

    Attributes:
        free: Free bytes, by the driver.
        reserved: Bytes that torch's allocator has from the driver, in use or cached.
        most_reserved: The most that it had so far.
        allocated: Bytes of these that tensors have.
        most_allocated: The most that they had so far.
    """

    free: int
    reserved: int = 0
    most_reserved: int = 0
    allocated: int = 0
    most_allocated: int = 0


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The bytes of a device now; None if torch has no caching allocator. Collective: no.

    A simulated device is as large as it must be: all bytes are free that tensors do not have.
    """
    world = current()
    if world is not None:
        now, most = world.allocated()
        return DeviceMemory(1 << 60, now, most, now, most) if world.devices else None
    if device.type != "cuda":
        return None
    import torch

    known = torch.cuda.memory_stats(device)
    return DeviceMemory(
        int(torch.cuda.mem_get_info(device)[0]),
        *(
            int(known.get(f"{what}_bytes.all.{which}", 0))
            for what in ("reserved", "allocated")
            for which in ("current", "peak")
        ),
    )


def most_lately(there: DeviceMemory, before: int) -> int:
    """The most bytes that tensors had since somebody asked before. Collective: no.

    Torch says only what was the most so far: a peak below that is not seen.

    Args:
        there: What the device has now.
        before: ``there.most_allocated`` as it was then.
    """
    world = current()
    if world is not None:
        return world.lately()
    return there.most_allocated if there.most_allocated > before else there.allocated


def empty_cache(device: torch.device) -> None:
    """Return the bytes that torch's allocator has cached to the driver. Collective: no."""
    if device.type == "cuda":
        import torch

        with torch.cuda.device(device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
