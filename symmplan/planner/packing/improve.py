"""Close in on the lowest peak by packing below one target after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from symmplan.planner.items import conflicts_of
from symmplan.planner.packing.blocks import Style, glue
from symmplan.planner.packing.greedy import rank_by, squeak
from symmplan.planner.packing.task import Space

if TYPE_CHECKING:
    from symmplan.planner.order import Ints
    from symmplan.planner.packing.blocks import Blocks
    from symmplan.planner.packing.task import Task

__all__ = ["Improver"]

#: Rounds of squeaky wheel on every set of blocks.
_ROUNDS = 10
#: Rounds of squeaky wheel from each of two orders before anything is glued.
_SQUEAKS = 50
#: Sweeps over targets before it is given up.
_SWEEPS = 8


class Improver:
    """Lowers the peak of one component until it meets the bound or its work is used up.

    Attributes:
        offset: Best offsets found, in units.
        peak: Their peak.
        work: Items left that may be placed or glued.
    """

    def __init__(self, space: Space, offset: Ints, peak: int, bound: int, work: int) -> None:
        self.space = space
        self.task = space.task
        self.offset, self.peak, self.work = offset, peak, work
        self._bound = bound
        self._turns: dict[int, int] = {}

    def run(self) -> None:
        """Try ever lower targets, first the bound."""
        self._squeak()
        if not self._can_glue():
            return
        if self._bound < self.peak:
            self._try(self._bound)
        # Halve what lies between what was found and what failed.
        floor = self._bound
        while self.peak - floor > max(1, self.peak // 512):
            target = (floor + self.peak) // 2
            if not self._try(target):
                floor = target
        # Then spend what is left on the bound, on what is just missing, and in between.
        sweep = 0
        while self.peak > self._bound and self.work > 0 and sweep < _SWEEPS:
            sweep += 1
            for part in (0, 4, 7):
                target = self._bound + (self.peak - self._bound) * part // 8
                if target < self.peak:
                    self._try(target)

    def _can_glue(self) -> bool:
        """Whether there are items, may lie anywhere, and do not conflict in disjoint sections."""
        space = self.space
        free = len(space) > 0 and space.align is None and not space.blocked
        return free and bool((space.high == space.hull_high).all())

    def _squeak(self) -> None:
        count = len(self.space)
        for order in _orders(self.space):
            rounds = max(8, min(_SQUEAKS, self.work // (20 * count + 1)))
            self.work -= rounds * count
            self._accept(squeak(self.space, order, self._bound, rounds)[0])
            if self.peak <= self._bound:
                return

    def _try(self, target: int) -> bool:
        """One more turn of gluing for a target, in other styles than the last turn there."""
        turn = self._turns.get(target, 0)
        self._turns[target] = turn + 1
        return any(self._glue(target, style) for style in _styles(turn))

    def _glue(self, target: int, style: Style) -> bool:
        """Whether blocks of one style reach the target."""
        count = len(self.space)
        if self.work <= 0:
            return False
        stages = tuple(count * k // 12 for k in (9, 6, 4, 3, 2, 1))
        self.work -= count * count // 8
        for blocks in glue(self.space, target, style, stages):
            inner = _block_space(self.task, blocks)
            offset, _ = squeak(inner, _orders(inner)[0], target, _ROUNDS)
            self.work -= _ROUNDS * len(inner)
            # Blocks made for a target out of reach may still pack better than anything before.
            self._accept(blocks.spread(offset, count))
            if self.peak <= target:
                return True
            if self.work <= 0:
                return False
        return False

    def _accept(self, offset: Ints) -> None:
        full = np.maximum(self.task.pin, 0)
        full[self.space.free] = offset
        peak = int((full + self.task.size).max())
        if peak < self.peak:
            self.offset, self.peak = full, peak


def _block_space(task: Task, blocks: Blocks) -> Space:
    count = len(blocks.size)
    none = np.zeros((count, 0), dtype=np.int32)
    made = evolve(
        task,
        items=np.arange(count),
        size=blocks.size,
        align=np.ones(count, dtype=np.int64),
        pin=np.full(count, -1, dtype=np.int64),
        start=blocks.low,
        stop=blocks.high,
        end=blocks.high,
        entry=none,
        last=none,
    )
    return Space(made, conflicts_of(made))


def _styles(turn: int) -> list[Style]:
    if turn == 0:
        return [Style(), Style(power=0)]
    if turn == 1:
        return [Style(power=2), Style(early=2), Style(power=2, early=8)]
    return [
        Style(
            power=(1, 2, 0, 1)[k % 4],
            early=(4, 2, 8)[k % 3],
            noise=(2, 8, 24)[k % 3 - turn % 2],
            seed=64 * turn + k,
        )
        for k in range(4)
    ]


def _orders(space: Space) -> tuple[Ints, Ints]:
    """Preferences worth trying, the better bet first."""
    length = space.high - space.low
    return rank_by(-length, -space.size), rank_by(-space.size * length, -length)
