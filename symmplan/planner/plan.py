"""From a `Problem` to a `Plan`: segments, offsets, barriers.

Items share a segment unless their groups, pairs kept apart, or signal pads on concurrent streams
forbid it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TYPE_CHECKING, TypeAlias

import networkx as nx
import numpy as np

from symmplan.errors import CapacityError, OptionError, PlanningError
from symmplan.model import Bound, Placement, Plan, SegmentSpec
from symmplan.planner.barriers import barriers_of
from symmplan.planner.items import conflicts_of, items_of
from symmplan.planner.order import order_of
from symmplan.planner.packing.bound import heaviest
from symmplan.planner.packing.solve import pack
from symmplan.planner.packing.task import task_of
from symmplan.planner.uncollected import uncollected

if TYPE_CHECKING:
    from symmplan.model import Problem
    from symmplan.planner.items import Items
    from symmplan.planner.order import Ints, Order
    from symmplan.planner.packing.task import Packing, Task

__all__ = ["plan"]


#: The segments that serve one set of groups: what lies in each, and where.
_Packed: TypeAlias = "list[tuple[Task, Packing]]"
#: Those of each set of groups, in order.
_Families: TypeAlias = "dict[tuple[int, ...], _Packed]"


@uncollected()
def plan(problem: Problem, *, capacity: int | None = None) -> Plan:
    """Place every buffer of a problem. Collective: no; equal problems give equal plans anywhere.

    It improves the plan until the bound is met or its work is used up, about a second for some
    hundred buffers that fit badly. Work is counted and never the clock.

    Args:
        problem: What the program does.
        capacity: Most bytes that all segments may take together, or None.

    Raises:
        OptionError: ``capacity`` is not a number of bytes.
        PlanningError: Constraints contradict each other.
        CapacityError: The buffers do not fit into ``capacity``; ``buffers`` names some that
            cannot fit together.
    """
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int)):
        raise OptionError(
            f"capacity is {capacity!r}",
            expected="bytes as a whole number, or None",
            got=repr(capacity),
            fix="pass bytes as int",
        )
    items = items_of(problem)
    result = _assemble(problem, items, _families(problem, items))
    if capacity is not None and result.peak_bytes > capacity:
        _raise_capacity(result, capacity)
    return result


def _families(problem: Problem, items: Items) -> _Families:
    """One family per group, merged where sharing a segment lowers the total."""
    rules = _Rules(problem, items)
    singles = [(g,) for g in range(len(items.groups))]
    found: _Families = {only: _solve(items, rules, only) for only in singles}
    for groups in _mergeable(problem, items):
        left = tuple(g for g in groups if (g,) in found)
        if len(left) < 2:
            continue
        merged = _solve(items, rules, left)
        if _nbytes(merged) < sum(_nbytes(found[g,]) for g in left):
            found[left] = merged
            for g in left:
                del found[g,]
    return dict(sorted(found.items()))


def _nbytes(packed: _Packed) -> int:
    return sum(task.unit * packing.peak for task, packing in packed)


def _solve(items: Items, rules: _Rules, groups: tuple[int, ...]) -> _Packed:
    which = np.flatnonzero(np.isin(items.group, groups))
    tasks = tuple(task_of(items, part) for part in rules.assign(which))
    for task in tasks:
        _check_pins(items, task)
    return [(task, pack(task)) for task in tasks]


def _mergeable(problem: Problem, items: Items) -> list[tuple[int, ...]]:
    """Sets of group numbers that may be served by one segment, largest first, without repeats.

    Group names take no part in the choice: they differ between ranks that run the same plan.
    """
    number = {name: i for i, name in enumerate(items.groups)}
    sets = {
        tuple(sorted(number[g] for g in groups if g in number)) for groups in problem.shared_groups
    }
    return sorted((s for s in sets if len(s) > 1), key=lambda s: (-len(s), s))


def _linked(problem: Problem, items: Items) -> list[tuple[int, ...]]:
    """Groups that could share segments, directly or through others; every group is in one set."""
    graph = nx.empty_graph(len(items.groups))
    for groups in _mergeable(problem, items):
        nx.add_path(graph, groups)
    return sorted(tuple(sorted(joined)) for joined in nx.connected_components(graph))


class _Rules:
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
        for access in problem.accesses:
            if access.buffer in pads:
                op = self._order.index[access.operation]
                ops.setdefault(owner[access.buffer], set()).add(op)
        self._pad_ops = {i: sorted(o) for i, o in ops.items()}

    def assign(self, which: Ints) -> list[Ints]:
        """The items of each segment, ascending, of items whose groups may all share one."""
        ruled = [i for i in which.tolist() if i in self._apart or i in self._pad_ops]
        colour: dict[int, int] = {}
        pads: list[list[list[int]]] = []  # of each segment, per chain, the places that use its pad
        for i in ruled:
            taken = {colour[j] for j in self._apart.get(i, ()) if j in colour}
            ops = self._pad_ops.get(i, [])
            c = 0
            while c in taken or (ops and c < len(pads) and self._clash(pads[c], ops)):
                c += 1
            colour[i] = c
            while len(pads) <= c:
                pads.append([[] for _ in range(self._order.chains)])
            for op in ops:
                insort(pads[c][self._order.chain[op]], int(self._order.pos[op]))
        numbers = np.asarray([colour.get(i, 0) for i in which.tolist()], dtype=np.int64)
        return [which[numbers == c] for c in range(int(numbers.max(initial=-1)) + 1)]

    def _clash(self, used: list[list[int]], ops: list[int]) -> bool:
        """Whether an operation that uses a segment's pad is unordered with one of ``ops``."""
        numbers = np.asarray(ops, dtype=np.int64)
        before = self._order.entry(numbers)
        after = self._order.exit(numbers)
        for k, op in enumerate(ops):
            for c, places in enumerate(used):
                if not places or c == self._order.chain[op]:
                    continue
                # Neither before (place <= before) nor after (place >= after) the operation.
                at = bisect_right(places, before[k, c])
                if at < len(places) and places[at] < after[k, c]:
                    return True
        return False


def _check_pins(items: Items, task: Task) -> None:
    """Pinned items that conflict must not overlap; nothing could mend that."""
    pinned = task.take(np.flatnonzero(task.pin >= 0))
    a, b = conflicts_of(pinned).pairs()
    low = np.maximum(pinned.pin[a], pinned.pin[b])
    high = np.minimum(pinned.pin[a] + pinned.size[a], pinned.pin[b] + pinned.size[b])
    for k in np.flatnonzero(low < high)[:1].tolist():
        names = tuple(sorted(items.members[pinned.items[i]][0] for i in (a[k], b[k])))
        raise PlanningError(
            f"buffers {names[0]!r} and {names[1]!r} are pinned to common bytes "
            f"[{low[k] * task.unit}, {high[k] * task.unit}) and may be live together",
            expected="disjoint pins, or an order between their operations",
            got=f"pins at {pinned.pin[a[k]] * task.unit} and {pinned.pin[b[k]] * task.unit}",
            fix="move or remove one of the pins, or keep the two apart",
            buffers=names,
        )


def _assemble(problem: Problem, items: Items, families: _Families) -> Plan:
    segments: list[SegmentSpec] = []
    bounds: list[Bound] = []
    where: dict[str, Placement] = {}
    size = {b.name: b.nbytes for b in problem.buffers}
    for served, packed in families.items():
        groups = tuple(sorted(items.groups[g] for g in served))
        for task, packing in packed:
            name = f"segment{len(segments)}"
            segments.append(
                SegmentSpec(
                    name=name,
                    groups=groups,
                    nbytes=packing.peak * task.unit,
                    lower_bound_bytes=packing.bound * task.unit,
                    signal_pad=bool(items.pad[task.items].any()),
                    witness=_names(items, task, packing.witness),
                    proof=packing.proof,
                )
            )
            offsets = (packing.offset * task.unit).tolist()
            for item, offset in zip(task.items.tolist(), offsets, strict=True):
                for buffer in items.members[item]:
                    where[buffer] = Placement(name, offset, size[buffer])
    for joint in _linked(problem, items):
        parts = [p for served, packed in families.items() if {*served} <= {*joint} for p in packed]
        if len(parts) > 1:
            bounds.append(_joint_bound(items, parts, joint))
    placements = {name: where[name] for name in sorted(where)}
    return Plan(
        problem=problem,
        segments=tuple(segments),
        placements=placements,
        barriers=barriers_of(problem, items, placements),
        bounds=tuple(bounds),
    )


def _names(items: Items, task: Task, witness: Ints) -> tuple[str, ...]:
    return tuple(sorted(items.members[i][0] for i in task.items[witness].tolist()))


def _joint_bound(items: Items, packed: _Packed, joint: tuple[int, ...]) -> Bound:
    """What all segments of some groups need together, however items are dealt to them."""
    which = np.sort(np.concatenate([task.items for task, _ in packed]))
    task = task_of(items, which)
    units, witness = heaviest(task)
    return Bound(
        groups=tuple(sorted(items.groups[g] for g in joint)),
        nbytes=units * task.unit,
        witness=_names(items, task, witness),
    )


def _raise_capacity(made: Plan, capacity: int) -> None:
    buffers = _cannot_fit(made, capacity)
    proven = made.lower_bound_bytes > capacity
    if not proven:
        why = f"no packing into {capacity} was found"
    elif len(buffers) == 1:
        why = f"{buffers[0]} alone needs more than {capacity}"
    else:
        named = ", ".join([*buffers[:8], "..."] if len(buffers) > 8 else buffers)
        why = f"{named} are live together and need more than {capacity}"
    raise CapacityError(
        f"{len(made.placements)} buffers take {made.peak_bytes} bytes; {why}",
        expected=f"at most {capacity} bytes",
        got=f"{made.peak_bytes}, proven minimum {made.lower_bound_bytes}",
        fix="increase the capacity, or order or drop some of the buffers named in `buffers`",
        buffers=buffers,
        capacity=capacity,
        peak_bytes=made.peak_bytes,
        lower_bound_bytes=made.lower_bound_bytes,
    )


def _cannot_fit(made: Plan, capacity: int) -> tuple[str, ...]:
    """Fewest of the largest witnesses that exceed the capacity, or all of them if none do."""
    names = [n for s in made.segments for n in s.witness]
    names.sort(key=lambda n: (-made.placements[n].nbytes, n))
    total = 0
    for k, name in enumerate(names):
        total += made.placements[name].nbytes
        if total > capacity:
            return tuple(sorted(names[: k + 1]))
    return tuple(sorted(names))
