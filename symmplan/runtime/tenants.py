"""Who lies in whose segments: tenants of one plan.

[Note: tenants]
    Compiled graphs use their bytes only while they run, and FSDP2's buffers come and go between the
    runs. So FSDP2's plan has one more buffer for each tenant that ran in the recorded step, live
    while the tenant ran. If another buffer is dead at that time, the tenant costs nothing. From
    then on the tenant uses this suballocation, and releases its own segment.

    Graphs that save tensors for backward use their bytes between runs. They keep segments of their
    own. Eager sessions' tensors are used between calls: see [Note: turns with FSDP2] in
    `symmplan.runtime.resting`.

    A graph whose segments several groups have registered keeps separate segments.

    Where a CUDA graph has addresses of a suballocation, FSDP2 is not planned again: replays would
    touch what others have there then.

    A graph meets its peers before they touch its bytes, and again at its end, through its ops or
    through barriers at both ends of the run. So earlier and later users of the bytes need an order
    on each rank only, which leases provide.

    All ranks must decide alike. Before anything changes, they compare the plan with tenants over
    all groups. If the plans differ, there are no tenants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from symmplan.memory.arena import Arena
from symmplan.memory.leased import lease_out
from symmplan.memory.segment import Segment
from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from symmplan.memory.health import Health
    from symmplan.model import Placement, Plan


class Tenant(Protocol):
    """Who may lie in segments of somebody else."""

    @property
    def arena(self) -> Arena:
        """Where it lies now; its ``user`` says who the tenant is."""

    @property
    def movable(self) -> bool:
        """Whether it may, which one group for each of its segments is needed for."""

    @property
    def captured(self) -> Sequence[Arena]:
        """Where it lies, or lay, if CUDA graphs have addresses of that."""

    @property
    def align(self) -> int:
        """What its segments must begin at a multiple of, in bytes."""

    def move_in(self, there: Arena) -> None:
        """Lie there from now on. Collective: where peers were not seen before."""


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


def timed(tenant: Tenant, parent: Arena, places: Mapping[str, Placement]) -> Arena:
    """What a tenant, which still lies elsewhere, gets of an arena while it runs.

    Args:
        tenant: The tenant.
        parent: The arena.
        places: ``{name of the tenant's segment: where it lies}``.
    """
    old, at = tenant.arena, {n: (place.segment, place.offset) for n, place in places.items()}
    return suballocated(old.plan, old.user, parent, at)


def suballocated(
    plan: Plan,
    user: str,
    parent: Arena,
    places: Mapping[str, tuple[str, int]],
    health: Health | None = None,
) -> Arena:
    """A part of an arena for a plan, which others have meanwhile.

    Args:
        plan: The plan.
        user: Who has it, for people.
        parent: The arena.
        places: ``{segment of the plan: (segment of the arena, where it begins there in bytes)}``.
        health: Of the part; that of the arena if it is None.
    """
    segments = {}
    for spec in plan.segments:
        name, begin = places[spec.name]
        whole = parent.segments[name]
        segments[spec.name] = Segment(
            spec,
            whole.backend,
            lease_out(whole.tensor[begin : begin + spec.nbytes]),
            None,
            timeout=parent.timeout,
            health=health or whole.health,
            parent=whole,
            begin=begin,
        )
    return Arena(plan, parent.memory, segments, timeout=parent.timeout, user=user, parent=parent)


def synchronizes_once(placed: Arena) -> bool:
    """Whether one group meets each segment, as those of a tenant must be."""
    segments = placed.segments.values()
    alone = all(len(s.spec.groups) == 1 and not s.spec.signal_pad for s in segments)
    return alone and bool(segments) and placed.races is None
