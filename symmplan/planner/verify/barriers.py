"""Is every reuse of bytes that peers touch synchronised? See [Note: peers count] in the model.

For each group and operation, two tables say up to where each stream is finished *on all ranks*:
when the operation starts, and when it has ended. A handshake or barrier raises them to all that
precedes the operation, a release to the operation itself, and edges carry them on.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from symmplan.planner.verify.structure import fail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from symmplan.model import Plan
    from symmplan.planner.verify.clocks import Clocks
    from symmplan.planner.verify.sharing import Reuse
    from symmplan.planner.verify.users import User

    Need = tuple[int, int, int, int]  # earlier operation, later operation, both users

__all__ = ["check_barriers"]


def check_barriers(plan: Plan, users: list[User], reuse: Reuse, clocks: Clocks) -> None:
    """Check that the listed barriers are known and suffice.

    Args:
        plan: What is checked.
        users: Its users.
        reuse: Consecutive users of its bytes.
        clocks: The order of its operations.

    Raises:
        VerificationError: A barrier is missing (``barrier``) or makes no sense
            (``unknown_barrier``).
    """
    barred = _barred(plan, clocks)
    touches = [sorted({(clocks.number[o], remote) for o, remote in u.accesses}) for u in users]
    within: dict[str, set[Need]] = {}
    across: dict[str, set[Need]] = {}
    for needs, pairs in ((within, reuse.pairs), (across, reuse.wraps)):
        for a, b in pairs:
            for op, remote in touches[a]:
                for other, other_remote in touches[b]:
                    if remote:
                        _need(needs, users[a].group, (op, other, a, b), clocks)
                    if other_remote:
                        _need(needs, users[b].group, (op, other, a, b), clocks)
    for need in _handed_over(users, clocks):
        within.setdefault(users[need[2]].group, set()).add(need)
    for group in sorted(within.keys() | across.keys()):
        _check_within(group, sorted(within.get(group, ())), users, barred, clocks)
        _check_across(group, sorted(across.get(group, ())), users, barred, clocks)


def _need(needs: dict[str, set[Need]], group: str, need: Need, clocks: Clocks) -> None:
    """Note what is not settled by the two operations themselves."""
    earlier, later = clocks.operations[need[0]], clocks.operations[need[1]]
    if (earlier.group == group and earlier.release) or (later.group == group and later.handshake):
        return
    needs.setdefault(group, set()).add(need)


def _handed_over(users: list[User], clocks: Clocks) -> list[Need]:
    """Ordered operations of one user, one of them ours alone and one also the peers'.

    Left out are pairs that only read, and what peers read before and we read after.
    """
    found: list[Need] = []
    for u, user in enumerate(users):
        far = {clocks.number[o] for o, remote in user.accesses if remote}
        if not far:
            continue
        near = {clocks.number[o] for o, _ in user.accesses} - far
        writers = {clocks.number[o] for o in user.writers}
        for sources, targets in (
            (near & writers, far),
            (far & writers, near),
            (far - writers, near & writers),
        ):
            found += ((x, y, u, u) for x, y in _following(sources, targets, clocks))
    if not found:
        return []
    table = np.asarray(found, dtype=np.int64)
    ordered = clocks.ordered(table[:, 0], table[:, 1])
    return [need for need, holds in zip(found, ordered.tolist(), strict=True) if holds]


def _following(sources: set[int], targets: set[int], clocks: Clocks) -> Iterator[tuple[int, int]]:
    """Pairs of a source and a target behind it; in a total order the nearest stands for all."""
    behind = sorted(targets)
    for x in sorted(sources):
        k = bisect_right(behind, x)
        for y in behind[k : k + 1] if clocks.streams == 1 else behind[k:]:
            yield x, y


def _barred(plan: Plan, clocks: Clocks) -> set[tuple[int, str]]:
    groups = {b.group for b in plan.problem.buffers}
    names = {b.name for b in plan.problem.buffers}
    barred = set()
    for barrier in plan.barriers:
        unknown = [n for n in barrier.buffers if n not in names]
        if barrier.before not in clocks.number or barrier.group not in groups or unknown:
            fail(
                "unknown_barrier",
                f"the barrier before {barrier.before!r} over {barrier.group!r} names what the "
                "problem does not have",
                expected="an operation, a group and buffers of the problem",
                got=repr(barrier),
                barrier=barrier,
            )
        barred.add((clocks.number[barrier.before], barrier.group))
    return barred


def _check_within(
    group: str,
    needs: list[Need],
    users: list[User],
    barred: set[tuple[int, str]],
    clocks: Clocks,
) -> None:
    if not needs:
        return
    table = np.asarray(needs, dtype=np.int64)
    earlier, later = table[:, 0], table[:, 1]
    stream = clocks.stream[earlier]
    good = np.zeros(len(table), dtype=bool)
    for low, reached in clocks.blocks():
        finished = _finished(group, low, reached, barred, clocks)
        inside = (stream >= low) & (stream < low + reached.shape[1])
        good[inside] = (
            finished[later[inside], stream[inside] - low] >= clocks.place[earlier[inside]]
        )
    for k in np.flatnonzero(~good)[:1].tolist():
        _missing(group, needs[k], users, clocks, "")


def _finished(
    group: str,
    low: int,
    reached: NDArray[np.int32],
    barred: set[tuple[int, str]],
    clocks: Clocks,
) -> NDArray[np.int32]:
    """Per operation and stream, how many operations are finished everywhere when it starts."""
    started = np.zeros_like(reached)
    rows = list(started)
    for i, op in enumerate(clocks.operations):
        row = rows[i]
        own = int(clocks.stream[i]) - low
        if (op.handshake and op.group == group) or (i, group) in barred:
            np.maximum(row, reached[i], out=row)
            if 0 <= own < len(row):
                row[own] = clocks.place[i] - 1
        ended = row
        if op.release and op.group == group:
            ended = np.maximum(row, reached[i])
        for j in clocks.after[i]:
            np.maximum(rows[j], ended, out=rows[j])
    return started


def _check_across(
    group: str,
    needs: list[Need],
    users: list[User],
    barred: set[tuple[int, str]],
    clocks: Clocks,
) -> None:
    """From one run of the program to the next, any synchronisation behind or ahead will do."""
    if not needs:
        return
    count = len(clocks.operations)
    ahead = [False] * count  # the group meets at or before this operation's first byte
    for i, op in enumerate(clocks.operations):
        member = op.group == group
        ahead[i] = ahead[i] or (member and op.handshake) or (i, group) in barred
        if ahead[i] or (member and op.release):
            for j in clocks.after[i]:
                ahead[j] = True
    behind = [False] * count  # it meets after this operation's last byte
    for i in range(count - 1, -1, -1):
        op = clocks.operations[i]
        behind[i] = (op.group == group and op.release) or any(
            behind[j]
            or (clocks.operations[j].group == group and clocks.operations[j].handshake)
            or (j, group) in barred
            for j in clocks.after[i]
        )
    for need in needs:
        if not behind[need[0]] and not ahead[need[1]]:
            _missing(group, need, users, clocks, " of the program's next run")


def _missing(group: str, need: Need, users: list[User], clocks: Clocks, when: str) -> None:
    op, other, a, b = need
    first, second = users[a], users[b]
    low, high = max(first.offset, second.offset), min(first.end, second.end)
    fail(
        "barrier",
        f"bytes [{low}, {high}) of segment {first.segment!r} pass from buffer "
        f"{first.names[0]!r} (operation {clocks.names[op]!r}) to {second.names[0]!r} (operation "
        f"{clocks.names[other]!r}{when}) while peers of group {group!r} may still use them",
        expected=f"a handshake, release or barrier over {group!r} in between",
        got="none",
        buffers=(first.names[0], second.names[0]),
        operations=(clocks.names[op], clocks.names[other]),
        group_name=group,
        segment=first.segment,
    )
