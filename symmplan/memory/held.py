"""`symmplan.segments`: the symmetric memory of this process, and its users."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from symmplan.coordination.own import end_dropped
from symmplan.memory.held_segment import held_of, kept_by_tensors
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Collection

    from symmplan.memory import Arena
    from symmplan.memory.held_segment import HeldSegment

__all__ = ["bytes_beside", "keep", "segments"]

_LOG = logging.getLogger("symmplan")


def bytes_beside(arenas: Collection[Arena]) -> int:
    """Bytes of segments that others use than who has these arenas. Collective: no."""
    return sum(
        segment.nbytes
        for arena in PROCESS.arenas.values()
        if arena not in arenas and not arena.released and any(arena.tenants)
        for segment in arena.segments.values()
        if segment.parent is None
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
        for segment in held_of(
            number, arena.memory, arena.segments.values(), {*filter(None, arena.tenants)}
        )
    ]
    found += kept_by_tensors()
    return tuple(segment for _, segment in sorted(found, key=lambda each: each[0]))


def keep(arena: Arena) -> None:
    """Keep an arena, whose addresses a CUDA graph has, until it is released. Collective: no."""
    if not any(kept is arena for kept in PROCESS.kept):
        PROCESS.kept.append(arena)
        _LOG.info(
            "%s bytes of %s stay until they are released: a CUDA graph has their addresses",
            *(arena.segment_bytes, arena.user or "a plan"),
        )
