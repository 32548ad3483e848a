"""Happens-before, computed again: counts of finished operations per stream.

Tables have one row per operation and one column per stream. Programs with very many streams are
treated some columns at a time, so memory stays bounded.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from symmplan.model import Access, Operation

    Ints = NDArray[np.int64]
    Table = NDArray[np.int32]

__all__ = ["Clocks", "Touches"]

#: Columns treated at a time.
BLOCK = 128


class Clocks:
    """Order of operations, from their streams and from edges (earlier, later).

    Attributes:
        operations: In a linear extension.
        number: Place of each in the extension, by name.
        stream: Stream number of each operation, by place in the extension.
        place: Place in its stream, from 1.
        streams: Number of streams.
    """

    def __init__(self, listed: Sequence[Operation], edges: Sequence[tuple[str, str]]) -> None:
        lines: dict[str, list[Operation]] = {}
        for op in listed:
            lines.setdefault(op.stream, []).append(op)
        self.operations = _extension(listed, lines, edges)
        # A problem with a cycle cannot be constructed.
        assert len(self.operations) == len(listed)
        self.number = {op.name: k for k, op in enumerate(self.operations)}
        numbers = {name: s for s, name in enumerate(lines)}
        self.streams = len(lines)
        self.stream: Ints = np.asarray([numbers[o.stream] for o in self.operations], dtype=np.int64)
        #: Operations stream by stream, and where each stream begins among them.
        self._lines: Ints = np.argsort(self.stream, kind="stable")
        sizes = np.bincount(self.stream, minlength=self.streams)
        self._begins: Ints = np.repeat(np.cumsum(sizes) - sizes, sizes)
        self.place: Ints = np.empty(len(listed), dtype=np.int64)
        self.place[self._lines] = np.arange(1, len(listed) + 1) - self._begins
        self._sources: dict[int, list[int]] = {}
        for a, b in edges:
            self._sources.setdefault(self.number[b], []).append(self.number[a])
        self._kept: Table | None = None

    @cached_property
    def after(self) -> list[list[int]]:
        """Places of the operations that directly follow each."""
        result: list[list[int]] = [[] for _ in self.operations]
        for k in np.flatnonzero(self._begins[1:] == self._begins[:-1]).tolist():
            result[self._lines[k]].append(int(self._lines[k + 1]))
        for b, sources in self._sources.items():
            for a in sources:
                result[a].append(b)
        return result

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
        """Rows change, but for their own column, only where an operation waits for others."""
        waiting = sorted(self._sources)
        turn = np.zeros(len(self.operations), dtype=np.int64)
        turn[waiting] = np.arange(1, len(waiting) + 1)
        # Per operation, the last in its stream, itself included, that waits; 0 for none.
        seen = np.maximum.accumulate(np.where(turn[self._lines] > 0, np.arange(len(turn)), -1))
        latest = np.zeros_like(turn)
        latest[self._lines] = np.where(seen >= self._begins, turn[self._lines[seen]], 0)
        rows = np.zeros((len(waiting) + 1, high - low), dtype=np.int32)
        reached, of, place = latest.tolist(), self.stream.tolist(), self.place.tolist()
        current = [0] * self.streams
        for k, i in enumerate(waiting, start=1):
            row = rows[k]
            row[:] = rows[current[of[i]]]
            for j in self._sources[i]:
                np.maximum(row, rows[reached[j]], out=row)
                c = of[j] - low
                if 0 <= c < len(row):
                    row[c] = max(row[c], place[j])
            current[of[i]] = k
        table: Table = rows[latest]
        own = np.flatnonzero((self.stream >= low) & (self.stream < high))
        table[own, self.stream[own] - low] = self.place[own]
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


def _extension(
    listed: Sequence[Operation],
    lines: Mapping[str, list[Operation]],
    edges: Sequence[tuple[str, str]],
) -> list[Operation]:
    """Each stream is followed until it waits for another, and again when its wait is over."""
    stream_of = {op.name: op.stream for op in listed} if edges else {}
    waits: dict[str, int] = {}
    followers: dict[str, list[str]] = {}
    for a, b in edges:
        followers.setdefault(a, []).append(b)
        waits[b] = waits.get(b, 0) + 1
    found: list[Operation] = []
    done = dict.fromkeys(lines, 0)
    todo = list(lines)
    while todo:
        stream = todo.pop()
        line, begin = lines[stream], done[stream]
        end = begin
        while end < len(line) and not waits.get(line[end].name):
            for follower in followers.get(line[end].name, ()):
                waits[follower] -= 1
                if not waits[follower]:
                    todo.append(stream_of[follower])
            end += 1
        found += line[begin:end]
        done[stream] = end
    return found


class Touches:
    """Which operations touch each user, by their places in the extension.

    Attributes:
        clocks: Their order.
        first: Per user, the first of them.
    """

    def __init__(
        self, accesses: Sequence[Access], owner: Mapping[str, int], users: int, clocks: Clocks
    ) -> None:
        self.clocks = clocks
        number, count = clocks.number, len(clocks.operations)
        pairs: Ints = np.asarray(
            [owner[a.buffer] * count + number[a.operation] for a in accesses], dtype=np.int64
        )
        pairs.sort()
        pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)]]
        user = pairs // count
        self._op: Ints = pairs % count
        self._bounds: Ints = np.searchsorted(user, np.arange(users + 1))
        self.first: Ints = self._op[self._bounds[:-1]]
        # The same by stream: where the stretch of each user and stream begins.
        sort = np.lexsort((self._op, clocks.stream[self._op], user))
        self._by_stream, stream = self._op[sort], clocks.stream[self._op[sort]]
        fresh = (user[1:] != user[:-1]) | (stream[1:] != stream[:-1])
        self._cuts: Ints = np.append(0, np.append(np.flatnonzero(fresh) + 1, len(user)))
        self._stretches: Ints = np.searchsorted(self._cuts, self._bounds)

    def of(self, user: int) -> Ints:
        """The operations that touch a user, ascending."""
        return self._op[self._bounds[user] : self._bounds[user + 1]]

    def across(self, a: Ints, b: Ints) -> tuple[Ints, Ints, Ints]:
        """For pairs of users the last operations on one and the first on the other, per streams.

        Returns:
            Which pair, the operation on its first user, the one on its second.
        """
        many = np.diff(self._stretches)
        wide = many[b]
        total = many[a] * wide
        pair = np.repeat(np.arange(len(a)), total)
        k = np.arange(len(pair)) - np.repeat(np.cumsum(total) - total, total)
        ends = self._cuts[self._stretches[a[pair]] + k // wide[pair] + 1] - 1
        begins = self._cuts[self._stretches[b[pair]] + k % wide[pair]]
        return pair, self._by_stream[ends], self._by_stream[begins]
