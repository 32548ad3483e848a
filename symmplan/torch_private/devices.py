"""CUDA devices: how they are named, what they reach, which stream is current."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

import torch

from symmplan.torch_private.table.ops import ALLOCATIONS, STREAMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

#: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED.
_MULTICAST = 132
#: The most entries of the allocator's history that are kept.
_ENTRIES = 1 << 20


def has_multicast(device: torch.device) -> bool:
    """Whether a CUDA device takes part in NVLink multicast.

    Asked of the driver, as torch does: torch's own question would settle which allocator its
    symmetric memory has, before NCCL's can be chosen.

    Source: cuDeviceGetAttribute in CUDA's driver API, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED.
    """
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0") not in ("", "0"):
        return False
    torch.cuda.init()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    number, found = ctypes.c_int(0), ctypes.c_int(0)
    failed = driver.cuDeviceGet(ctypes.byref(number), _index(device))
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(found), _MULTICAST, number)
    return not failed and bool(found.value)


def device_uuid(device: torch.device) -> str:
    """Names a CUDA device among all; empty where torch does not say."""
    found = getattr(torch.cuda.get_device_properties(_index(device)), "uuid", "")
    return str(found)


def blocked_devices(device: torch.device) -> list[str]:
    """The CUDA devices that this process sees, and whose memory ``device`` cannot address."""
    mine, others = _index(device), range(torch.cuda.device_count())
    blocked = (i for i in others if i != mine and not torch.cuda.can_device_access_peer(mine, i))
    return [device_uuid(torch.device("cuda", i)) for i in blocked]


def current_stream_of(device: torch.device) -> Callable[[], int]:
    """A cheap way to ask for the current stream of a CUDA device, as a number."""
    index = torch.cuda.current_device() if device.index is None else device.index
    get = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if get is None:
        return lambda: int(torch.cuda.current_stream(index).cuda_stream)
    return functools.partial(get, index)


def followed(after: Mapping[str, Callable[..., None]]) -> AbstractContextManager[None]:
    """While inside, functions of `torch.cuda` and its classes are followed by others.

    Args:
        after: ``{"Event.record": called behind each call, with its arguments}``.
    """

    def behind(name: str, then: Callable[..., None]) -> Callable[..., None]:
        owner, _, method = name.rpartition(".")
        function = getattr(torch.cuda if owner == "cuda" else getattr(torch.cuda, owner), method)

        def run(*args: Any, **kwargs: Any) -> None:
            function(*args, **kwargs)
            then(*args, **kwargs)

        return run

    return STREAMS.replaced(**{name: behind(name, then) for name, then in after.items()})


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def begin_history() -> bool:
    """Have torch's allocator keep a history of all devices from now on, without stacks.

    Returns:
        False if it cannot, or does so already.
    """
    if ALLOCATIONS.missing() or torch._C._cuda_isHistoryEnabled():
        return False
    if torch.cuda.memory.get_allocator_backend() != "native":
        return False
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=_ENTRIES)
    return True


def end_history() -> None:
    """It keeps none any more."""
    torch.cuda.memory._record_memory_history(None)


def blocks_and_history(
    device: torch.device,
) -> tuple[list[tuple[int, int, bool, int, int, bool]], list[tuple[int, int, int]] | None]:
    """What torch's allocator has of a device, and the history that it keeps.

    Returns:
        ``(address, bytes, whether it is free, address of the block of the driver, stream, whether
        that is of the pool of small ones)``, by address; and ``(address, bytes, stream)`` of each
        block that it allocated since the history began, and ``(address, 0, 0)`` where it was free
        again. None in place of these if entries are missing, or if the allocator was told not to
        work as by default.
    """
    index, snapshot = _index(device), torch.cuda.memory._snapshot()
    blocks = []
    for segment in snapshot["segments"]:
        if segment["device"] != index:
            continue
        at = int(segment["address"])
        of = at, int(segment["stream"]), segment["segment_type"] == "small"
        for block in segment["blocks"]:
            nbytes = int(block["size"])
            blocks.append((at, nbytes, block["state"] == "inactive", *of))
            at += nbytes
    entries = snapshot["device_traces"][index]
    settings = snapshot.get("allocator_settings", {})
    if len(entries) >= _ENTRIES or settings.get("expandable_segments"):
        return blocks, None
    history = []
    for entry in entries:
        if entry["action"] == "alloc":
            history.append((int(entry["addr"]), int(entry["size"]), int(entry["stream"])))
        elif entry["action"] == "free_completed":
            history.append((int(entry["addr"]), 0, 0))
    return blocks, history
