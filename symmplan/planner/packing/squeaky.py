"""Lowest offset first, and what squeaks gets oil: items that stick out come earlier next time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from symmplan.planner.instances import Random

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from symmplan.planner.packing.space import Space

    Ints = NDArray[np.int64]

__all__ = ["lowest_first", "squeak"]

#: Rounds without a better packing after which the best priorities are restored.
_PATIENCE = 25


def lowest_first(space: Space, rank: Ints) -> Ints:
    """Offsets when always the item that can lie lowest is placed, the preferred one among equals.

    Args:
        space: What is packed.
        rank: Preference of each item; least first.
    """
    count = len(space)
    bits = max(1, count.bit_length())
    done = np.iinfo(np.int64).max
    floor = np.asarray([space.slot(i, 0) for i in range(count)], dtype=np.int64)
    # Floor and rank in one number: one minimum finds the next item.
    key = (floor << bits) + rank
    offset = np.zeros(count, dtype=np.int64)
    sizes = space.size.tolist()
    neighbours = space.neighbours
    simple = space.align is None and not space.blocked
    for _ in range(count):
        item = int(key.argmin())
        place = int(key[item]) >> bits
        offset[item] = place
        key[item] = done
        near = neighbours[item]
        end = place + sizes[item]
        if simple:
            key[near] = np.maximum(key[near], (end << bits) + rank[near])
            continue
        for other in near[key[near] < done].tolist():
            if int(key[other]) >> bits < end:
                key[other] = (space.slot(other, end) << bits) + rank[other]
    return offset


def squeak(space: Space, order: Ints, bound: int, rounds: int) -> tuple[Ints, int]:
    """Best offsets of some rounds of `lowest_first`, and their peak.

    In the first half of the rounds the items that end above the bound move forward, those that
    end highest furthest. In the second half those that stick out most move forward by chance, and
    after some rounds in vain it starts again from the best.

    Args:
        space: What is packed.
        order: Preference to start from.
        bound: Peak at which to stop, in units.
        rounds: Most rounds.
    """
    count = len(space)
    random = Random(rounds)
    best, peak, vain = None, 0, 0
    priority = kept = -order * 8
    for turn in range(rounds):
        sort = np.lexsort((order, -priority))
        rank = np.empty(count, dtype=np.int64)
        rank[sort] = np.arange(count)
        offset = lowest_first(space, rank)
        ends = offset + space.size
        top = int(ends.max(initial=0))
        vain += 1
        if best is None or top < peak:
            best, peak, kept, vain = offset, top, priority, 0
        if peak <= bound:
            break
        if 2 * turn < rounds:
            over = ends - bound
            push = np.where(over > 0, count + count * over // (top - bound + 1), 0)
        else:
            if vain > _PATIENCE:
                priority, vain = kept, 0
            push = np.zeros(count, dtype=np.int64)
            for i in np.flatnonzero(ends > (peak + bound) // 2).tolist():
                push[i] = 8 + random.below(4 * count)
        priority = priority + push
    assert best is not None
    return best, peak
