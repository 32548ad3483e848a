"""Which items share a segment: groups, pairs kept apart, signal pads on concurrent streams."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from symmplan.errors import PlanningError
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from symmplan.model import Problem
    from symmplan.planner.items import Items
    from symmplan.planner.order import Order

    Ints = NDArray[np.int64]

__all__ = ["Rules", "linked", "mergeable"]


def mergeable(problem: Problem, items: Items) -> list[tuple[int, ...]]:
    """Sets of group numbers that may be served by one segment, largest first, without repeats.

    Group names take no part in the choice: they differ between ranks that run the same plan.
    """
    number = {name: i for i, name in enumerate(items.groups)}
    sets = {
        tuple(sorted(number[g] for g in groups if g in number)) for groups in problem.shared_groups
    }
    return sorted((s for s in sets if len(s) > 1), key=lambda s: (-len(s), s))


def linked(problem: Problem, items: Items) -> list[tuple[int, ...]]:
    """Groups that could share segments, directly or through others; every group is in one set."""
    graph = nx.empty_graph(len(items.groups))
    for groups in mergeable(problem, items):
        nx.add_path(graph, groups)
    return sorted(tuple(sorted(joined)) for joined in nx.connected_components(graph))


class Rules:
    """Assigns items to segments so that no two that must be apart meet.

    Items without such rules all go to the first segment; the others, in canonical order, to the
    first segment that takes them.

    Raises:
        PlanningError: Two buffers must share bytes and must not share a segment.
    """

    def __init__(self, problem: Problem, items: Items) -> None:
        self._order: Order = order_of(problem)
        owner = {name: i for i, names in enumerate(items.members) for name in names}
        self._apart: dict[int, set[int]] = {}
        for a, b in sorted({tuple(sorted(p)) for p in problem.apart}):
            x, y = owner[a], owner[b]
            if x == y:
                raise PlanningError(
                    f"buffers {a!r} and {b!r} must share bytes and must not share a segment",
                    expected="one or the other",
                    got="both together and apart, directly or through other pairs",
                    fix="drop the pair from apart, or the pairs that join them from together",
                    buffers=(a, b),
                )
            self._apart.setdefault(x, set()).add(y)
            self._apart.setdefault(y, set()).add(x)
        pads = {b.name for b in problem.buffers if b.signal_pad}
        ops: dict[int, set[int]] = {}
        for access in problem.accesses if pads else ():
            if access.buffer in pads:
                op = self._order.index[access.operation]
                ops.setdefault(owner[access.buffer], set()).add(op)
        self._pad_ops = {i: sorted(o) for i, o in ops.items()}

    def assign(self, which: Ints) -> list[Ints]:
        """The items of each segment, ascending, of items whose groups may all share one."""
        ruled = [i for i in which.tolist() if i in self._apart or i in self._pad_ops]
        colour: dict[int, int] = {}
        pads: list[_Pads] = []
        for i in ruled:
            taken = {colour[j] for j in self._apart.get(i, ()) if j in colour}
            ops = self._pad_ops.get(i, [])
            c = 0
            while c in taken or (ops and c < len(pads) and pads[c].clash(ops)):
                c += 1
            colour[i] = c
            while len(pads) <= c:
                pads.append(_Pads(self._order))
            pads[c].add(ops)
        numbers = np.asarray([colour.get(i, 0) for i in which.tolist()], dtype=np.int64)
        return [which[numbers == c] for c in range(int(numbers.max(initial=-1)) + 1)]


class _Pads:
    """Operations that use one segment's signal pad, by chain and place."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._places: list[list[int]] = [[] for _ in range(order.chains)]

    def add(self, ops: list[int]) -> None:
        for op in ops:
            insort(self._places[self._order.chain[op]], int(self._order.pos[op]))

    def clash(self, ops: list[int]) -> bool:
        """Whether an operation here is unordered with one of ``ops``."""
        numbers = np.asarray(ops, dtype=np.int64)
        before = self._order.entry(numbers)
        after = self._order.exit(numbers)
        for k, op in enumerate(ops):
            for c, places in enumerate(self._places):
                if not places or c == self._order.chain[op]:
                    continue
                # Neither before (place <= before) nor after (place >= after) the operation.
                at = bisect_right(places, before[k, c])
                if at < len(places) and places[at] < after[k, c]:
                    return True
        return False
