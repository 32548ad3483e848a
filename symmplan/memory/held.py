"""`symmplan.segments`: what this process holds of symmetric memory, and for whom."""

from __future__ import annotations

from attrs import frozen

from symmplan.process import PROCESS

__all__ = ["HeldSegment", "segments"]


@frozen
class HeldSegment:
    """A segment that this process holds.

    Attributes:
        name: Its name in its plan, and behind a dot which of this process's arenas it is in: no
            two are the same.
        nbytes: Size in bytes, on this rank.
        memory: Name of the memory backend.
        groups: Names of the groups that it met, copy engines' communicators included.
        users: Who plans in it, sorted: ``"compiled graphs"``, ``"pinned inputs"`` of those,
            ``"eager session"``, ``"recording"``, ``"FSDP2"``, ``"expert parallel"``,
            ``"measurement"``, or what `symmplan.memory.realize` was told. Empty if it is kept for
            the next one that fits.
    """

    name: str
    nbytes: int
    memory: str
    groups: tuple[str, ...]
    users: tuple[str, ...]


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
