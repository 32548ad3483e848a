"""CUDA devices: how they are named, what they reach, which stream is current."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

import torch

from symmplan.torch_private.table.ops import STREAMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

#: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED.
_MULTICAST = 132


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
