"""Close in on the lowest peak by searching for packings below one target after the other."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from symmplan.planner.items import conflicts_of
from symmplan.planner.packing.blocks import Style, glue
from symmplan.planner.packing.greedy import rank_by, squeak
from symmplan.planner.packing.search import search
from symmplan.planner.packing.task import Space

if TYPE_CHECKING:
    from collections.abc import Iterator

    from symmplan.planner.order import Ints
    from symmplan.planner.packing.blocks import Blocks
    from symmplan.planner.packing.task import Task

__all__ = ["Improver"]

_LOG = logging.getLogger("symmplan")
#: Seconds after which a line in the log says how far the search is; nothing else looks at a clock.
_SAID = 3.0
#: What one step of gluing costs, in search nodes.
_GLUE_COST = 2
#: Nodes of the first search at a target; each further round there doubles them.
_FIRST_LIMIT = 300
#: Rounds of squeaky wheel on every set of blocks.
_ROUNDS = 10
#: Rounds of squeaky wheel from each of two orders before anything is searched.
_SQUEAKS = 50
#: Sweeps over targets before it is given up, unless a proof is wanted.
_SWEEPS = 8


class Improver:
    """Lowers the peak of one component until it meets the bound or its work is used up.

    Attributes:
        offset: Best offsets found, in units.
        peak: Their peak.
        bound: Proven minimum of the peak; rises when a search is exhausted.
        work: Nodes left.
    """

    def __init__(self, space: Space, offset: Ints, peak: int, bound: int, work: int) -> None:
        self.space = space
        self.task = space.task
        self.offset, self.peak, self.bound, self.work = offset, peak, bound, work
        self._given = work
        self._begun = self._said = time.monotonic()
        self._hull = space.align is None and not space.blocked
        self._hull = self._hull and bool((space.high == space.hull_high).all())
        self._orders = _orders(space)
        self._blame = np.zeros(space.sections, dtype=np.int64)
        self._turns: dict[int, int] = {}

    def run(self, goal: int | None, *, prove: bool) -> None:
        """Search below ever lower targets, first at the bound and the goal, if there is one.

        To ``prove`` is to go on until the bound is met or proven out of reach.
        """
        self._squeak()
        for target in (self.bound, *([] if goal is None else [goal])):
            if self.bound <= target < self.peak:
                self._try(target)
        # Halve what lies between what was found and what failed.
        floor = self.bound
        while self.peak - floor > max(1, self.peak // 512):
            target = (floor + self.peak) // 2
            if not self._try(target):
                floor = max(target, self.bound)
        # Then spend what is left on the bound, on what is just missing, and in between.
        sweep = 0
        while self.peak > self.bound and self.work > 0 and (prove or sweep < _SWEEPS):
            sweep += 1
            for part in (0, 4, 7):
                target = self.bound + (self.peak - self.bound) * part // 8
                if self.bound <= target < self.peak:
                    self._try(target)

    def _say(self) -> None:
        if time.monotonic() - self._said >= _SAID:
            self._said, part = time.monotonic(), 1 - max(0, self.work) / self._given
            found = f"{len(self.space):,} buffers, peak {self.peak / self.bound:.4f} x its bound"
            left = (self._said - self._begun) * (1 - part) / max(part, 1e-3)
            text = "search: %s, %.0f s left at most, %.0f%% of the work done"
            _LOG.info(text, found, left, 100 * part)

    def _squeak(self) -> None:
        count = len(self.space)
        for order in self._orders[:2]:
            rounds = max(8, min(_SQUEAKS, self.work // (2 * count + 1)))
            self.work -= rounds * count // 10
            offset, _ = squeak(self.space, order, self.bound, rounds)
            self._accept(offset)
            if self.peak <= self.bound:
                return

    def _try(self, target: int) -> bool:
        """One more round of searches at a target, with more work than the last round there."""
        turn = self._turns.get(target, 0)
        self._turns[target] = turn + 1
        for candidate in self._searches(target, turn):
            self._say()
            if candidate is not None:
                return self._accept(candidate)
            if target < self.bound:
                return False
        return False

    def _accept(self, offset: Ints) -> bool:
        full = np.maximum(self.task.pin, 0)
        full[self.space.free] = offset
        peak = int((full + self.task.size).max())
        if peak >= self.peak:
            return False
        self.offset, self.peak = full, peak
        return True

    def _searches(self, target: int, turn: int) -> Iterator[Ints | None]:
        count = len(self.space)
        deep = min(2 * count + (_FIRST_LIMIT << min(turn, 16)), self.work // 4 + count)
        yield self._plain(target, self._orders[turn % len(self._orders)], deep)
        if self._hull:
            for style in _styles(turn):
                yield from self._glued(target, style, _FIRST_LIMIT << min(turn // 3, 8))
        yield self._plain(target, self._blamed(), 2 * count + _FIRST_LIMIT)
        # The best packing so far, from the bottom: what it got wrong may be near its top.
        yield self._plain(target, rank_by(self.offset[self.space.free]), deep)
        if turn:
            yield self._plain(target, self._orders[(turn + 2) % len(self._orders)], deep)

    def _plain(self, target: int, rank: Ints, limit: int) -> Ints | None:
        if self.work <= 0 or target < self.bound:
            return None
        outcome = search(self.space, target, rank, min(limit, self.work), self._blame)
        self.work -= outcome.nodes
        if outcome.impossible:
            self.bound = max(self.bound, target + 1)
        return outcome.offset

    def _glued(self, target: int, style: Style, limit: int) -> Iterator[Ints | None]:
        space = self.space
        count = len(space)
        if self.work <= 0 or target < self.bound:
            return
        stages = tuple(count * k // 12 for k in (9, 6, 4, 3, 2, 1))
        self.work -= _GLUE_COST * count
        for blocks in glue(space, target, style, stages):
            inner = _block_space(self.task, blocks)
            orders = _orders(inner)
            # Blocks made for a target out of reach may still pack better than anything before.
            offset, _ = squeak(inner, orders[0], target, _ROUNDS)
            self.work -= _ROUNDS * len(inner) // 10
            self._accept(blocks.spread(offset, count))
            for rank in orders[:2]:
                outcome = search(inner, target, rank, limit)
                self.work -= outcome.nodes
                if outcome.offset is not None:
                    yield blocks.spread(outcome.offset, count)
                    return
                if outcome.impossible:
                    break
            if self.work <= 0:
                return
        yield None

    def _blamed(self) -> Ints:
        """Prefer items of the sections that ended most branches so far."""
        space = self.space
        total = np.append(0, np.cumsum(self._blame))
        weight = total[space.high] - total[space.low]
        self._blame //= 2
        return rank_by(-weight, -(space.high - space.low), -space.size)


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


def _orders(space: Space) -> list[Ints]:
    """Preferences worth trying, best bets first."""
    length = space.high - space.low
    stretches = zip(space.low.tolist(), space.high.tolist(), strict=True)
    total = np.asarray([int(space.load[a:b].max()) for a, b in stretches], dtype=np.int64)
    return [
        rank_by(-length, -space.size),
        rank_by(-space.size * length, -length),
        rank_by(-total, -length, -space.size),
        rank_by(-space.size, -length),
        rank_by(-total, -space.size * length),
        rank_by(space.low, -length, -space.size),
    ]
