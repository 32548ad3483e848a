"""Bytes of a device, by its driver and by torch's caching allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceMemory", "device_memory", "empty_cache"]


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
    """The bytes of a device now; None if torch has no caching allocator. Collective: no."""
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


def empty_cache(device: torch.device) -> None:
    """Return the bytes that torch's allocator has cached to the driver. Collective: no."""
    if device.type == "cuda":
        import torch

        with torch.cuda.device(device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
