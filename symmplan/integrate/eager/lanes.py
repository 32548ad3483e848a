"""The streams of a frozen session: the same calls on the same streams, joined at the end.

[Note: streams have no names]
    A program may take new streams from CUDA's pool in every iteration. So a recorded stream is a
    role: the first declared call that should run on it tells which stream plays it in this
    iteration, and later calls of the same role must run there, those of others elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from symmplan import _compat as compat
from symmplan.capture.streams import CudaWatch

if TYPE_CHECKING:
    import torch

    from symmplan.capture.streams import Watch

__all__ = ["CudaStreams", "Lanes", "Streams", "streams_of"]


class Streams(Protocol):
    """What a session needs to know of a device's streams."""

    @property
    def watch(self) -> Watch:
        """What a recording needs to know."""

    def number(self) -> int:
        """The current stream, as a number."""

    def current(self) -> Any:
        """The current stream."""

    def wait(self, stream: Any, other: Any) -> None:
        """Let ``stream`` wait for ``other``."""


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.number = compat.current_stream_of(device)
        self.watch = CudaWatch(self.number)

    def current(self) -> Any:
        """The current stream."""
        import torch

        return torch.cuda.current_stream(self._device)

    def wait(self, stream: Any, other: Any) -> None:
        """Let ``stream`` wait for ``other``."""
        stream.wait_stream(other)


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None if it has none."""
    return CudaStreams(device) if device.type == "cuda" else None


class Lanes:
    """Which stream plays which role in this iteration. See [Note: streams have no names].

    Args:
        streams: The device's streams; None if it has none.
    """

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._number = None if streams is None else streams.number
        self._numbers: dict[str, int] = {}
        self._bound: dict[str, Any] = {}

    def fits(self, role: str) -> bool:
        """Whether the current stream plays ``role``, or may from now on."""
        if self._number is None:
            return True
        number = self._number()
        return self._numbers.get(role) == number or self._binds(role, number)

    def _binds(self, role: str, number: int) -> bool:
        """Give a stream a role if both are free."""
        if role in self._numbers or number in self._numbers.values():
            return False
        assert self._streams is not None
        self._numbers[role] = number
        self._bound[role] = self._streams.current()
        return True

    def join(self) -> None:
        """Let the current stream wait for those of this iteration."""
        self._meet(inwards=True)

    def part(self) -> None:
        """Let those wait for the current stream, and forget them: the iteration is over."""
        self._meet(inwards=False)
        self._numbers.clear()
        self._bound.clear()

    def _meet(self, *, inwards: bool) -> None:
        if len(self._numbers) < 2:  # the order of one stream is all there is
            return
        assert self._streams is not None
        current, number = self._streams.current(), self._streams.number()
        for role, stream in self._bound.items():
            if self._numbers[role] != number:
                pair = (current, stream) if inwards else (stream, current)
                self._streams.wait(*pair)
