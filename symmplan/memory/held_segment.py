"""What is known of a segment of this process: its arena, its users, and whether tensors keep it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from attrs import frozen

from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Collection

    from symmplan.memory.segment import Segment

__all__ = ["PINNED", "HeldSegment", "held_of", "kept_by_tensors", "note_released"]

#: The user of segments that do not sleep.
PINNED = "pinned inputs"


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


def held_of(
    number: int, memory: str, segments: Collection[Segment], users: Collection[str]
) -> list[HeldSegment]:
    """The allocations among the segments of an arena.

    Args:
        number: The arena's number in this process.
        memory: Name of its memory backend.
        segments: Its segments; parts of others and released ones are left out.
        users: What uses it, for people.
    """
    return [
        HeldSegment(
            name=f"{segment.spec.name}.{number}",
            nbytes=segment.nbytes,
            memory=memory,
            groups=tuple(segment.rendezvous),
            users=tuple(sorted(users)),
        )
        for segment in segments
        if segment.parent is None and not segment.released
    ]


def note_released(number: int, memory: str, segments: Collection[Segment]) -> None:
    """Note segments of an arena that are about to be released: tensors may keep their bytes.

    Collective: no.
    """
    for segment in segments:
        if segment.parent is None and not segment.released and segment.address:
            storage = weakref.ref(segment.tensor.untyped_storage())
            (held,) = held_of(number, memory, [segment], ["tensors"])
            PROCESS.left.append((storage, number, held))
    kept_by_tensors()


def kept_by_tensors() -> list[tuple[int, HeldSegment]]:
    """The released segments whose bytes tensors keep, with the numbers of their arenas."""
    PROCESS.left = [each for each in PROCESS.left if each[0]() is not None]
    return [(number, held) for _, number, held in PROCESS.left]
