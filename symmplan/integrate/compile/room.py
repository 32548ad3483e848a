"""How many bytes the plans of a compile backend may take."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from symmplan.memory.groups import resolve_groups
from symmplan.memory.room import agreed_room
from symmplan.memory.simulated import current
from symmplan.memory.spares import spare_bytes
from symmplan.place.attempt import attempt

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from symmplan.integrate.compile.pool import Pool

__all__ = ["room_of"]


def room_of(
    pool: Pool, given: int | None, names: Iterable[str], memory: str, device: torch.device
) -> int | None:
    """Bytes that all plans of a pool may take: the least that a rank was given, or has free.

    Args:
        pool: Whose plans they are.
        given: Bytes; None for what is free.
        names: Of the groups of a new plan.
        memory: Name of the memory backend.
        device: Where the segments lie.

    Returns:
        None if a rank cannot tell; the pool says why.

    Collective: yes, over the groups of these names, the first time for them.
    """
    found = {n: g.process_group for n, g in resolve_groups(names).items()}
    groups = {n: g for n, g in found.items() if g is not None}
    key = tuple(groups.values())
    if key not in pool.rooms:
        waits = groups if current() is None else {}
        if waits:
            pool.progress.gather(waits)
        ask = functools.partial(
            agreed_room,
            given,
            spare_bytes(device),
            groups,
            memory=memory,
            device=device,
            timeout=pool.timeout,
            besides=sum(a.segment_bytes for a in (*pool.arenas, *pool.places.arenas)),
        )
        room, refusal = attempt(ask, waits, pool.timeout, undo=lambda _: None)
        if refusal is not None:
            pool.refuse(refusal)
        if room is None:
            return None
        pool.rooms[key] = room
    return pool.rooms[key]
