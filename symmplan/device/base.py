"""What symmplan asks of a device. Here is also what the CPU answers.

[Note: streams and events]
    They are torch's objects, or doubles of them. Of a stream symmplan uses ``device``,
    ``wait_stream``, ``wait_event``, ``record_event``, ``synchronize`` and equality. Of an event it
    uses ``record``, ``wait``, ``query``, ``synchronize`` and ``elapsed_time``, all as those of
    ``torch.Stream`` and ``torch.Event``. A device without streams has None in their place, and its
    work is over when the call that started it returns.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

__all__ = ["Allocation", "Device", "DeviceMemory", "HeldBlock"]


class HeldBlock(NamedTuple):
    """A part of a block of the driver that torch's allocator has.

    Attributes:
        block: As in `Allocation`.
        nbytes: Bytes of it.
        free: Whether nothing uses it.
        segment: By what the block of the driver is told from others; its parts follow each other.
        stream: On which it was allocated.
        small: Whether it is of the pool for requests of at most 1 MiB.
    """

    block: Hashable
    nbytes: int
    free: bool
    segment: Hashable
    stream: Hashable
    small: bool


class Allocation(NamedTuple):
    """Torch's allocator allocates or frees a block.

    Attributes:
        number: How many it has allocated since it began to note them, with this; 0 if it frees.
        block: By what the block is told from others that are there at the same time.
        nbytes: Bytes that were asked for; 0 if it frees.
        stream: On which it was allocated.
    """

    number: int
    block: Hashable
    nbytes: int
    stream: Hashable


@frozen
class DeviceMemory:
    """Bytes of a device at a moment.

    Attributes:
        free: Free bytes, by the driver.
        reserved: Bytes that torch's allocator has from the driver, in use or cached.
        most_reserved: The most that it had so far.
        allocated: Bytes of these that tensors have.
        most_allocated: The most that they had so far.
        total: Bytes of the device.
        retries: How often torch's allocator has given back what it had cached to go on.
        allocations: How many blocks it has allocated.
    """

    free: int
    reserved: int = 0
    most_reserved: int = 0
    allocated: int = 0
    most_allocated: int = 0
    total: int = 0
    retries: int = 0
    allocations: int = 0


class Device:
    """One device, such as the CPU. Accelerators derive from it. Nothing here is collective.

    Args:
        device: Which. Without an index it is the current one.

    Attributes:
        device: Which, with its index if its kind has several.
        is_accelerator: Whether its work runs on streams, behind the host's back, in memory of its
            own.
        has_kernels: Whether Triton compiles kernels for it.
        pins_memory: Whether copies from the host's memory are faster if that is pinned.
        event_type: The class of its events.
        activities: What torch's profiler is told to look at besides the host, by the names in
            ``torch.profiler.ProfilerActivity``.
        stream_number: Gives the current stream as a number, quickly. See `number_of`.
    """

    is_accelerator: ClassVar[bool] = False
    has_kernels: ClassVar[bool] = False
    pins_memory: ClassVar[bool] = False
    event_type: ClassVar[Any] = type(None)
    activities: ClassVar[tuple[str, ...]] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream_number: Callable[[], int] = lambda: 0

    @staticmethod
    def is_available() -> bool:
        """Whether this process has a device of the kind."""
        return True

    @staticmethod
    def names() -> list[str]:
        """The name of each device of the kind that this process has, for people."""
        return ["cpu"]

    # What it is among others.

    def uuid(self) -> str:
        """A name of the device among all devices; empty if it has none."""
        return ""

    def blocked(self) -> list[str]:
        """The names, as `uuid` has them, of devices here whose memory it cannot address."""
        return []

    def has_multicast(self) -> bool:
        """Whether it takes part in NVLink multicast."""
        return False

    def current(self) -> AbstractContextManager[Any]:
        """It is the current device inside."""
        return contextlib.nullcontext()

    def set_current(self) -> None:
        """It is the current device of this thread from now on."""

    # Streams and events. See [Note: streams and events].

    def current_stream(self) -> Any:
        """The current stream."""
        return None

    def default_stream(self) -> Any:
        """The stream that is current unless a program says otherwise."""
        return None

    def new_stream(self) -> Any:
        """Another stream, on which work waits for nothing."""
        return None

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:  # noqa: ARG002
        """A stream of this device is the current one inside."""
        return contextlib.nullcontext()

    def number_of(self, stream: Any) -> int | None:  # noqa: ARG002
        """A stream as a number; None if it is no stream of an accelerator."""
        return None

    def event(self, *, timed: bool = False) -> Any:  # noqa: ARG002
        """An event that is not recorded yet; a ``timed`` one measures milliseconds."""
        return None

    def record_event(self) -> Any:
        """An event behind what the current stream has queued."""
        return None

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell torch's allocator that a stream uses a tensor, which may be of another one."""

    def synchronize(self) -> None:
        """Wait for all of its work."""

    def followed(
        self,
        after: Mapping[str, Callable[..., None]],  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """While inside, what orders streams is followed by other functions.

        Args:
            after: ``{name: called behind each call, with its arguments}`` of ``"Event.record"``,
                ``"Event.wait"``, ``"Event.synchronize"``, ``"Stream.synchronize"`` and
                ``"cuda.synchronize"``, which waits for all of a device's work.
        """
        return contextlib.nullcontext()

    # Captures of graphs.

    def is_capturing(self) -> bool:
        """Whether the current stream is captured into a graph."""
        return False

    def capture_of(self, stream: Any = None) -> int:  # noqa: ARG002
        """Number of the capture that a stream is in, the current one if None; 0 if in none."""
        return 0

    # Copies.

    def copies(
        self, pieces: Sequence[tuple[int, int, int, torch.Tensor]]
    ) -> Callable[[Sequence[torch.Tensor]], None]:
        """What copies pieces of tensors on the current stream, in any order.

        It takes the tensors: one-dimensional, contiguous, on this device. They may have other
        element types than the targets.

        Args:
            pieces: Of which tensor, from which element, how many elements go where.
        """

        def copy(sources: Sequence[torch.Tensor]) -> None:
            for which, begin, count, target in pieces:
                target.copy_(sources[which].narrow(0, begin, count), non_blocking=True)

        return copy

    # Profiles.

    @staticmethod
    def ran(event: Any) -> bool:  # noqa: ARG004
        """Whether an event of a profile, as Kineto has it, ran on a device of the kind."""
        return False

    # Bytes.

    def free_bytes(self) -> tuple[int, int]:
        """The free and all bytes of an accelerator, by its driver."""
        raise NotImplementedError

    def memory(self) -> DeviceMemory | None:
        """Its bytes now; None if torch has no caching allocator for it."""
        return None

    def note_allocations(self) -> tuple[int, list[HeldBlock]] | None:
        """Have torch's allocator note what it does from now on, in all threads.

        Returns:
            For `noted_allocations`, and what the allocator has now. None if it cannot, or notes it
            for somebody else already.
        """
        return None

    def noted_allocations(self, since: int) -> list[Allocation]:  # noqa: ARG002
        """What the allocator has noted; called once for each `note_allocations`.

        Args:
            since: As that has returned it.

        Returns:
            Empty if it has not noted all of it, or was told not to work as by default.
        """
        return []

    def empty_cache(self) -> None:
        """Return the bytes that torch's allocator has cached to the driver, of all devices."""
