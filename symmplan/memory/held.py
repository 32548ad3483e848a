"""`symmplan.segments`: the symmetric memory of this process, and its users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Collection

    from symmplan.memory import Arena

__all__ = ["HeldSegment", "bytes_beside", "segments"]


@frozen
class HeldSegment:
    """A segment that this process holds.

    Attributes:
        name: Unique: its name in its plan, a dot, and the number of its arena in this process.
        nbytes: Size in bytes, on this rank.
        memory: Name of the memory backend.
        groups: Names of the groups that have registered it, including the communicators for copy
            engines.
        users: Its users, sorted: ``"compiled graphs"``, their ``"pinned inputs"``,
            ``"eager session"``, ``"recording"``, ``"FSDP2"``, ``"expert parallel"``,
            ``"measurement"``, the ``"epoch counters"`` of compiled graphs on devices, or the name
            passed to `symmplan.memory.realize`. Empty if the segment is in the segment cache.
    """

    name: str
    nbytes: int
    memory: str
    groups: tuple[str, ...]
    users: tuple[str, ...]


def bytes_beside(arenas: Collection[Arena]) -> int:
    """Bytes of segments that others use than who has these arenas. Collective: no."""
    return sum(
        segment.nbytes
        for arena in PROCESS.arenas.values()
        if arena not in arenas and not arena.released and any(arena.tenants)
        for segment in arena.segments.values()
        if segment.host is None
    )


def segments() -> tuple[HeldSegment, ...]:
    """The segments that this process holds, in the order in which they were made.

    Collective: no.
    """
    return tuple(
        HeldSegment(
            name=f"{name}.{number}",
            nbytes=segment.nbytes,
            memory=arena.memory,
            groups=tuple(dict.fromkeys(n for s in (segment, *segment.parts) for n in s.rendezvous)),
            users=tuple(sorted({*filter(None, arena.tenants)})),
        )
        for number, arena in sorted(PROCESS.arenas.items())
        if not arena.released
        for name, segment in arena.segments.items()
        if segment.host is None
    )
