"""What a rank accessed and when, in shared memory that its peers read.

[Note: race logs]
    The file of a segment that is watched for races ends, behind its control area, with the log of
    the rank that owns it. Only the owner writes there. It holds, as 8-byte words:

    - a header: how many records, meetings and texts there are, how long the failure's text is;
    - the owner's clock: for each rank, how far this one knows it to be;
    - a ring of clocks that were published, each under a key and a number: what peers join when
      they have met the owner;
    - a ring of records, one for each range of bytes of the segment that the owner accessed, its
      own bytes or a peer's. Of strided views the strides are kept (up to four dimensions), so that
      columns of one matrix are not taken for the same bytes;
    - a table of texts, which records name by number: op, line and buffer;
    - the owner's failure, if it found a race.

    Sizes are bounded. Of a rank that makes more accesses than fit between two meetings the oldest
    are forgotten: a race with one of those is then not found. Nothing that is read is executed or
    unpickled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    import mmap

    import torch
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

__all__ = ["OPEN", "AccessRecord", "Extent", "RaceLog", "log_nbytes"]

#: The end of an access that is not over.
OPEN = np.iinfo(np.int64).max

_RECORDS, _MEETINGS, _TEXTS, _FAILURE, _HEADER = 0, 1, 2, 3, 8
_RING, _CLOCKS, _TABLE = 2048, 512, 512
_TEXT_WORDS, _FAILURE_WORDS = 64, 512
_DIMENSIONS = 4
_FIELDS = ("number", "owner", "low", "high", "write", "end", "text", "item", "dimensions")
#: ``end`` is the component at which an access ends; ``shape`` that of its `Extent`.
_RECORD = np.dtype([*((name, np.int64) for name in _FIELDS), ("shape", np.int64, (_DIMENSIONS, 2))])


def _parts(size: int) -> list[int]:
    """Words of a log's parts, where clocks have ``size`` components."""
    records = _RING * (_RECORD.itemsize // 8)
    return [_HEADER, size, _CLOCKS * (2 + size), records, _TABLE * _TEXT_WORDS, _FAILURE_WORDS]


def log_nbytes(size: int) -> int:
    """Bytes of a log where clocks have ``size`` components."""
    return 8 * sum(_parts(size))


@frozen
class Extent:
    """Bytes of a segment: those of a strided view.

    Attributes:
        low: First byte.
        high: One behind the last byte.
        item: Bytes of an element; of the whole range if it has no gaps.
        shape: ``(size, stride in bytes)`` of each dimension that is not contiguous, outermost
            first; empty if the range has no gaps, or too many dimensions to say.
    """

    low: int
    high: int
    item: int
    shape: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(tensor: torch.Tensor, offset: int) -> Extent | None:
        """The bytes of a tensor that begins at byte ``offset``; None if it has none."""
        if not tensor.numel():
            return None
        item = tensor.element_size()
        high = offset + item
        shape: list[tuple[int, int]] = []
        steps = [stride * item for stride in tensor.stride()]
        for size, step in sorted(zip(tensor.shape, steps, strict=True), key=lambda p: p[1]):
            if size == 1 or not step:
                continue
            high += (size - 1) * step
            if not shape and step == item:
                item *= size
            elif shape and shape[0][0] * shape[0][1] == step:
                shape[0] = (shape[0][0] * size, shape[0][1])
            else:
                shape.insert(0, (size, step))
        if len(shape) > _DIMENSIONS or not shape:
            return Extent(offset, high, high - offset)
        return Extent(offset, high, item, tuple(shape))

    def overlap(self, other: Extent) -> tuple[int, int] | None:
        """The first run of bytes that both have; None if there is none."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        if low >= high:
            return None
        if not self.shape and not other.shape:
            return low, high
        both = self._mask(low, high) & other._mask(low, high)
        found = np.flatnonzero(both)
        if not len(found):
            return None
        first = int(found[0])
        gaps = np.flatnonzero(~both[first:])
        return low + first, low + first + (int(gaps[0]) if len(gaps) else len(both) - first)

    def _mask(self, low: int, high: int) -> NDArray[np.bool_]:
        """Which bytes from ``low`` to ``high``, which lie inside, it has."""
        mask = np.zeros(self.high - self.low, dtype=bool)
        sizes, strides = zip(*self.shape, (self.item, 1), strict=True)
        np.lib.stride_tricks.as_strided(mask, sizes, strides)[...] = True
        return mask[low - self.low : high - self.low]


@frozen
class AccessRecord:
    """An access, as its rank wrote it down."""

    number: int  # how many records its rank made before
    owner: int  # whose bytes
    extent: Extent  # which bytes of the segment
    write: bool  # whether they were written
    text: tuple[str, str, str]  # op, line and buffer


class RaceLog:
    """One rank's log of one segment, mine or a peer's. See [Note: race logs].

    It begins at byte ``start`` of the segment's file; clocks have ``size`` components.

    Attributes:
        clock: What the owner published last.
    """

    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        parts = _parts(size)
        words = np.frombuffer(memory, dtype=np.int64, offset=start, count=sum(parts))
        split = np.split(words, np.cumsum(parts[:-1]).tolist())
        self._header, self.clock, clocks, records, texts, self._failure = split
        self._clocks = clocks.reshape(_CLOCKS, 2 + size)
        self._records = records.view(_RECORD)
        self._texts = texts.reshape(_TABLE, _TEXT_WORDS)
        self._known: dict[tuple[str, str, str], int] = {}

    # What the owner does.

    def publish(self, key: int, number: int, clock: Words) -> None:
        """Say how far the owner is at its meeting ``number`` of those named ``key``."""
        at = int(self._header[_MEETINGS])
        row = self._clocks[at % _CLOCKS]
        row[0] = 0  # nobody takes it for what it was
        row[2:] = clock
        row[1] = number
        row[0] = key
        self.clock[:] = clock
        self._header[_MEETINGS] = at + 1

    def append(
        self, owner: int, extent: Extent, end: int, text: tuple[str, str, str], *, write: bool
    ) -> int:
        """Write an access down; returns its number."""
        number = self.count
        row = self._records[number % _RING]
        row["number"] = -1  # nobody takes it for what it was
        row["owner"], row["write"], row["end"] = owner, write, end
        row["low"], row["high"], row["item"] = extent.low, extent.high, extent.item
        row["text"], row["dimensions"] = self._intern(text), len(extent.shape)
        row["shape"][: len(extent.shape)] = np.reshape(extent.shape, (-1, 2))
        row["number"] = number
        self._header[_RECORDS] = number + 1
        return number

    def close(self, number: int, end: int) -> None:
        """An access that was `OPEN` is over."""
        row = self._records[number % _RING]
        if row["number"] == number:
            row["end"] = end

    def fail(self, text: bytes) -> None:
        """Leave word of a race that the owner found; the first one stays."""
        if not self._header[_FAILURE]:
            text = text[: 8 * _FAILURE_WORDS]
            self._failure.view(np.uint8)[: len(text)] = np.frombuffer(text, dtype=np.uint8)
            self._header[_FAILURE] = len(text)

    def _intern(self, text: tuple[str, str, str]) -> int:
        number = self._known.get(text)
        if number is None:
            number = min(int(self._header[_TEXTS]), _TABLE - 1)  # the last is for all the rest
            room = 8 * _TEXT_WORDS // 4
            op, line, buffer = (part.encode() for part in text)
            parts = (op[:room], line[-2 * room + 8 :], buffer[:room])
            data = b"\0".join(part.replace(b"\0", b"?") for part in parts)
            self._texts[number] = 0
            self._texts[number].view(np.uint8)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            self._known[text] = number
            self._header[_TEXTS] = number + 1
        return number

    # What peers do.

    @property
    def count(self) -> int:
        """How many records the owner has made."""
        return int(self._header[_RECORDS])

    def published(self, key: int, number: int) -> Words | None:
        """What the owner published at a meeting; None if that is not there, or not any more."""
        rows = np.flatnonzero((self._clocks[:, 0] == key) & (self._clocks[:, 1] == number))
        if not len(rows):
            return None
        row = self._clocks[rows[0]].copy()
        return row[2:] if row[0] == key and row[1] == number else None

    def settled(self, first: int, until: int) -> int:
        """The number of the first record, from ``first`` on, that is not over by ``until``."""
        numbers, rows = self._rows(first)
        late = np.flatnonzero(rows["end"] > until)
        return int(numbers[late[0]]) if len(late) else first + len(numbers)

    def conflicts(
        self, first: int, until: int, owner: int, extent: Extent, *, write: bool
    ) -> list[AccessRecord]:
        """Accesses, from number ``first`` on, of the same bytes that are not over by ``until``."""
        numbers, rows = self._rows(first)
        found = (rows["number"] == numbers) & (rows["end"] > until) & (rows["owner"] == owner)
        found &= (rows["low"] < extent.high) & (rows["high"] > extent.low)
        if not write:
            found &= rows["write"] != 0
        records = (self._record(row) for row in rows[found])
        return [r for r in records if extent.overlap(r.extent) is not None]

    @property
    def failure(self) -> bytes:
        """The race that the owner found; empty if none."""
        length = int(self._header[_FAILURE])
        return self._failure.view(np.uint8)[:length].tobytes() if length else b""

    def _rows(self, first: int) -> tuple[Words, NDArray[np.void]]:
        count = self.count
        numbers = np.arange(max(first, count - _RING), count, dtype=np.int64)
        return numbers, self._records[numbers % _RING]

    def _record(self, row: np.void) -> AccessRecord:
        number, owner, low, high, write, _, text, item, dimensions, shape = row.tolist()
        pairs = tuple(map(tuple, np.asarray(shape)[:dimensions].tolist()))
        return AccessRecord(
            number, owner, Extent(low, high, item, pairs), bool(write), self._text(text)
        )

    def _text(self, number: int) -> tuple[str, str, str]:
        data = self._texts[number].tobytes().rstrip(b"\0") + b"\0\0"
        op, line, buffer = (part.decode(errors="replace") for part in data.split(b"\0")[:3])
        return op, line, buffer
