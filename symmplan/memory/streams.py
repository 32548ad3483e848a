"""Where collectives in symmetric memory may run, and which CUDA graph they are captured into.

[Note: captured steps]
    Inside a capture of a CUDA graph nothing may wait for an event from outside, and outside nothing
    may wait for an event of a capture. Such waits are not needed. A capture begins when the device
    is idle. A replay runs after everything that the program has queued on its stream, and at the
    end of a step that stream has waited for the whole step. So inside a capture a new user of some
    bytes waits only for earlier users of the same capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from symmplan.errors import RunError
from symmplan.process import PROCESS
from symmplan.torch_private import works

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

__all__ = [
    "Mark",
    "beside",
    "capture_of",
    "current_stream",
    "mark",
    "off_default_stream",
    "on_stream",
    "synchronize",
    "wait_for",
]

#: See `mark`.
Mark: TypeAlias = "tuple[int, Any]"


def current_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """`torch.cuda.current_stream`, which is slow on the host where it has to find the index.

    Args:
        device: The current one by default.
    """
    index = None if device is None else device.index
    return torch.cuda.current_stream(torch.cuda.current_device() if index is None else index)


class on_stream:  # noqa: N801 (like `torch.cuda.stream`)
    """`torch.cuda.stream`, which is slow on the host as it looks for devices twice."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        before = [current_stream()]
        if before[0].device_index != self._stream.device_index:
            before.insert(0, torch.cuda.current_stream(self._stream.device_index))
        self._before = before
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        for stream in self._before:
            torch.cuda.set_stream(stream)


def capture_of(stream: torch.cuda.Stream | None = None) -> int:
    """Number of the CUDA graph capture that a stream is in, 0 if it is in none.

    Args:
        stream: The current one by default.

    Source: cuStreamGetCaptureInfo_v2 in CUDA's driver API.
    """
    if stream is None:
        if not torch.cuda.is_current_stream_capturing():
            return 0
        stream = current_stream()
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    none = ctypes.c_void_p(None)
    failed = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.byref(status),
        ctypes.byref(number),
        *(none, none, none),
    )
    return number.value if not failed and status.value else 0


def mark(done: Any, stream: torch.cuda.Stream | None = None) -> Mark:
    """A mark behind the work that was just queued on a stream, with the capture it belongs to.

    Args:
        done: An event after it, or the work of a collective.
        stream: Which.
    """
    return capture_of(stream), done


def wait_for(marks: Sequence[Mark]) -> None:
    """Let the current stream wait; see [Note: captured steps]."""
    if not marks:
        return
    stream, capture = current_stream(), capture_of()
    for number, done in marks:
        if number != capture:
            continue
        if isinstance(done, torch.cuda.Event):
            done.wait(stream)
        else:
            done.wait()


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def synchronize(device: torch.device) -> None:
    """Wait for all work that is queued on ``device``.

    Raises:
        RunError: A CUDA graph is being captured, in which nobody can wait.
    """
    if device.type != "cuda":
        return
    if torch.cuda.is_current_stream_capturing():
        raise RunError(
            "memory would have to change hands while a CUDA graph is being captured",
            expected="a program that makes the same calls as before",
            got="a call that the plan does not know, or a tensor that lives longer",
            fix="run steps like the captured one first, and drop their tensors",
        )
    torch.cuda.synchronize(device)


@contextlib.contextmanager
def off_default_stream(device: torch.device) -> Iterator[None]:
    """Run what is inside on another stream if the current one is the default, in its order.

    The copy engines of NCCL 2.28 do not run on CUDA's default stream ("invalid argument"), and any
    communicator may have been asked for them. See cudaMemcpyBatchAsync in CUDA's runtime API.
    """
    if device.type != "cuda":
        yield
        return
    current = current_stream(device)
    if current != torch.cuda.default_stream(device):
        yield
        return
    if device not in PROCESS.side_streams:
        PROCESS.side_streams[device] = torch.cuda.Stream(device)
    side = PROCESS.side_streams[device]
    side.wait_stream(current)
    try:
        with on_stream(side):
            yield
    finally:
        current.wait_stream(side)


def beside(
    run: Callable[[], Any], device: torch.device, which: Hashable, *kept: torch.Tensor
) -> Any:
    """Queue work on a stream of its own, behind the current one; returns a work to wait for.

    Args:
        run: Queues it.
        device: Where. On the CPU it is over when this returns, which is None.
        which: Work of equal ``which`` has one stream.
        kept: Tensors that it uses, which stay alive until somebody has waited.
    """
    if device.type != "cuda":
        run()
        return None
    key = device, which
    if key not in PROCESS.side_streams:
        PROCESS.side_streams[key] = torch.cuda.Stream(device)
    side = PROCESS.side_streams[key]
    side.wait_stream(current_stream(device))
    with on_stream(side):
        run()
        done = side.record_event()
    return works.queued_work(done, *kept)
