"""Who lies in whose segments: tenants of one plan.

[Note: tenants]
    Compiled graphs use their segments while one of them runs, FSDP2's buffers come and go between
    the runs. So FSDP2's plan has, besides its buffers, one for each tenant that ran in the step
    that it was made of, in use while it ran; where something else dies before that, it costs
    nothing. The tenant has that suballocation from then on, and gives its own segments back.

    An eager session's tensors are the program's, also between its calls. So a session has bytes
    that nobody shares, of the same segment. It moves at the end of an iteration in which no rank
    holds any of its tensors: that, the ranks ask each other.

    A graph that leaves something in its bytes between its runs keeps segments of its own, and so
    does one whose segments several groups meet.

    A graph meets its peers before they touch its bytes and has met them again when it is over, by
    what its ops do or by barriers at both ends of the run. So who had the bytes before and who has
    them next need only be ordered on each rank, which the leases do.

    All ranks must decide alike. Whether the plan with the tenants is the same everywhere is told
    over the groups of all of them before anything is done about it; if not, there are none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field

from symmplan.memory.cache import give_back
from symmplan.process import PROCESS
from symmplan.runtime.leases import lease_out

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from symmplan.memory.arena import Arena
    from symmplan.memory.segment import Health, Rendezvous, Segment
    from symmplan.model import Placement, SegmentSpec

__all__ = [
    "SubSegment",
    "Suballocation",
    "Tenant",
    "let_go",
    "ran",
    "synchronizes_once",
]


class Tenant(Protocol):
    """Who may lie in segments of somebody else.

    Attributes:
        lasts: Whether it has its bytes also between its runs.
    """

    lasts: bool

    @property
    def arena(self) -> Arena | Suballocation:
        """Where it lies now; its ``user`` says who the tenant is."""

    @property
    def movable(self) -> bool:
        """Whether it may, which one group for each of its segments is needed for."""

    @property
    def align(self) -> int:
        """What its segments must begin at a multiple of, in bytes."""

    def move_in(self, there: Suballocation) -> None:
        """Lie there from now on, or from the next moment on at which that can be.

        Collective: where peers were not seen before.
        """


def ran(tenant: Tenant) -> None:
    """Say that a tenant begins to run."""
    if PROCESS.watchers:
        for watcher in tuple(PROCESS.watchers):
            watcher.tenant_ran(tenant)


@define(eq=False)
class SubSegment:
    """What a tenant has of a segment; to it, a segment.

    Attributes:
        spec: What the tenant asked for.
        host: The segment.
        place: Where in it.
        tensor: The bytes, uint8, as a storage of their own.
        rendezvous: The tenant's meetings, by name.
    """

    spec: SegmentSpec
    host: Segment
    place: Placement
    tensor: torch.Tensor = field(init=False)
    rendezvous: dict[str, Rendezvous] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tensor = lease_out(self.host.tensor[self.begin : self.place.end])
        mine = {id(self.host.rendezvous[group]) for group in self.spec.groups}
        self.rendezvous = {n: r for n, r in self.host.rendezvous.items() if id(r) in mine}

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.place.nbytes

    @property
    def begin(self) -> int:
        """Where it begins in the segment, in bytes."""
        return self.place.offset

    @property
    def leases(self) -> list[Any]:
        """As of a segment."""
        return self.host.leases

    @property
    def health(self) -> Health:
        """As of a segment: what breaks it, breaks it for all who lie there."""
        return self.host.health

    def meeting(self, group: str | Any | None = None) -> Rendezvous:
        """As of a segment."""
        return self.host.meeting(self.spec.groups[0] if group is None else group)

    def barrier(self, group: str | Any | None = None) -> None:
        """As of a segment. Collective: yes."""
        self.meeting(group).barrier()


@define(eq=False)
class Suballocation:
    """What a tenant has of an arena; to it, an arena.

    Attributes:
        host: The arena.
        segments: ``{name: what it has of a segment}``.
        user: Who the tenant is, for people.
    """

    host: Arena
    segments: dict[str, SubSegment]
    user: str
    races: None = None
    _over: bool = field(init=False, default=False)

    @classmethod
    def of(cls, tenant: Tenant, host: Arena, places: Mapping[str, Placement]) -> Suballocation:
        """What a tenant, which still lies elsewhere, gets of an arena.

        Args:
            tenant: The tenant.
            host: The arena.
            places: ``{name of the tenant's segment: where it lies}``.
        """
        segments = {
            name: SubSegment(segment.spec, host.segments[places[name].segment], places[name])
            for name, segment in tenant.arena.segments.items()
        }
        return cls(host, segments, tenant.arena.user)

    def __attrs_post_init__(self) -> None:
        self.host.tenants.append(self.user)

    @property
    def memory(self) -> str:
        """Name of the memory backend."""
        return self.host.memory

    @property
    def released(self) -> bool:
        """Whether the tenant has moved out, or the arena is gone."""
        return self._over or self.host.released

    @property
    def segment_bytes(self) -> int:
        """Bytes of the suballocation."""
        return sum(segment.nbytes for segment in self.segments.values())

    def join(self, more: Mapping[str, Mapping[str, Any]]) -> int:
        """As of an arena. Collective."""
        wanted: dict[str, dict[str, Any]] = {}
        for name, groups in more.items():  # several may lie in one segment
            wanted.setdefault(self.segments[name].host.spec.name, {}).update(groups)
        return self.host.join(wanted)

    def release(self) -> None:
        """The tenant moves out. Idempotent."""
        if self._over:
            return
        self._over = True
        give_back(self.host, self.user)


def synchronizes_once(placed: Arena | Suballocation) -> bool:
    """Whether one group meets each segment, as those of a tenant must be."""
    segments = placed.segments.values()
    alone = all(len(s.spec.groups) == 1 and not s.spec.signal_pad for s in segments)
    return alone and bool(segments) and placed.races is None


def let_go(placed: Arena | Suballocation) -> None:
    """Who lay there needs it no more. Collective: no."""
    if isinstance(placed, Suballocation):
        placed.release()
    else:
        give_back(placed)
