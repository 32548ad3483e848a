"""Torch's caching allocator of CUDA memory, for storages of which only the size is known.

[Note: the caching allocator]
    What tensors have on a device is less than what the allocator has of the driver. It rounds
    sizes, keeps the free blocks of each stream apart, splits blocks, and merges a free one with its
    free neighbours in the block of the driver alone. This follows torch's
    ``CUDACachingAllocator.cpp`` with its default settings, where nothing is given back to the
    driver before it runs out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["CachedBlock", "CachingAllocator"]

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
    pool: list[tuple[int, int, CachedBlock]]
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
        reserved: Bytes that it has of the driver.
    """

    reserved: int = 0
    _next: int = 0
    _pools: dict[tuple[Hashable, bool], list[tuple[int, int, CachedBlock]]] = field(factory=dict)

    def take(self, nbytes: int, stream: Hashable) -> CachedBlock:
        """A block of at least so many bytes, for a tensor that is made on a stream."""
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

    def empty(self) -> None:
        """Give the driver back what is free as a whole, as torch's ``empty_cache`` does."""
        for pool in self._pools.values():
            parts = [item for item in pool if item[2].before or item[2].after]
            self.reserved -= sum(item[0] for item in pool) - sum(item[0] for item in parts)
            pool[:] = parts

    def _reserve(
        self, nbytes: int, pool: list[tuple[int, int, CachedBlock]], *, small: bool
    ) -> CachedBlock:
        if small:
            nbytes = _SMALL_BLOCK
        elif nbytes < _LARGE:
            nbytes = _LARGE_BLOCK
        else:
            nbytes = -(-nbytes // _ROUND_LARGE) * _ROUND_LARGE
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
