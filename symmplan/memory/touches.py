"""Accesses of watched segments: whose bytes, in which op, at which line.

Whoever accesses bytes says so here; nothing happens unless they lie in a segment that is watched,
see `symmplan.memory.races`.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from symmplan.memory.race_log import Extent

if TYPE_CHECKING:
    import torch

    from symmplan.memory.races import RaceDetector, Touch, WatchedSegment

__all__ = ["LIVE", "RANGES", "WHERE", "extent_of", "source_line", "touch", "touch_bytes"]

#: The detectors of this process. Empty unless somebody debugs: this is all that is asked then.
LIVE: list[RaceDetector] = []


class _Where(threading.local):
    """Which ops this thread is in, the innermost last; what is said of accesses."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        #: The frame below which a line of a compiled graph counts, and that line.
        self.node: tuple[Any, str] | None = None


#: Of accesses that are seen from now on.
WHERE = _Where()


def source_line() -> str:
    """The innermost frame that is neither torch's nor symmplan's; ``"file:line"``.

    Inside a compiled graph that runs op by op, the line that the node came from.
    """
    frame: Any = sys._getframe(1)
    code, line = WHERE.node or (None, "")
    while frame is not None:
        if frame.f_code is code:
            return line
        module = frame.f_globals.get("__name__", "torch")
        name = frame.f_code.co_filename
        if module.partition(".")[0] not in ("symmplan", "torch") and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Ranges:
    """Which bytes of this process belong to which rank's part of a watched segment."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, WatchedSegment, int]] = []

    def add(self, address: int, nbytes: int, segment: WatchedSegment, owner: int) -> None:
        known = self.find(address)
        if known is None or known[0] is not segment:
            self._set([*self._ranges, (address, address + nbytes, segment, owner)])

    def drop(self, detector: RaceDetector) -> None:
        self._set([r for r in self._ranges if r[2].detector is not detector])

    def _set(self, ranges: list[tuple[int, int, WatchedSegment, int]]) -> None:
        self._ranges = sorted(ranges, key=lambda r: r[:2])
        self._starts = [r[0] for r in self._ranges]

    def find(self, address: int) -> tuple[WatchedSegment, int, int] | None:
        """The segment, whose bytes, and which."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, end, segment, owner = self._ranges[at]
        return (segment, owner, address - start) if address < end else None


#: The watched bytes of this process.
RANGES = _Ranges()


def extent_of(tensor: torch.Tensor, offset: int) -> Extent | None:
    """The bytes of a tensor that begins at byte ``offset``; None if it has none."""
    item = tensor.element_size()
    if not tensor.numel():
        return None
    high = offset + item
    shape: list[tuple[int, int]] = []
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    for size, stride in sorted(pairs, key=lambda p: p[1]):
        if size == 1 or not stride:
            continue
        high += (size - 1) * stride * tensor.element_size()
        if not shape and stride * tensor.element_size() == item:
            item *= size
        elif shape and shape[0][0] * shape[0][1] == stride * tensor.element_size():
            shape[0] = (shape[0][0] * size, shape[0][1])
        else:
            shape.insert(0, (size, stride * tensor.element_size()))
    if len(shape) > 4 or not shape:
        return Extent(offset, high, high - offset)
    return Extent(offset, high, item, tuple(shape))


def touch(
    tensor: torch.Tensor, *, write: bool, op: str = "", lasting: bool = False
) -> Touch | None:
    """``tensor`` is accessed. Nothing if it lies in no watched segment.

    Args:
        tensor: On the CPU.
        write: Whether it is written.
        op: In which op; the one that runs if empty.
        lasting: Whether the access lasts until it is closed.

    Raises:
        RaceError: The access is not ordered behind that of another rank.
    """
    found = RANGES.find(tensor.data_ptr())
    extent = None if found is None else extent_of(tensor, found[2])
    if found is None or extent is None:
        return None
    name = op or (WHERE.ops[-1] if WHERE.ops else "")
    return found[0].touch(found[1], extent, name, write=write, lasting=lasting)


def touch_bytes(address: int, nbytes: int, *, write: bool) -> None:
    """The same for bare bytes."""
    found = RANGES.find(address)
    if found is not None and nbytes:
        segment, owner, low = found
        extent = Extent(low, low + nbytes, nbytes)
        segment.touch(owner, extent, WHERE.ops[-1] if WHERE.ops else "", write=write)
