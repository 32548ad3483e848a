"""`symmplan.segments`: the symmetric memory of this process, and its users."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from attrs import frozen

from symmplan.coordination.own import end_dropped
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Collection

    from symmplan.memory import Arena
    from symmplan.memory.segment import Segment

__all__ = ["HeldSegment", "bytes_beside", "keep", "note_released", "segments"]

_LOG = logging.getLogger("symmplan")


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
            passed to `symmplan.memory.realize`. ``"tensors"`` if the segment was released and
            tensors in it keep its bytes. Empty if the segment is in the segment cache.
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

    Those of objects that were dropped are not among them, unless tensors still lie in them.

    Collective: no.
    """
    end_dropped()
    found = [
        (number, segment)
        for number, arena in PROCESS.arenas.items()
        if not arena.released
        for segment in _of(arena, {*filter(None, arena.tenants)})
    ]
    _forget()
    found += [(number, segment) for _, number, segment in PROCESS.left]
    return tuple(segment for _, segment in sorted(found, key=lambda each: each[0]))


def note_released(arena: Arena) -> None:
    """Note an arena that is about to be released: tensors may keep its bytes. Collective: no."""
    for segment, held in zip(_own(arena), _of(arena, {"tensors"}), strict=True):
        if segment.address:
            storage = segment.tensor.untyped_storage()
            PROCESS.left.append((weakref.ref(storage), arena.number, held))
    _forget()


def keep(arena: Arena) -> None:
    """Keep an arena, whose addresses a CUDA graph has, until it is released. Collective: no."""
    if not any(kept is arena for kept in PROCESS.kept):
        PROCESS.kept.append(arena)
        _LOG.info(
            "%s bytes of %s stay until they are released: a CUDA graph has their addresses",
            *(arena.segment_bytes, arena.user or "a plan"),
        )


def _forget() -> None:
    """Forget what no tensor keeps any more."""
    PROCESS.left = [each for each in PROCESS.left if each[0]() is not None]


def _own(arena: Arena) -> list[Segment]:
    return [s for s in arena.segments.values() if s.host is None and not s.released]


def _of(arena: Arena, users: Collection[str]) -> list[HeldSegment]:
    return [
        HeldSegment(
            name=f"{segment.spec.name}.{arena.number}",
            nbytes=segment.nbytes,
            memory=arena.memory,
            groups=tuple(dict.fromkeys(n for s in (segment, *segment.parts) for n in s.rendezvous)),
            users=tuple(sorted(users)),
        )
        for segment in _own(arena)
    ]
