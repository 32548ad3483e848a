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
from typing import TYPE_CHECKING, Any, TypeAlias

from symmplan.device import Device, device_of
from symmplan.errors import RunError
from symmplan.process import PROCESS
from symmplan.torch_private import works

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    import torch

__all__ = [
    "Mark",
    "Queued",
    "behind",
    "beside",
    "mark",
    "off_default_stream",
    "queued_on",
    "synchronize",
    "wait_for",
]

#: See `mark`.
Mark: TypeAlias = tuple[Device, int, Any]
#: A stream that work was queued on, and the number of the capture that it belongs to.
Queued: TypeAlias = tuple[Any, int]


def mark(done: Any, device: Device, stream: Any = None) -> Mark:
    """A mark behind the work that was just queued on a stream, with the capture it belongs to.

    Args:
        done: An event after it, or the work of a collective.
        device: Where.
        stream: Which, the current one if None.
    """
    return device, device.capture_of(stream), done


def queued_on(stream: Any, device: Device) -> Queued | None:
    """Where work was just queued, for `behind`; ``stream`` is the current one, None on the CPU."""
    return None if stream is None else (stream, device.capture_of())


def behind(queued: Queued | None, device: Device) -> Any:
    """Let the current stream, which is returned, run behind what was queued, without a mark of it.

    It also waits for what that stream was given since; see [Note: captured steps].
    """
    stream = device.current_stream()
    if queued is not None and queued[0] != stream:
        before, number = queued
        if number == device.capture_of() == device.capture_of(before):
            stream.wait_stream(before)
    return stream


def wait_for(marks: Sequence[Mark]) -> None:
    """Let the current stream wait for marks of one device; see [Note: captured steps]."""
    if not marks:
        return
    device = marks[0][0]
    stream, capture = device.current_stream(), device.capture_of()
    for _, number, done in marks:
        if number != capture:
            continue
        if isinstance(done, device.event_type):
            done.wait(stream)
        else:
            done.wait()


def synchronize(device: torch.device) -> None:
    """Wait for all work that is queued on ``device``.

    Raises:
        RunError: A CUDA graph is being captured, in which nobody can wait.
    """
    there = device_of(device)
    if there.is_capturing():
        raise RunError(
            "memory would have to change hands while a CUDA graph is being captured",
            expected="a program that makes the same calls as before",
            got="a call that the plan does not know, or a tensor that lives longer",
            fix="run steps like the captured one first, and drop their tensors",
        )
    there.synchronize()


@contextlib.contextmanager
def off_default_stream(device: torch.device) -> Iterator[None]:
    """Run what is inside on another stream if the current one is the default, in its order.

    The copy engines of NCCL 2.28 do not run on CUDA's default stream ("invalid argument"), and any
    communicator may have been asked for them. See cudaMemcpyBatchAsync in CUDA's runtime API.
    """
    there = device_of(device)
    current = there.current_stream()
    if not there.is_accelerator or current != there.default_stream():
        yield
        return
    if device not in PROCESS.side_streams:
        PROCESS.side_streams[device] = there.new_stream()
    side = PROCESS.side_streams[device]
    side.wait_stream(current)
    try:
        with there.on_stream(side):
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
    there = device_of(device)
    if not there.is_accelerator:
        run()
        return None
    key = device, which
    if key not in PROCESS.side_streams:
        PROCESS.side_streams[key] = there.new_stream()
    side = PROCESS.side_streams[key]
    side.wait_stream(there.current_stream())
    with there.on_stream(side):
        run()
        done = side.record_event()
    return works.queued_work(done, *kept)
