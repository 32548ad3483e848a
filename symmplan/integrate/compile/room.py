"""What all ranks agree on before a compile backend plans a graph: options, and bytes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from symmplan.memory.groups import resolve_groups
from symmplan.memory.room import agreed_room
from symmplan.memory.simulated import current
from symmplan.memory.spares import spare_bytes
from symmplan.place.attempt import attempt
from symmplan.place.prepare import agree_on_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from symmplan.integrate.compile.backend import CompileOptions
    from symmplan.integrate.compile.pool import Pool
    from symmplan.place.attempt import Refusal

__all__ = ["memory_of", "room_of"]


def memory_of(
    pool: Pool, settings: CompileOptions, device: torch.device, groups: Mapping[str, Any]
) -> tuple[str, Refusal | None]:
    """The memory backend of a graph, where all ranks were given the same options.

    Args:
        pool: Whose graph it is.
        settings: What this rank was given.
        device: Where the graph's tensors lie.
        groups: ``{name: process group}`` of the graph, None for one of this process alone.

    Returns:
        Its name, and None; or any name, and why graphs run in torch's own way.

    Raises:
        AgreementError: Options differ, or a peer runs an old graph meanwhile.
        BackendError: The backend that was asked for by name serves no rank.

    Collective: yes, over the groups that are new to the pool.
    """
    new = {n: g for n, g in groups.items() if g is not None and g not in pool.agreed}
    memory, refusal = agree_on_options(
        settings,
        device,
        groups,
        among=new,
        refusal=pool.refusal,
        watch=pool.progress.planning if new else None,
        inner=settings.inner,
        bind=settings.bind,
    )
    pool.agreed.update(new.values())
    if refusal is not None:
        pool.refuse(refusal)
    return memory, pool.refusal


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
