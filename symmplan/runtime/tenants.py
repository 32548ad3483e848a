"""Who lies in whose segments: tenants of one plan.

[Note: tenants]
    Compiled graphs use their segments while one of them runs, FSDP2's buffers come and go between
    the runs. So FSDP2's plan has, besides its buffers, one for each tenant that ran in the step
    that it was made of, in use while it ran; where something else dies before that, it costs
    nothing. The tenant has that suballocation from then on, and gives its own part of the pool's
    segment back (see [Note: one pool] in `symmplan.memory.pool`).

    An eager session's tensors are the program's, also between its calls, and graphs that save for
    a backward leave something in their bytes between their runs. Those have bytes that nobody
    shares, of the same segment, with meetings and a health of their own. So they do where FSDP2's
    ranks are theirs; others stay in the pool. A session moves at the end of an iteration in which
    no rank holds any of its tensors: that, the ranks ask each other.

    A graph whose segments several groups meet keeps segments of its own.

    A graph meets its peers before they touch its bytes and has met them again when it is over, by
    what its ops do or by barriers at both ends of the run. So who had the bytes before and who has
    them next need only be ordered on each rank, which the leases do.

    All ranks must decide alike. Whether the plan with the tenants is the same everywhere is told
    over the groups of all of them before anything is done about it; if not, there are none.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from symmplan.memory.arena import Arena
from symmplan.memory.leased import lease_out
from symmplan.memory.segment import Segment
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from symmplan.model import Placement


class Tenant(Protocol):
    """Who may lie in segments of somebody else."""

    @property
    def lasts(self) -> bool:
        """Whether it has its bytes also between its runs."""

    @property
    def arena(self) -> Arena:
        """Where it lies now; its ``user`` says who the tenant is."""

    @property
    def movable(self) -> bool:
        """Whether it may, which one group for each of its segments is needed for."""

    @property
    def align(self) -> int:
        """What its segments must begin at a multiple of, in bytes."""

    def still(self) -> AbstractContextManager[int | None]:
        """A context in which it does not run, if it does not now and may move: then how far it is.

        That is equal on ranks that are at the same place of the program. Else None.
        """

    def move_in(self, there: Arena) -> None:
        """Lie there from now on, or from the next moment on at which that can be.

        Collective: where peers were not seen before.
        """


def ran(tenant: Tenant) -> None:
    """Say that a tenant begins to run."""
    if PROCESS.watchers:
        for watcher in tuple(PROCESS.watchers):
            watcher.tenant_ran(tenant)


def forget(tenants: list[Tenant | None]) -> None:
    """Hold on to none whose memory is gone; the others keep their numbers."""
    for i, tenant in enumerate(tenants):
        if tenant is not None and tenant.arena.released:
            tenants[i] = None


def settled(tenant: Any, arena: Arena) -> None:
    """Say that a tenant lies in an arena: the pool may ask it to move.

    Of a `Tenant` the pool needs no more than ``arena``, ``still`` and ``move_in``.
    """
    if not arena.timed and len(arena.segments) == 1:
        for segment in arena.segments.values():
            segment.tenant = weakref.ref(tenant)


def timed(tenant: Tenant, host: Arena, places: Mapping[str, Placement]) -> Arena:
    """What a tenant, which still lies elsewhere, gets of an arena while it runs.

    Args:
        tenant: The tenant.
        host: The arena.
        places: ``{name of the tenant's segment: where it lies}``.
    """
    segments = {}
    for name, segment in tenant.arena.segments.items():
        place = places[name]
        whole = host.segments[place.segment]
        segments[name] = Segment(
            segment.spec,
            host.memory,
            lease_out(whole.tensor[place.offset : place.offset + segment.nbytes]),
            None,
            timeout=host.timeout,
            health=whole.health,
            host=whole,
            begin=place.offset,
            timed=True,
        )
    old = tenant.arena
    return Arena(
        old.plan,
        host.memory,
        segments,
        timeout=host.timeout,
        frees=True,
        user=old.user,
        hosts=(host,),
    )


def synchronizes_once(placed: Arena) -> bool:
    """Whether one group meets each segment, as those of a tenant must be."""
    segments = placed.segments.values()
    alone = all(len(s.spec.groups) == 1 and not s.spec.signal_pad for s in segments)
    return alone and bool(segments) and placed.races is None
