"""The streams of a frozen session: the same calls on the same streams, joined at the end.

[Note: streams have no names]
    A program may take new streams from CUDA's pool in every iteration. So a recorded stream is a
    role. The first declared call of a role says which stream plays it in this iteration. Later
    calls of the same role must run on that stream, and calls of other roles on other streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from symmplan.capture.streams import DeviceStreams
from symmplan.device import kind_of

if TYPE_CHECKING:
    import torch


def streams_of(device: torch.device) -> DeviceStreams | None:
    """The streams of a device; None if it has none."""
    return DeviceStreams(device) if kind_of(device).is_accelerator else None


class Roles:
    """Which stream plays which role in this iteration. See [Note: streams have no names].

    Args:
        streams: The device's streams; None if it has none.
    """

    def __init__(self, streams: DeviceStreams | None) -> None:
        self._streams = streams
        self._bound: dict[str, tuple[int, Any]] = {}

    def fits(self, role: str) -> bool:
        """Whether the current stream plays ``role``, or may from now on."""
        if self._streams is None:
            return True
        number = self._streams.number()
        if role in self._bound:
            return self._bound[role][0] == number
        if any(number == taken for taken, _ in self._bound.values()):
            return False
        self._bound[role] = number, self._streams.current()
        return True

    def join(self) -> None:
        """Let the current stream wait for those of this iteration."""
        for streams, current, other in self._pairs():
            streams.wait(current, other)

    def part(self) -> None:
        """Let those wait for the current stream, and forget them: the iteration is over."""
        for streams, current, other in self._pairs():
            streams.wait(other, current)
        self._bound.clear()

    def _pairs(self) -> list[tuple[DeviceStreams, Any, Any]]:
        """The current stream with each other one, if there are several: one is in order."""
        if self._streams is None or len(self._bound) < 2:
            return []
        number, current = self._streams.number(), self._streams.current()
        found = [stream for taken, stream in self._bound.values() if taken != number]
        return [(self._streams, current, stream) for stream in found]
