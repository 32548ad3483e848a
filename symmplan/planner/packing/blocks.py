"""Glue items to blocks that waste little, so that few pieces are left to be searched.

[Note: blocks]
    Two items that follow each other in time and are of about the same size, or that live at about
    the same time, are glued: side by side or on top of each other they fill a rectangle with
    little waste, and from then on they are one item of the size of that rectangle. Cheapest pairs
    come first; sections that are nearly full make waste expensive, and a pair whose waste a
    section cannot afford under the target is never glued. A packing of the blocks is a packing of
    their items. The converse does not hold, so this finds packings but proves nothing.

    All arithmetic is on whole numbers: a score that differed in its last bit between machines
    would be a different plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from symmplan.planner.order import Ints
    from symmplan.planner.packing.task import Space

__all__ = ["Blocks", "Style", "glue"]

#: A rectangle of items: pairs of an item and its offset above the block's own.
Block: TypeAlias = "tuple[tuple[int, int], ...]"

_NEVER = np.iinfo(np.int64).max
#: Weight of a section without slack; one with much slack weighs 1.
_WEIGHT = 1024
#: Sizes are scaled to this many bits before they are multiplied with weights.
_BITS = 22


@frozen
class Style:
    """How pairs are chosen.

    Attributes:
        power: How strongly tight sections make waste expensive: 0 (not at all), 1 or 2.
        early: Cost of gluing in time relative to gluing in space, in quarters.
        noise: Amplitude of a disturbance of the costs, in eighths; 0 for none.
        seed: Which disturbance.
    """

    power: int = 1
    early: int = 4
    noise: int = 0
    seed: int = 0


@frozen(eq=False)
class Blocks:
    """All items of a space, glued to blocks, which are sorted by section and size.

    Attributes:
        low: First section of each block.
        high: First section after its last.
        size: Its size in units.
        blocks: What it is made of.
    """

    low: Ints
    high: Ints
    size: Ints
    blocks: tuple[Block, ...]

    def spread(self, offset: Ints, count: int) -> Ints:
        """Offsets of ``count`` items from those of the blocks."""
        result = np.zeros(count, dtype=np.int64)
        for block, place in zip(self.blocks, offset.tolist(), strict=True):
            for item, above in block:
                result[item] = place + above
        return result


class _Glue:
    def __init__(self, space: Space, target: int, style: Style) -> None:
        count = len(space)
        self.low, self.high, self.size = space.low.copy(), space.high.copy(), space.size.copy()
        self.slack = target - space.load
        self.alive = np.ones(count, dtype=bool)
        self.blocks: list[Block] = [((i, 0),) for i in range(count)]
        self.shift = max(0, int(target).bit_length() - _BITS)
        goal = max(1, target >> self.shift)
        weight = _WEIGHT * goal // (goal + 20 * np.maximum(self.slack >> self.shift, 0)) + 1
        weight = weight**style.power if style.power < 2 else weight * weight // _WEIGHT + 1
        self.weights = np.append(0, np.cumsum(weight.astype(np.int64)))
        self.style = style
        self.area = self._weigh(self.low, self.high, self.size)
        self.noise = _noise(count, style) if style.noise else None
        self.cost = np.stack([self.row(i) for i in range(count)])
        self.best = self.cost.min(axis=1)

    def _weigh(self, low: Ints | int, high: Ints | int, size: Ints | int) -> Ints:
        area: Ints = (self.weights[high] - self.weights[low]) * (size >> self.shift)
        return area

    def row(self, i: int) -> Ints:
        """Cost of gluing block ``i`` with every other: the wasted share of the result."""
        low = np.minimum(self.low, self.low[i])
        high = np.maximum(self.high, self.high[i])
        follows = np.minimum(self.high, self.high[i]) <= np.maximum(self.low, self.low[i])
        size = np.where(follows, np.maximum(self.size, self.size[i]), self.size + self.size[i])
        area = self._weigh(low, high, size)
        waste = np.maximum(area - self.area - self.area[i], 0)
        cost = (waste << 14) // np.maximum(area, 1)
        if self.style.early != 4:
            cost = np.where(follows, cost * self.style.early // 4, cost)
        if self.noise is not None:
            cost = cost + (cost * self.style.noise * self.noise[i] >> 13) + (self.noise[i] >> 9)
        cost[~self.alive] = _NEVER
        cost[i] = _NEVER
        result: Ints = cost
        return result

    def step(self) -> bool | None:
        """Glue the cheapest pair; False if it does not fit, None if there is none left."""
        i = int(self.best.argmin())
        if self.best[i] == _NEVER:
            return None
        j = int(self.cost[i].argmin())
        low, high = min(self.low[i], self.low[j]), max(self.high[i], self.high[j])
        follows = min(self.high[i], self.high[j]) <= max(self.low[i], self.low[j])
        size = max(self.size[i], self.size[j]) if follows else self.size[i] + self.size[j]
        extra = np.full(high - low, size)
        for k in (i, j):
            extra[self.low[k] - low : self.high[k] - low] -= self.size[k]
        if (extra > self.slack[low:high]).any():
            self.cost[i, j] = self.cost[j, i] = _NEVER
            self.best[i], self.best[j] = self.cost[i].min(), self.cost[j].min()
            return False
        self.slack[low:high] -= extra
        # The larger one lies below: what is wasted is then one piece at the top.
        if (self.size[j], -j) > (self.size[i], -i):
            i, j = j, i
        lift = 0 if follows else int(self.size[i])
        self.blocks[i] += tuple((item, above + lift) for item, above in self.blocks[j])
        self._replace(i, j, int(low), int(high), int(size))
        return True

    def _replace(self, i: int, j: int, low: int, high: int, size: int) -> None:
        self.alive[j] = False
        self.low[i], self.high[i], self.size[i] = low, high, size
        self.area[i] = self._weigh(low, high, size)
        row = self.row(i)
        stale = (self.best == self.cost[:, i]) | (self.best == self.cost[:, j])
        self.cost[j, :] = self.cost[:, j] = _NEVER
        self.cost[i, :] = self.cost[:, i] = row
        self.best = np.minimum(self.best, row)
        again = np.flatnonzero(stale & self.alive)
        self.best[again] = self.cost[again].min(axis=1)
        self.best[i], self.best[j] = row.min(), _NEVER

    def snapshot(self) -> Blocks:
        alive = np.flatnonzero(self.alive)
        low, high, size = self.low[alive], self.high[alive], self.size[alive]
        sort = np.lexsort((size, high, low))
        blocks = tuple(self.blocks[i] for i in alive[sort].tolist())
        return Blocks(low[sort], high[sort], size[sort], blocks)


def _noise(count: int, style: Style) -> Ints:
    """Symmetric table of numbers below 1024, the same on any machine."""
    a = np.arange(count, dtype=np.uint64)
    mixed = (a[:, None] + a[None, :]) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= (a[:, None] * a[None, :] + np.uint64(style.seed + 1)) * np.uint64(0xD1B54A32D192ED03)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    noise: Ints = (mixed >> np.uint64(54)).astype(np.int64)
    return noise


def glue(space: Space, target: int, style: Style, stages: tuple[int, ...]) -> Iterator[Blocks]:
    """Glue items until nothing fits any more; yields the blocks at some of their numbers.

    Items whose sections are disjoint must not conflict. ``target`` is the peak in units that the
    blocks must still allow, ``stages`` are the numbers of blocks at which to yield, besides the
    last.
    """
    state = _Glue(space, target, style)
    left = len(space)
    while (done := state.step()) is not None:
        left -= done
        if done and left in stages:
            yield state.snapshot()
    yield state.snapshot()
