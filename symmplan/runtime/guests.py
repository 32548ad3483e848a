"""Who uses segments only now and then lives in carve-outs of somebody else's.

[Note: guests]
    Compiled graphs use their segments while one of them runs; FSDP2's buffers come and go between
    the runs. So FSDP2's plan has, besides its buffers, a carve-out for the graphs that ran in the
    step that it was made of, in use while they ran; and where something else dies before a graph
    runs the graphs' bytes cost nothing. The carve-out is to the graphs what their own segments
    were, which are given back.

    Nothing outlives a run in a carve-out. So graphs that leave something for a backward in their
    placements keep segments of their own, and so do those whose segments several groups meet.

    A graph meets its peers before they touch its bytes and has met them again when it is over, by
    what its ops do or by barriers at both ends of the run. So who had the bytes before and who has
    them next need only be ordered on each rank, by the events of the stream that used them last.

    All ranks must decide alike. Whether the plan with the carve-out is the same everywhere is told
    over the groups of both before anything is done about it; if not, there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from attrs import define, field

from symmplan.memory.spares import give_back
from symmplan.runtime.loans import lend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from symmplan.memory.arena import Arena
    from symmplan.memory.segment import Rendezvous, Segment
    from symmplan.model import Placement, SegmentSpec

__all__ = [
    "WATCHERS",
    "CarveOut",
    "Guest",
    "Part",
    "Watcher",
    "let_go",
    "overlapping",
    "parts_of",
    "ran",
]


class Guest(Protocol):
    """Who may move into a carve-out.

    Attributes:
        arena: Where it lives now; its ``user`` says who the guest is.
    """

    arena: Arena | CarveOut

    @property
    def hostable(self) -> bool:
        """Whether nothing of it outlives a run, and one group meets each of its segments."""

    @property
    def align(self) -> int:
        """What its segments must begin at a multiple of, in bytes."""

    def move_in(self, carved: CarveOut) -> None:
        """Live there from now on. Collective: where peers were not seen before."""


class Watcher(Protocol):
    """Who wants to know when a guest runs."""

    def guest_ran(self, guest: Guest) -> None:
        """It begins to."""


#: They end by themselves.
WATCHERS: WeakSet[Watcher] = WeakSet()


def ran(guest: Guest) -> None:
    """Say that a guest begins to run."""
    for watcher in tuple(WATCHERS):
        watcher.guest_ran(guest)


@define(eq=False)
class Part:
    """What a guest has of a segment; to it, a segment.

    Attributes:
        spec: What the guest asked for.
        host: The segment.
        place: Where in it.
        tensor: The bytes, uint8, as a storage of their own.
        rendezvous: The guest's meetings, by name.
    """

    spec: SegmentSpec
    host: Segment
    place: Placement
    tensor: torch.Tensor = field(init=False)
    rendezvous: dict[str, Rendezvous] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tensor = lend(self.host.tensor[self.place.offset : self.place.end])
        mine = {id(self.host.rendezvous[group]) for group in self.spec.groups}
        self.rendezvous = {n: r for n, r in self.host.rendezvous.items() if id(r) in mine}

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.place.nbytes

    def meeting(self, group: str | Any | None = None) -> Rendezvous:
        """As of a segment."""
        return self.host.meeting(self.spec.groups[0] if group is None else group)


@define(eq=False)
class CarveOut:
    """What a guest has of an arena; to it, an arena.

    Attributes:
        host: The arena.
        segments: ``{name: part}``.
        user: Who the guest is, for people.
        occupy: Takes the bytes for a run with these inputs, some of which it may replace; returns
            what gives them back.
    """

    host: Arena
    segments: dict[str, Part]
    user: str
    occupy: Callable[[list[Any]], Callable[[], None]]
    races: None = None
    _over: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.host.guests.append(self.user)

    @property
    def memory(self) -> str:
        """Name of the memory backend."""
        return self.host.memory

    @property
    def released(self) -> bool:
        """Whether the guest has moved out, or the arena is gone."""
        return self._over or self.host.released

    @property
    def segment_bytes(self) -> int:
        """Bytes of the carve-out."""
        return sum(part.nbytes for part in self.segments.values())

    def join(self, more: Mapping[str, Mapping[str, Any]]) -> int:
        """As of an arena. Collective."""
        wanted: dict[str, dict[str, Any]] = {}
        for name, groups in more.items():  # several parts may lie in one segment
            wanted.setdefault(self.segments[name].host.spec.name, {}).update(groups)
        return self.host.join(wanted)

    def release(self) -> None:
        """The guest moves out. Idempotent. The arena goes, too, if it was left for its guests."""
        if self._over:
            return
        self._over = True
        self.host.guests.remove(self.user)
        if self.host.left and not self.host.guests:
            give_back([self.host])


def let_go(home: Arena | CarveOut) -> None:
    """Who lived there needs it no more. Collective: no."""
    if isinstance(home, CarveOut):
        home.release()
    else:
        give_back([home])


def parts_of(guest: Guest, host: Arena, places: Mapping[str, Placement]) -> dict[str, Part]:
    """What a guest has of an arena.

    Args:
        guest: The guest, in its old home.
        host: The arena.
        places: ``{name of the guest's segment: where it lies}``.
    """
    return {
        name: Part(segment.spec, host.segments[places[name].segment], places[name])
        for name, segment in guest.arena.segments.items()
    }


def overlapping(args: Sequence[Any], begin: int, end: int) -> list[int]:
    """Which of some inputs are tensors with a byte of the addresses ``[begin, end)``."""
    import torch

    found = []
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor) and x.numel():
            storage = x.untyped_storage()
            first = storage.data_ptr()
            if first < end and begin < first + storage.nbytes():
                found.append(i)
    return found
