"""Who uses the bytes: buffers that share their offset count as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from symmplan.model import Access, Plan

__all__ = ["User", "users_of"]


@frozen
class User:
    """A buffer, or several that must share their offset; live from the first to the last access.

    Attributes:
        names: The buffers, sorted.
        group: Their process group.
        segment: Where they lie.
        offset: First byte.
        end: First byte after the largest.
        align: Strictest alignment among them, in bytes.
        persistent: Whether one of them is bound for the whole program.
        pinned: Whether one of them has a fixed offset.
        accesses: Who touches them, and how.
    """

    names: tuple[str, ...]
    group: str
    segment: str
    offset: int
    end: int
    align: int
    persistent: bool
    pinned: bool
    accesses: tuple[Access, ...] = field(repr=False)


def users_of(plan: Plan) -> list[User]:
    """The users of a plan whose structure was checked, in the order of the problem's buffers.

    Args:
        plan: Whose placements are used.
    """
    links: dict[str, list[str]] = {}
    for a, b in plan.problem.together:
        links.setdefault(a, []).append(b)
        links.setdefault(b, []).append(a)
    touched: dict[str, list[Access]] = {}
    for access in plan.problem.accesses:
        touched.setdefault(access.buffer, []).append(access)
    buffers = {b.name: b for b in plan.problem.buffers}
    seen: set[str] = set()
    users: list[User] = []
    for name in buffers:
        if name in seen:
            continue
        names = sorted(_linked(name, links))
        seen.update(names)
        place = plan.placements[name]
        merged = [buffers[n] for n in names]
        users.append(
            User(
                names=tuple(names),
                group=merged[0].group,
                segment=place.segment,
                offset=place.offset,
                end=max(plan.placements[n].end for n in names),
                align=max(b.align for b in merged),
                persistent=any(b.persistent for b in merged),
                pinned=any(b.offset is not None for b in merged),
                accesses=tuple(a for n in names for a in touched[n]),
            )
        )
    return users


def _linked(name: str, links: dict[str, list[str]]) -> set[str]:
    found = {name}
    todo = [name]
    while todo:
        for other in links.get(todo.pop(), ()):
            if other not in found:
                found.add(other)
                todo.append(other)
    return found
