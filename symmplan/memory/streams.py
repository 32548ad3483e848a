"""Where collectives in symmetric memory may run, and which CUDA graph they are captured into.

[Note: captured steps]
    What a CUDA graph captures may not wait for an event from outside, nor what is outside for one
    of a capture. Nor does it have to. A capture begins when the device has nothing left to do, and
    a replay comes behind what the program has queued on the stream that it is launched on, which
    at the end of a step has waited for all that the step did. So who waits for whoever had some
    bytes before waits for those of its own capture alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from symmplan.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Mark", "capture_of", "mark", "off_default_stream", "synchronize", "wait_for"]

#: See `mark`.
Mark: TypeAlias = "tuple[int, Callable[[], Any]]"


def capture_of(stream: torch.cuda.Stream | None = None) -> int:
    """Number of the CUDA graph capture that a stream is in, 0 if it is in none.

    Args:
        stream: The current one by default.

    Source: cuStreamGetCaptureInfo_v2 in CUDA's driver API.
    """
    if stream is None:
        if not torch.cuda.is_current_stream_capturing():
            return 0
        stream = torch.cuda.current_stream()
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    none = ctypes.c_void_p(None)
    failed = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.byref(status),
        ctypes.byref(number),
        *(none, none, none),
    )
    return number.value if not failed and status.value else 0


def mark(wait: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> Mark:
    """What waits for something that was just queued on a stream, with the capture it belongs to."""
    return capture_of(stream), wait


def wait_for(marks: Sequence[Mark]) -> None:
    """Let the current stream wait; see [Note: captured steps]."""
    capture = capture_of() if marks else 0
    for number, wait in marks:
        if number == capture:
            wait()


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
            expected="a program that does what it did before",
            got="one that the plan does not know, or that holds a tensor for longer",
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
    current = torch.cuda.current_stream(device)
    if current != torch.cuda.default_stream(device):
        yield
        return
    side = _side(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        current.wait_stream(side)


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
