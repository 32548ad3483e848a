"""Try to refute a bound that a search claims, by trying everything. Only for a few users.

A large search cannot be repeated here, so for more users the claim is taken at its word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from symmplan.planner.verify.clocks import Clocks
    from symmplan.planner.verify.users import User

__all__ = ["MAX_USERS", "lower_peak"]

#: With so many users all orders can be tried.
MAX_USERS = 8


def lower_peak(users: list[User], claimed: int, clocks: Clocks) -> int | None:
    """A peak in bytes below the claimed minimum, if there is one.

    In some lowest packing nothing can be moved down, so it arises by placing the users by
    ascending offset, each as low as those before it and the pins allow.

    Args:
        users: The users of one segment, at most `MAX_USERS`.
        claimed: The claimed minimum in bytes.
        clocks: The order of operations.
    """
    clash = {
        (i, j): i != j and _clash(users[i], users[j], clocks)
        for i in range(len(users))
        for j in range(len(users))
    }
    pinned = [i for i, u in enumerate(users) if u.pinned]
    if any(users[i].end >= claimed for i in pinned):
        return None
    best: list[int] = []

    def place(placed: dict[int, tuple[int, int]]) -> None:
        if best:
            return
        if len(placed) == len(users):
            best.append(max(end for _, end in placed.values()))
            return
        for i, user in enumerate(users):
            if i in placed:
                continue
            near = sorted(placed[j] for j in placed if clash[i, j])
            size = user.end - user.offset
            at = 0
            for low, high in near:
                if at + size > low:
                    at = max(at, -(-high // user.align) * user.align)
            if at + size < claimed:
                place({**placed, i: (at, at + size)})

    place({i: (users[i].offset, users[i].end) for i in pinned})
    return best[0] if best else None


def _clash(a: User, b: User, clocks: Clocks) -> bool:
    if a.persistent or b.persistent:
        return True
    pairs = [
        (clocks.number[x.operation], clocks.number[y.operation])
        for x in a.accesses
        for y in b.accesses
    ]
    first = np.asarray([p[0] for p in pairs], dtype=np.int64)
    second = np.asarray([p[1] for p in pairs], dtype=np.int64)
    return not (clocks.ordered(first, second).all() or clocks.ordered(second, first).all())
