"""Segments that rest between the steps of their program, and who has their bytes meanwhile.

[Note: turns with FSDP2]
    Between its steps FSDP2 has nothing in its segments but parameters that stay unsharded, and
    those can step aside. So a *tenant* may lie there that runs between steps, such as an eager
    session around an optimizer that gathers: it takes no bytes of its own, and FSDP2's plan stays
    as it is. The tenant takes turns with FSDP2, who owns the segments. A turn begins with the
    tenant's first call of an iteration, and ends with the iteration, or before that with FSDP2's
    next collective. Tensors of the tenant that the program still has when a turn ends are in a copy
    from then on, with all views of them.

    All ranks of the tenant meet when each has made room, so that no peer is in FSDP2's bytes when
    the tenant's first call touches a peer's. They meet again when each has ended its calls, so that
    what is copied is complete, and once more when each has copied: FSDP2's next collective may be a
    push, which writes to peers and meets nobody before. On each rank leases order the streams.

    All ranks decide together who lies where: when the tenant is planned, and when other segments
    were made since then. When a turn begins or ends follows from the program, which is the same on
    all ranks. What a rank sees alone, such as tensors that are held, is copied.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field

from symmplan.coordination.all_gather import all_gather_json
from symmplan.device import device_of, kind_of
from symmplan.memory.health import Health
from symmplan.process import PROCESS
from symmplan.runtime.leases import Lease, Ledger, set_aside
from symmplan.runtime.tenants import suballocated

if TYPE_CHECKING:
    import torch

    from symmplan.coordination.groups import Group
    from symmplan.device.base import Device
    from symmplan.memory import Arena
    from symmplan.memory.segment import Segment
    from symmplan.model import Plan


class TurnTaker(Protocol):
    """Who lies in segments of a `SegmentOwner` while that rests."""

    user: str

    @property
    def busy(self) -> bool:
        """Whether it is in the midst of an iteration."""

    def end_turn(self) -> None:
        """Let the owner have the bytes. Collective: yes, over its group, in a turn."""

    def move_out(self) -> None:
        """Lie there no more, as all ranks do. Collective: no."""


class SegmentOwner(Protocol):
    """Who has segments, and uses them only from collective to collective."""

    arena: Arena | None
    turns: TurnTaker | None
    #: The last CUDA graph that was captured of it; 0 if none was.
    capture: int


@define(eq=False)
class Turn:
    """What a tenant has of the owner's bytes until it ends. See [Note: turns with FSDP2].

    Args:
        arena: The tenant's part of the segments.
        group: Name of the group of its ranks.
        device: Where they lie.
    """

    _arena: Arena
    _group: str
    _there: Device = field(converter=device_of)
    _stream: Any = field(init=False, default=None)  # on which it has begun; None on the CPU
    _held: list[tuple[Ledger, list[tuple[int, int, Lease]]]] = field(init=False, factory=list)
    _aside: ExitStack = field(init=False, factory=ExitStack)

    def begin(self) -> None:
        """Have the bytes behind all that the owner did there. Collective: yes."""
        self._stream = self._current()
        for segment in self._segments:
            ledger, at = Ledger(segment.leases), (segment.begin, segment.begin + segment.nbytes)
            _, stay = ledger.give_room(*at)
            if stay:  # a buffer of FSDP2's that torch still refers to
                self._aside.enter_context(set_aside(segment.tensor))
            self._held.append((ledger, ledger.clear(*at)))
        self.meet()

    def meet(self) -> None:
        """Wait until no rank is in the bytes of others. Collective: yes."""
        for segment in self._segments:
            segment.barrier(self._group)

    def follow(self) -> None:
        """Let the current stream, which may be the owner's, wait for the tenant's."""
        if self._stream is not None:
            self._there.current_stream().wait_stream(self._stream)

    def put_back(self) -> None:
        """Let what stayed there when the turn began be there again. Collective: no."""
        self._aside.close()

    def over(self) -> None:
        """Let the owner have them, behind what the current stream has to do. Collective: no."""
        for segment, (ledger, held) in zip(self._segments, self._held, strict=True):
            lease = Lease(stream=self._current())
            ledger.take(segment.begin, segment.begin + segment.nbytes, lease)
            lease.drop()
            for begin, end, other in held:
                ledger.take(begin, end, other)
        self._held.clear()

    def fail(self, error: BaseException) -> None:
        """Nobody may use the segments any more: a peer may be in the midst of a call there."""
        for segment in self._segments:
            assert segment.parent is not None
            segment.parent.health.break_(error)

    def _current(self) -> Any:
        return self._there.current_stream() if self._there.is_accelerator else None

    @property
    def _segments(self) -> list[Segment]:
        return list(self._arena.segments.values())


def segments_made(group: Group) -> int:
    """How often segments were made in which tenants over a group can lie; equal on its ranks."""
    return PROCESS.segments_made.get(group.process_group, 0)


def rests(
    tenant: TurnTaker, plan: Plan, memory: str, group: Group, device: torch.device
) -> dict[int, SegmentOwner]:
    """``{number of the arena: who has it}`` where a tenant's plan could lie. Collective: no."""
    return {
        owner.arena.number: owner
        for owner in PROCESS.resting
        if owner.arena is not None
        and owner.arena.numbered
        and owner.arena.memory == memory
        and owner.arena.races is None
        and not owner.capture
        and owner.turns in (None, tenant)
        and _room(plan, owner.arena, group, device) is not None
    }


def agree_on_owner(
    found: dict[int, SegmentOwner], group: Group, timeout: float
) -> SegmentOwner | None:
    """The owner that all ranks have found, the first if there are several.

    A model that was dropped ends on each rank at a moment of its own.

    Args:
        found: Where this rank could lie, as `rests` says it.
        group: The tenant's ranks.
        timeout: Seconds that they wait for each other.

    Collective: yes, over the group.
    """
    given = {group.name: sorted(found)}, {group.name: group.process_group}
    said = all_gather_json("segments that rest", *given, timeout)[group.name]
    return next((found[n] for n in sorted(found) if all(n in of for of in said)), None)


def part_of(
    owner: SegmentOwner, plan: Plan, group: Group, device: torch.device, user: str
) -> Arena:
    """The part of somebody's segments in which a tenant's plan lies."""
    assert owner.arena is not None
    places = _room(plan, owner.arena, group, device)
    assert places is not None
    at = {name: (segment, 0) for name, segment in places.items()}
    # What fails between turns does not concern the owner.
    return suballocated(plan, user, owner.arena, at, Health())


def _room(plan: Plan, arena: Arena, group: Group, device: torch.device) -> dict[str, str] | None:
    """``{segment of the plan: segment in which it lies}``; None if some does not fit."""
    found: dict[str, str] = {}
    for spec in plan.segments:
        if spec.groups != (group.name,) or spec.signal_pad:
            return None
        there = next(
            (
                name
                for name, segment in arena.segments.items()
                if name not in found.values()
                and spec.nbytes <= segment.nbytes
                and kind_of(segment.tensor.device) is kind_of(device)
                and _alone(segment, group)
            ),
            None,
        )
        if there is None:
            return None
        found[spec.name] = there
    return found or None


def _alone(segment: Segment, group: Group) -> bool:
    """Whether a group reaches a segment, and nobody else does."""
    met = segment.rendezvous.get(group.torch_name)
    others = (r.group.ranks for r in segment.rendezvous.values())
    known = met is not None and met.group.process_group is group.process_group
    return known and all({*ranks} <= {*group.ranks} for ranks in others)
