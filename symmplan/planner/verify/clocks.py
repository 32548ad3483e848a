"""Happens-before, computed again: counts of finished operations per stream.

Tables have one row per operation and one column per stream. Programs with very many streams are
treated some columns at a time, so memory stays bounded.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from symmplan.model import Operation

    Ints = NDArray[np.int64]
    Table = NDArray[np.int32]

__all__ = ["Clocks"]

#: Columns treated at a time.
BLOCK = 128


class Clocks:
    """Order of operations, from their streams and from edges (earlier, later).

    Attributes:
        operations: In a linear extension.
        names: Their names.
        number: Place of each in the extension, by name.
        after: Places of those that directly follow each.
        stream: Stream number of each operation, by place in the extension.
        place: Place in its stream, from 1.
        streams: Number of streams.
    """

    def __init__(self, listed: Sequence[Operation], edges: Sequence[tuple[str, str]]) -> None:
        streams: dict[str, list[int]] = {}
        for i, op in enumerate(listed):
            streams.setdefault(op.stream, []).append(i)
        stream = {i: s for s, line in enumerate(streams.values()) for i in line}
        place = {i: k for line in streams.values() for k, i in enumerate(line, start=1)}
        index = {op.name: i for i, op in enumerate(listed)}
        links = [pair for line in streams.values() for pair in pairwise(line)]
        links += ((index[a], index[b]) for a, b in edges)
        after: list[list[int]] = [[] for _ in listed]
        waits = [0] * len(listed)
        for a, b in links:
            after[a].append(b)
            waits[b] += 1
        ready = deque(i for i, w in enumerate(waits) if not w)
        extension: list[int] = []
        while ready:
            i = ready.popleft()
            extension.append(i)
            for j in after[i]:
                waits[j] -= 1
                if not waits[j]:
                    ready.append(j)
        # A problem with a cycle cannot be constructed.
        assert len(extension) == len(listed)
        rank = {i: k for k, i in enumerate(extension)}
        self.operations = [listed[i] for i in extension]
        self.names = [op.name for op in self.operations]
        self.number = {name: k for k, name in enumerate(self.names)}
        self.stream: Ints = np.asarray([stream[i] for i in extension], dtype=np.int64)
        self.place: Ints = np.asarray([place[i] for i in extension], dtype=np.int64)
        self.streams = len(streams)
        self.after = [sorted({rank[j] for j in after[i]}) for i in extension]
        self._kept: Table | None = None

    def blocks(self) -> Iterator[tuple[int, Table]]:
        """First column and table of every block: operations that happen before or are the row's."""
        if self._kept is not None:
            yield 0, self._kept
            return
        for low in range(0, self.streams, BLOCK):
            table = self._table(low, min(low + BLOCK, self.streams))
            if self.streams <= BLOCK:
                self._kept = table
            yield low, table

    def _table(self, low: int, high: int) -> Table:
        if self.streams == 1:
            return self.place.astype(np.int32)[:, None]
        table = np.zeros((len(self.names), high - low), dtype=np.int32)
        rows = list(table)
        own = (self.stream - low).tolist()
        place = self.place.tolist()
        width = high - low
        for i, row in enumerate(rows):
            if 0 <= own[i] < width:
                row[own[i]] = place[i]
            for j in self.after[i]:
                np.maximum(rows[j], row, out=rows[j])
        return table

    def ordered(self, first: Ints, second: Ints) -> NDArray[np.bool_]:
        """Per pair of operations, whether the first strictly happens before the second."""
        result = np.zeros(len(first), dtype=bool)
        stream = self.stream[first]
        for low, table in self.blocks():
            inside = np.flatnonzero((stream >= low) & (stream < low + table.shape[1]))
            a, b = first[inside], second[inside]
            result[inside] = (table[b, stream[inside] - low] >= self.place[a]) & (a != b)
        return result
