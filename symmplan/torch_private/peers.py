"""CUDA allocations that other processes of the host map.

Source: CUDA's driver API, "Virtual Memory Management", through ``cuda.bindings``, which torch
requires where it is built for CUDA.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch


def can_map() -> bool:
    """Whether this process can map other processes' allocations."""
    return _driver() is not None


def share(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Make the allocation below a tensor mappable.

    Returns:
        A file descriptor, which who asks closes; the bytes of the allocation; the byte of it at
        which the tensor begins.

    Raises:
        RuntimeError: It is no memory that processes can share.
    """
    driver, address = _driver(), tensor.data_ptr()
    begin, nbytes = _checked(driver.cuMemGetAddressRange(address))
    handle = _checked(driver.cuMemRetainAllocationHandle(address))
    try:
        file = _checked(driver.cuMemExportToShareableHandle(handle, _files(driver), 0))
    finally:
        _checked(driver.cuMemRelease(handle))
    return int(file), int(nbytes), address - int(begin)


def mapped(file: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """The bytes that another process shares, as a one-dimensional uint8 tensor of ``device``.

    They are unmapped with the last tensor on them, when the device may no longer use them.

    Args:
        file: A descriptor of this process that stands for the allocation; the caller's to close.
        nbytes: Of the allocation.
        device: It reads and writes them.

    Raises:
        RuntimeError: The device cannot address them.
    """
    driver = _driver()
    handle = _checked(driver.cuMemImportFromShareableHandle(file, _files(driver)))
    try:
        address = _checked(driver.cuMemAddressReserve(nbytes, 0, 0, 0))
        try:
            _checked(driver.cuMemMap(address, nbytes, 0, handle, 0))
        except RuntimeError:
            driver.cuMemAddressFree(address, nbytes)
            raise
    finally:
        driver.cuMemRelease(handle)  # the mapping keeps the bytes
    try:
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device.index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _checked(driver.cuMemSetAccess(address, nbytes, [access], 1))
    except RuntimeError:
        _unmap(int(address), nbytes)
        raise
    return tensor_at(int(address), nbytes, device, _unmap, nbytes)


def tensor_at(
    address: int, nbytes: int, device: torch.device, free: Any, *more: Any
) -> torch.Tensor:
    """Bytes at an address of a device, as a tensor; ``free(address, *more)`` frees them with it."""
    make: Any = torch._C._construct_storage_from_data_pointer
    storage = make(address, device, nbytes)
    weakref.finalize(storage, free, address, *more).atexit = False
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _unmap(address: int, nbytes: int) -> None:
    driver = _driver()
    driver.cuMemUnmap(address, nbytes)
    driver.cuMemAddressFree(address, nbytes)


@functools.cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


def _files(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _checked(said: Any) -> Any:
    """What a function of the driver returned besides its result.

    Raises:
        RuntimeError: It failed.
    """
    result, *found = said
    if int(result):
        raise RuntimeError(f"CUDA driver error: {result.name}")
    return found[0] if len(found) == 1 else tuple(found)
