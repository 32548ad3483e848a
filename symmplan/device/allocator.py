"""Torch's caching allocator of CUDA memory, for storages of which only the size is known.

[Note: the caching allocator]
    What tensors have on a device is less than what the allocator has of the driver. It rounds
    sizes, keeps the free blocks of each stream apart, splits blocks, and merges a free one with its
    free neighbours in the block of the driver alone. This follows torch's
    ``CUDACachingAllocator.cpp`` with its default settings, where nothing is given back to the
    driver before it runs out. Then all that is free as a whole is, and the allocator tries again.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias, cast

from attrs import define, field

from symmplan.device.base import HeldBlock

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

__all__ = ["CachedBlock", "CachingAllocator"]

_Pool: TypeAlias = "list[tuple[int, int, CachedBlock]]"

#: Sizes are multiples of this.
_ROUND = 512
#: Up to here a request is small, and lies in blocks of `_SMALL_BLOCK` of the driver.
_SMALL = 1 << 20
_SMALL_BLOCK = 2 << 20
#: Larger ones up to here lie in blocks of `_LARGE_BLOCK`, others in one of their own.
_LARGE = 10 << 20
_LARGE_BLOCK = 20 << 20
#: Those are multiples of this.
_ROUND_LARGE = 2 << 20


@define(eq=False)
class CachedBlock:
    """Bytes of a block of the driver, in use or free."""

    address: int
    nbytes: int
    pool: _Pool
    free: bool = False
    before: CachedBlock | None = None
    after: CachedBlock | None = None

    @property
    def _key(self) -> tuple[int, int, CachedBlock]:
        return self.nbytes, self.address, self

    def put_back(self) -> None:
        """It is among the free ones."""
        self.free = True
        insort(self.pool, self._key, key=lambda item: item[:2])

    def take_out(self) -> None:
        """It is in use, or a part of another."""
        self.free = False
        at = bisect_left(self.pool, (self.nbytes, self.address), key=lambda item: item[:2])
        del self.pool[at]


@define(eq=False)
class CachingAllocator:
    """Torch's allocator. See [Note: the caching allocator].

    Attributes:
        limit: Bytes that the driver has for it.
        reserved: Bytes that it has of the driver.
        retries: How often it has given back its cache to go on.
    """

    limit: int = sys.maxsize
    reserved: int = 0
    retries: int = 0
    _next: int = 0
    _pools: dict[tuple[Hashable, bool], _Pool] = field(factory=dict)

    def take(self, nbytes: int, stream: Hashable) -> CachedBlock:
        """A block of at least so many bytes, for a tensor that is made on a stream.

        Raises:
            MemoryError: The driver has too few, even if nothing is cached.
        """
        nbytes = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        small = nbytes <= _SMALL
        pool = self._pools.setdefault((stream, small), [])
        at = bisect_left(pool, (nbytes, 0), key=lambda item: item[:2])
        if at < len(pool):
            block = pool[at][2]
            block.take_out()
        else:
            block = self._reserve(nbytes, pool, small=small)
        rest = block.nbytes - nbytes
        if rest >= (_ROUND if small else _SMALL + 1):
            self._split(block, nbytes)
        return block

    def drop(self, block: CachedBlock) -> None:
        """Nobody uses a block any more."""
        before, after = block.before, block.after
        if before is not None and before.free:
            before.take_out()
            before.nbytes += block.nbytes
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and after.free:
            after.take_out()
            block.nbytes += after.nbytes
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        block.put_back()

    def hold(self, held: Iterable[HeldBlock]) -> dict[Hashable, CachedBlock]:
        """Have what another allocator has.

        Returns:
            ``{block: what is in use}``.
        """
        used: dict[Hashable, CachedBlock] = {}
        for _, parts in groupby(held, key=lambda part: part.segment):
            before: CachedBlock | None = None
            for part in parts:
                pool = self._pools.setdefault((part.stream, part.small), [])
                block = CachedBlock(self._next, part.nbytes, pool, before=before)
                self._next += part.nbytes
                self.reserved += part.nbytes
                if before is not None:
                    before.after = block
                if part.free:
                    block.put_back()
                else:
                    used[part.block] = block
                before = block
        return used

    def held(self, used: Mapping[Hashable, CachedBlock]) -> list[HeldBlock]:
        """What it has, as `hold` takes it, where ``used`` is in use; without what is free."""
        key = {id(pool): key for key, pool in self._pools.items()}
        name = {id(block): name for name, block in used.items()}
        seen: set[int] = set()
        found: list[HeldBlock] = []
        for block in used.values():
            first = block
            while first.before is not None:
                first = first.before
            if first.address in seen:
                continue
            segment, part = first.address, cast("CachedBlock | None", first)
            seen.add(segment)
            while part is not None:
                of = segment, *key[id(part.pool)]
                found.append(HeldBlock(name.get(id(part), -1), part.nbytes, part.free, *of))
                part = part.after
        return found

    def empty(self) -> None:
        """Give the driver back what is free as a whole, as torch's ``empty_cache`` does."""
        for pool in self._pools.values():
            parts = [item for item in pool if item[2].before or item[2].after]
            self.reserved -= sum(item[0] for item in pool) - sum(item[0] for item in parts)
            pool[:] = parts

    def _reserve(self, nbytes: int, pool: _Pool, *, small: bool) -> CachedBlock:
        if small:
            nbytes = _SMALL_BLOCK
        elif nbytes < _LARGE:
            nbytes = _LARGE_BLOCK
        else:
            nbytes = -(-nbytes // _ROUND_LARGE) * _ROUND_LARGE
        if self.reserved + nbytes > self.limit:
            self.empty()
            self.retries += 1
            if self.reserved + nbytes > self.limit:
                raise MemoryError(nbytes)
        made = CachedBlock(self._next, nbytes, pool)
        self._next += nbytes
        self.reserved += nbytes
        return made

    def _split(self, block: CachedBlock, nbytes: int) -> None:
        rest = CachedBlock(block.address + nbytes, block.nbytes - nbytes, block.pool)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, nbytes
        rest.put_back()
