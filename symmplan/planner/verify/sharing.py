"""Checks that buffers that share bytes may do so.

[Note: users of a byte]
    Users are visited in the order in which they start in a linear extension, and a map from bytes
    to their latest user is kept. The users of a byte must be totally ordered, so it is enough that
    each comes entirely after the one before it: if two of them conflict, one of the steps between
    them fails. So the check takes time in proportion to the plan, not to the number of pairs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise, product
from typing import TYPE_CHECKING, TypeAlias

from symmplan.planner.verify.structure import fail

if TYPE_CHECKING:
    from collections.abc import Mapping

    from symmplan.model import Plan
    from symmplan.planner.graphs import Paths
    from symmplan.planner.verify.structure import User
    from symmplan.planner.verify.touches import Touches

__all__ = ["check_pads", "check_sharing"]

#: Above this many operations, pads that only their own buffer leaves unordered are not told apart.
MAX_PAD_PAIRS = 4096


#: Pairs (earlier, later) of consecutive users of some byte, as indices of users.
Pairs: TypeAlias = list[tuple[int, int]]


class _Bytes:
    """Latest and first user of every byte of one segment."""

    def __init__(self, nbytes: int) -> None:
        self.cuts = [0, nbytes]  # the last is a sentinel
        self.user = [-1]
        self.first: list[tuple[int, int, int]] = []

    def take(self, low: int, high: int, user: int) -> set[int]:
        """Give bytes [low, high) to a user; whose were they?"""
        i = bisect_right(self.cuts, low) - 1
        j = bisect_left(self.cuts, high)
        cuts, users = [self.cuts[i]], []
        if self.cuts[i] < low:
            users.append(self.user[i])
            cuts.append(low)
        users.append(user)
        if self.cuts[j] > high:
            users.append(self.user[j - 1])
            cuts.append(high)
        owners = set(self.user[i:j])
        if -1 in owners:
            owners.remove(-1)
            for k in range(i, j):
                if self.user[k] < 0:
                    self.first.append((max(self.cuts[k], low), min(self.cuts[k + 1], high), user))
        self.cuts[i:j] = cuts
        self.user[i:j] = users
        return owners

    def wraps(self) -> set[tuple[int, int]]:
        """(last, first) user of every byte that is used at all."""
        found: set[tuple[int, int]] = set()
        for low, high, first in self.first:
            i = bisect_right(self.cuts, low) - 1
            while i < len(self.user) and self.cuts[i] < high:
                found.add((self.user[i], first))
                i += 1
        return found


def check_sharing(plan: Plan, users: list[User], touches: Touches) -> tuple[Pairs, Pairs]:
    """Check that no two users that may be live together share a byte. See [Note: users of a byte].

    Returns:
        Who follows whom within one run of the program, and from one run to the next, where a user
        may follow itself.

    Raises:
        VerificationError: Two of them do (``overlap``).
    """
    space = {s.name: _Bytes(s.nbytes) for s in plan.segments}
    first = touches.first.tolist()
    pairs: Pairs = []
    for u in sorted(range(len(users)), key=first.__getitem__):
        user = users[u]
        pairs += [(b, u) for b in space[user.segment].take(user.offset, user.end, u)]
    pairs.sort()
    for a, b in pairs:
        if users[a].persistent or users[b].persistent:
            _overlap(users[a], users[b], None, None)
    for k, (last, first) in touches.unordered(pairs).items():
        operations = touches.paths.operations
        _overlap(
            users[pairs[k][0]], users[pairs[k][1]], operations[last].name, operations[first].name
        )
    wraps = {w for s in space.values() for w in s.wraps()}
    return pairs, sorted(wraps)


def _overlap(a: User, b: User, last: str | None, first: str | None) -> None:
    low, high = max(a.offset, b.offset), min(a.end, b.end)
    reason = "one of them is bound for the whole program"
    if last is not None:
        reason = f"operation {last!r} on {a.names[0]!r} is not ordered before {first!r}"
    fail(
        "overlap",
        f"buffers {a.names[0]!r} and {b.names[0]!r} share bytes [{low}, {high}) of segment "
        f"{a.segment!r}, but {reason}",
        expected="disjoint bytes, or every access of one before the first of the other",
        got=f"[{a.offset}, {a.end}) and [{b.offset}, {b.end})",
        buffers=(a.names[0], b.names[0]),
        segment=a.segment,
        operations=(last, first),
    )


def check_pads(plan: Plan, owner: Mapping[str, int], paths: Paths) -> None:
    """Check that operations on one segment's signal pad never run at the same time.

    To a pad, buffers that share their offset are one: these may.

    Raises:
        VerificationError: Two of them may (``pad``).
    """
    pads = {b.name for b in plan.problem.buffers if b.signal_pad}
    using: dict[str, dict[int, set[str]]] = {}
    for access in plan.problem.accesses:
        if access.buffer in pads:
            inside = using.setdefault(plan.placements[access.buffer].segment, {})
            inside.setdefault(paths.number[access.operation], set()).add(access.buffer)
    for segment, touched in sorted(using.items()):
        ops = sorted(touched)
        # Totally ordered operations are ordered one after the other; otherwise look at all pairs.
        good = paths.exist(list(pairwise(ops)))
        if all(good):
            continue
        firsts = [i for i in range(len(good)) if len(ops) <= MAX_PAD_PAIRS or not good[i]]
        for i in firsts:
            pairs = [(ops[i], later) for later in ops[i + 1 :]]
            for (_, j), ordered in zip(pairs, paths.exist(pairs), strict=True):
                if ordered:
                    continue
                for a, b in product(sorted(touched[ops[i]]), sorted(touched[j])):
                    if owner[a] != owner[b]:
                        both = paths.operations[ops[i]].name, paths.operations[j].name
                        _pad_clash(segment, (a, b), both)


def _pad_clash(segment: str, buffers: tuple[str, str], operations: tuple[str, str]) -> None:
    fail(
        "pad",
        f"operations {operations[0]!r} and {operations[1]!r} are unordered and use the signal "
        f"pad of segment {segment!r}, through buffers {buffers[0]!r} and {buffers[1]!r}",
        expected="two segments, or an order between the operations",
        got=f"both in segment {segment!r}",
        buffers=buffers,
        operations=operations,
        segment=segment,
    )
