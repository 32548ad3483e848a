"""What is packed: buffers that must share bytes become one item, live ranges become clocks.

[Note: comparing live ranges]
    An item keeps, per chain, ``last``: the place of its last access there (0 if none), and
    ``entry``: how many of the chain's operations strictly precede *all* its accesses. All accesses
    of A precede all of B iff ``last[A] <= entry[B]`` on every chain. ``[start, stop)`` is its hull
    in the canonical linear extension: whatever starts at ``stop`` or later comes after all of it,
    so items whose hulls are disjoint never conflict. On one chain the hull is the live range
    itself and nothing else needs to be compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from symmplan.errors import PlanningError
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from symmplan.model import Buffer, Problem
    from symmplan.planner.order import Order

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

__all__ = ["Items", "items_of"]


@frozen(eq=False)
class Items:
    """Buffers to be placed, those that must share their offset merged, in canonical order.

    Attributes:
        members: Names of the buffers of each item, sorted; items are sorted by their first.
        nbytes: Bytes of the largest member.
        align: Largest alignment of a member, in bytes.
        pin: Fixed offset in bytes, or -1.
        group: Number of the process group, by first use.
        persistent: Bound for the whole program.
        pad: Uses the signal pad.
        start: First instant of the hull.
        stop: First instant after the hull.
        end: First instant after the last access; items whose [start, end) overlap do conflict.
        entry: [items, chains] See [Note: comparing live ranges].
        last: [items, chains] See [Note: comparing live ranges].
        groups: Names of the process groups by number.
    """

    members: tuple[tuple[str, ...], ...]
    nbytes: Ints
    align: Ints
    pin: Ints
    group: Ints
    persistent: Bools
    pad: Bools
    start: Ints
    stop: Ints
    end: Ints
    entry: NDArray[np.int32]
    last: NDArray[np.int32]
    groups: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.members)


def items_of(problem: Problem) -> Items:
    """Merge, sort and clock the buffers of a problem.

    Args:
        problem: What is to be planned.

    Raises:
        PlanningError: Buffers that must share their offset are pinned to different ones.
    """
    order = order_of(problem)
    buffers = sorted(problem.buffers, key=lambda b: b.name)
    owner, members = _classes(problem, buffers)
    count = len(members)
    group_no: dict[str, int] = {}
    for b in buffers:
        group_no.setdefault(b.group, len(group_no))
    nbytes = np.zeros(count, dtype=np.int64)
    np.maximum.at(nbytes, owner, _column(b.nbytes for b in buffers))
    align = np.ones(count, dtype=np.int64)
    np.maximum.at(align, owner, _column(b.align for b in buffers))
    group = np.zeros(count, dtype=np.int64)
    group[owner] = _column(group_no[b.group] for b in buffers)
    persistent = np.zeros(count, dtype=bool)
    persistent[owner[[b.persistent for b in buffers]]] = True
    pad = np.zeros(count, dtype=bool)
    pad[owner[[b.signal_pad for b in buffers]]] = True
    pin = _pins(buffers, owner, align, members)
    start, stop, end, entry, last = _ranges(problem, order, buffers, owner, persistent)
    return Items(
        members=members,
        nbytes=nbytes,
        align=align,
        pin=pin,
        group=group,
        persistent=persistent,
        pad=pad,
        start=start,
        stop=stop,
        end=end,
        entry=entry,
        last=last,
        groups=tuple(group_no),
    )


def _column(values: object) -> Ints:
    return np.fromiter(values, dtype=np.int64)  # type: ignore[call-overload,no-any-return]


def _classes(problem: Problem, buffers: list[Buffer]) -> tuple[Ints, tuple[tuple[str, ...], ...]]:
    """Item of each buffer, and the names in each item."""
    if not problem.together:
        return np.arange(len(buffers)), tuple((b.name,) for b in buffers)
    number = {b.name: i for i, b in enumerate(buffers)}
    parent = list(range(len(buffers)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for a, b in problem.together:
        x, y = find(number[a]), find(number[b])
        parent[max(x, y)] = min(x, y)
    item_of: dict[int, int] = {}
    members: list[list[str]] = []
    owner = np.empty(len(buffers), dtype=np.int64)
    for i, buffer in enumerate(buffers):
        item = item_of.setdefault(find(i), len(members))
        if item == len(members):
            members.append([])
        members[item].append(buffer.name)
        owner[i] = item
    return owner, tuple(tuple(m) for m in members)


def _pins(
    buffers: list[Buffer], owner: Ints, align: Ints, members: tuple[tuple[str, ...], ...]
) -> Ints:
    pin = np.full(len(members), -1, dtype=np.int64)
    for i, b in enumerate(buffers):
        if b.offset is None:
            continue
        item = int(owner[i])
        if pin[item] not in (-1, b.offset):
            raise PlanningError(
                f"buffer {b.name!r} is pinned at byte {b.offset} but must share its offset with "
                f"{members[item][0]!r}, pinned at byte {pin[item]}",
                expected=f"one offset for {', '.join(members[item])}",
                got=f"{pin[item]} and {b.offset}",
                fix="remove one of the pins, or the pair from together",
                buffers=members[item],
            )
        pin[item] = b.offset
    bad = np.flatnonzero((pin >= 0) & (pin % align != 0))
    if len(bad):
        item = int(bad[0])
        raise PlanningError(
            f"buffers {', '.join(members[item])} must share the offset {pin[item]}, which does "
            f"not suit all of them",
            expected=f"a multiple of {align[item]}",
            got=int(pin[item]),
            fix="move the pin, or remove the pair from together",
            buffers=members[item],
        )
    return pin


def _ranges(
    problem: Problem, order: Order, buffers: list[Buffer], owner: Ints, persistent: Bools
) -> tuple[Ints, Ints, Ints, NDArray[np.int32], NDArray[np.int32]]:
    item_of = dict(zip((b.name for b in buffers), owner.tolist(), strict=True))
    item = _column(item_of[a.buffer] for a in problem.accesses)
    op = _column(order.index[a.operation] for a in problem.accesses)
    by_item = np.lexsort((op, item))
    item, op = item[by_item], op[by_item]
    count, chains = len(persistent), order.chains
    if not count:
        none = np.zeros((0, chains), dtype=np.int32)
        return op, op, op, none, none
    fresh = np.flatnonzero(np.append(True, item[1:] != item[:-1]))
    start, end = op[fresh], op[np.append(fresh[1:], len(op)) - 1] + 1
    entry = np.minimum.reduceat(order.entry(op), fresh, axis=0)
    leave = np.maximum.reduceat(order.exit(op), fresh, axis=0)
    place = np.zeros((len(op), chains), dtype=np.int32)
    place[np.arange(len(op)), order.chain[op]] = order.pos[op]
    last = np.maximum.reduceat(place, fresh, axis=0)
    stop = np.zeros(count, dtype=np.int64)
    for c, members in enumerate(order.members):
        # The last operation of this chain that is not after all of the item's accesses.
        behind = leave[:, c] - 2
        reach = np.where(behind >= 0, members[behind] + 1, 0) if len(members) else 0
        np.maximum(stop, reach, out=stop)
    ends = len(order.names)
    start[persistent] = 0
    stop[persistent] = ends
    end[persistent] = ends
    entry[persistent] = -1
    last[persistent] = ends + 1
    return start, stop, end, entry, last
