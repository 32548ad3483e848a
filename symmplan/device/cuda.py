"""CUDA devices."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from symmplan.device.base import Allocation, Device, DeviceMemory, HeldBlock
from symmplan.process import PROCESS
from symmplan.torch_private import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
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
    def copies(
        self, pieces: Sequence[tuple[int, int, int, torch.Tensor]]
    ) -> Callable[[Sequence[torch.Tensor]], None]:
        """What copies pieces of tensors: one launch where nothing is captured or cast."""
        one_by_one = super().copies(pieces)
        if len(pieces) < 2 or not hasattr(_driver(), "cuMemcpyBatchAsync"):
            return one_by_one
        batch = _Batch(pieces)

        def copy(sources: Sequence[torch.Tensor]) -> None:
            if self.is_capturing() or not batch.launched(sources, self.stream_number()):
                one_by_one(sources)

        return copy

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
        return DeviceMemory(
            free,
            reserved,
            most_reserved,
            allocated,
            most_allocated,
            total,
            retries=int(known.get("num_alloc_retries", 0)),
            allocations=int(known.get("allocation.all.allocated", 0)),
        )

    @override
    def note_allocations(self) -> tuple[int, list[HeldBlock]] | None:
        if not PROCESS.histories and not devices.begin_history():
            return None
        PROCESS.histories += 1
        held, history = devices.blocks_and_history(self.device)
        return len(history or ()), [HeldBlock(*block) for block in held]

    @override
    def noted_allocations(self, since: int) -> list[Allocation]:
        _, history = devices.blocks_and_history(self.device)
        PROCESS.histories -= 1
        if not PROCESS.histories:
            devices.end_history()
        found, number = [], 0
        for address, nbytes, stream in (history or ())[since:]:
            number += nbytes > 0
            found.append(Allocation(number if nbytes else 0, address, nbytes, stream))
        return found

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


class _Batch:
    """Copies by one call of the driver. Captures have no such call.

    Source: cuMemcpyBatchAsync in CUDA's driver API, from 12.8 on.
    """

    def __init__(self, pieces: Sequence[tuple[int, int, int, torch.Tensor]]) -> None:
        which, begins, counts, targets = zip(*pieces, strict=True)
        self._dtypes = {target.dtype for target in targets}
        itemsizes = np.array([target.itemsize for target in targets], np.uint64)
        self._which = np.array(which)
        self._begins = np.array(begins, np.uint64) * itemsizes
        self._sources = np.empty(len(pieces), np.uint64)
        self._targets = np.array([target.data_ptr() for target in targets], np.uint64)
        self._nbytes = np.array(counts, np.uint64) * itemsizes
        # A source is read in the stream's order, the copies beside kernels: one for all.
        self._options = (ctypes.c_int32 * 6)(1, 0, 0, 0, 0, 1)
        self._first = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)
        self._given = (
            *(_pointer(a) for a in (self._targets, self._sources, self._nbytes)),
            ctypes.c_size_t(len(pieces)),
            ctypes.byref(self._options),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
            ctypes.byref(self._failed),
        )
        self._launch = _driver().cuMemcpyBatchAsync

    def launched(self, sources: Sequence[torch.Tensor], stream: int) -> bool:
        """Whether all copies were launched; else none was."""
        if stream == 0 or {source.dtype for source in sources} != self._dtypes:
            return False  # the driver refuses the default stream
        bases = np.array([source.data_ptr() for source in sources], np.uint64)
        np.add(bases[self._which], self._begins, out=self._sources)
        return bool(self._launch(*self._given, ctypes.c_void_p(stream)) == 0)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
