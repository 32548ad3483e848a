"""CUDA devices."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from symmplan.device.base import Device, DeviceMemory
from symmplan.torch_private import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

__all__ = ["CudaDevice"]


class CudaDevice(Device):
    """A CUDA device."""

    is_accelerator = True
    has_kernels = True
    pins_memory = True
    event_type = torch.cuda.Event
    activities = ("CUDA",)

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device("cuda", index))
        self._index: int = index
        self.stream_number = devices.current_stream_of(self.device)

    @staticmethod
    @override
    def is_available() -> bool:
        return torch.cuda.is_available()

    @staticmethod
    @override
    def names() -> list[str]:
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]

    @override
    def uuid(self) -> str:
        return devices.device_uuid(self.device)

    @override
    def blocked(self) -> list[str]:
        return devices.blocked_devices(self.device)

    @override
    def has_multicast(self) -> bool:
        return devices.has_multicast(self.device)

    @override
    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._index)

    @override
    def set_current(self) -> None:
        torch.cuda.set_device(self._index)

    @override
    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self._index)

    @override
    def default_stream(self) -> Any:
        return torch.cuda.default_stream(self._index)

    @override
    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    @override
    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return _OnStream(stream)

    @override
    def number_of(self, stream: Any) -> int | None:
        return getattr(stream, "cuda_stream", None)

    @override
    def event(self, *, timed: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timed)

    @override
    def record_event(self) -> Any:
        return torch.cuda.current_stream(self._index).record_event()

    @override
    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    @override
    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)

    @override
    def followed(self, after: Mapping[str, Callable[..., None]]) -> AbstractContextManager[None]:
        return devices.followed(after)

    @override
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @override
    def capture_of(self, stream: Any = None) -> int:
        """The number of a capture.

        Source: cuStreamGetCaptureInfo_v2 in CUDA's driver API.
        """
        if stream is None:
            if not torch.cuda.is_current_stream_capturing():
                return 0
            stream = self.current_stream()
        status, number = ctypes.c_int(0), ctypes.c_uint64(0)
        none = ctypes.c_void_p(None)
        failed = _driver().cuStreamGetCaptureInfo_v2(
            ctypes.c_void_p(stream.cuda_stream),
            ctypes.byref(status),
            ctypes.byref(number),
            *(none, none, none),
        )
        return number.value if not failed and status.value else 0

    @override
    @staticmethod
    def ran(event: Any) -> bool:
        return "CUDA" in str(event.device_type())

    @override
    def free_bytes(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._index)
        return int(free), int(total)

    @override
    def memory(self) -> DeviceMemory:
        known = torch.cuda.memory_stats(self._index)
        free, total = self.free_bytes()
        reserved, most_reserved, allocated, most_allocated = (
            int(known.get(f"{what}_bytes.all.{which}", 0))
            for what in ("reserved", "allocated")
            for which in ("current", "peak")
        )
        return DeviceMemory(free, reserved, most_reserved, allocated, most_allocated, total)

    @override
    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


class _OnStream:
    """`torch.cuda.stream`, which is slow on the host as it looks for devices twice."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        here, there = torch.cuda.current_device(), self._stream.device_index
        before = [torch.cuda.current_stream(here)]
        if here != there:
            before.insert(0, torch.cuda.current_stream(there))
        self._before = before
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        for stream in self._before:
            torch.cuda.set_stream(stream)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
