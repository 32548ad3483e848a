"""Which operations touch which bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from symmplan.model import Access
    from symmplan.planner.graphs import Paths

    Ints = NDArray[np.int64]

__all__ = ["Touches"]


class Touches:
    """Which operations touch each user, by their places in the extension.

    Attributes:
        paths: Their order.
        first: Per user, the first of them.
        last: Per user, the last of them.
    """

    def __init__(
        self, accesses: Sequence[Access], owner: Mapping[str, int], users: int, paths: Paths
    ) -> None:
        self.paths = paths
        number, count = paths.number, len(paths.operations)
        pairs: Ints = np.asarray(
            [owner[a.buffer] * count + number[a.operation] for a in accesses], dtype=np.int64
        )
        pairs.sort()
        pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)]]
        user = pairs // count
        op: Ints = pairs % count
        bounds: Ints = np.searchsorted(user, np.arange(users + 1))
        self.first: Ints = op[bounds[:-1]]
        self.last: Ints = op[bounds[1:] - 1]
        # Sorted by user and stream: where the stretch of each user and stream begins.
        streams: dict[str, int] = {}
        number_of = [streams.setdefault(o.stream, len(streams)) for o in paths.operations]
        stream: Ints = np.asarray(number_of, dtype=np.int64)[op]
        sort = np.lexsort((op, stream, user))
        self._by_stream, stream = op[sort], stream[sort]
        fresh = (user[1:] != user[:-1]) | (stream[1:] != stream[:-1])
        self._cuts: Ints = np.append(0, np.append(np.flatnonzero(fresh) + 1, len(user)))
        self._stretches: Ints = np.searchsorted(self._cuts, bounds)

    def unordered(self, pairs: Sequence[tuple[int, int]]) -> Mapping[int, tuple[int, int]]:
        """Which pairs of users are *not* ordered: all that touches one, before all of the other.

        Returns:
            Per such pair, by its index, an operation on its first user from which no path leads to
            an operation on its second, and that one.
        """
        if not pairs:
            return {}
        which, lasts, firsts = self._across(*np.asarray(pairs, dtype=np.int64).T)
        found: dict[int, tuple[int, int]] = {}
        ends = list(zip(lasts.tolist(), firsts.tolist(), strict=True))
        for k, pair, good in zip(which.tolist(), ends, self.paths.exist(ends), strict=True):
            if not good:
                found.setdefault(k, pair)
        return found

    def _across(self, a: Ints, b: Ints) -> tuple[Ints, Ints, Ints]:
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
