"""Placements in which tensors of the user live from run to run.

[Note: moving in]
    A tensor moves when its data is exchanged (``tensor.data = ...``): the object stays, and with it
    gradients, hooks and optimizer state. That is only right where nobody else looks at the old
    storage, so it must use all of a storage that torch allocated, alone. Each pinned input has a
    storage of its own on the placement's bytes (see [Note: leased bytes] in
    `symmplan.runtime.leases`), so that a saved state dict holds no more than the tensor, and so
    that its end is noticed.

[Note: copying in]
    What a run is given need not be what lives in the placement: parameters are replaced
    (``load_state_dict(assign=True)``, ``p.data = ...``). Peers read the placement in any case. So
    the tensor takes the place over if the old one is gone or can move out, and is copied in
    otherwise. If others still look at the old one's storage, its bytes are put back after the
    run: then all peers have read, because the plan says that the outside may write. What the graph
    returns of the copy (activations that are views of a parameter) is returned of the original.

    One compiled graph may serve several modules, whose parameters take turns. If a tensor that
    made room for another comes back, nobody moves in any more, and each is copied in when it is
    used.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from symmplan.errors import RunError
from symmplan.memory.leased import lease_out
from symmplan.runtime.leases import Lease, Ledger, copied
from symmplan.runtime.tenants import settled
from symmplan.torch_private import dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from symmplan.integrate.compile.progress import Progress
    from symmplan.memory.arena import Arena

__all__ = ["Place", "Places", "RunCopy", "check_others"]

#: Uses of a storage that only one tensor has: that tensor's, and the one of who asks.
_OWN_USES = 2


@frozen(eq=False)
class RunCopy:
    """A tensor that was copied into a placement for one run.

    Attributes:
        place: The placement.
        original: The tensor.
        placed: The same in the placement.
        saved: The placement's bytes before, if somebody still looks at them.
        written: Whether the run writes it.
    """

    place: Place
    original: torch.Tensor
    placed: torch.Tensor
    saved: torch.Tensor | None
    written: bool

    def end(self) -> None:
        """After the run: the original has what was written, the placement what it had."""
        with torch.no_grad():
            # The original may be a part of what is put back.
            value = copied(self.placed) if self.written else None
            if self.saved is not None:
                self.place.bytes.copy_(self.saved)
            if value is not None:
                self.original.copy_(value)

    def of_original(self, result: Any) -> Any:
        """A result of the run; where it is a view of the copy, the same view of the original."""
        if not isinstance(result, torch.Tensor):
            return result
        if result.untyped_storage()._cdata != self.placed.untyped_storage()._cdata:
            return result
        offset = result.storage_offset() + self.original.storage_offset()
        return self.original.detach().as_strided(result.size(), result.stride(), offset)


@define(eq=False)
class Place:
    """One placement.

    Attributes:
        number: How many its process group had before; equal on all ranks.
        process_group: The process group.
        bytes: The placement, uint8.
        address: Of its first byte.
    """

    number: int
    process_group: Any
    bytes: torch.Tensor = field(init=False)
    address: int = field(init=False)
    _ledger: Ledger = field(init=False)
    _begin: int = field(init=False)
    _pinned: Any = field(init=False, default=None)
    _former: list[Any] = field(init=False, factory=list)
    _crowded: bool = field(init=False, default=False)

    def lie(self, arena: Arena, name: str) -> None:
        """Be the placement of a buffer of an arena's plan from now on."""
        place = arena.plan.placements[name]
        segment = arena.segments[place.segment]
        self._ledger, self._begin = Ledger(segment.leases), segment.begin + place.offset
        self.bytes = arena.tensor(name)
        self.address = self.bytes.data_ptr()

    @property
    def can_move(self) -> bool:
        """Whether nobody looks at its bytes but the tensor that lives there."""
        pinned = self._living()
        return not self.taken or (pinned is not None and not _is_shared(pinned))

    def move(self, arena: Arena, name: str) -> None:
        """Be the placement of that buffer, together with who lives here."""
        pinned = self._living()
        self.lie(arena, name)
        if pinned is not None:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._house(pinned)

    def _living(self) -> torch.Tensor | None:
        """What lives in its bytes, if that is known."""
        pinned = None if self._pinned is None else self._pinned()
        return pinned if pinned is not None and pinned.data_ptr() == self.address else None

    def _house(self, tensor: torch.Tensor) -> None:
        lease = Lease()
        self._ledger.take(*self._span, lease)
        # To the letter what it was, elsewhere.
        tensor.data = self._filled(tensor, lease_out(self.bytes, lease.drop))
        self._pinned = weakref.ref(tensor)

    @property
    def _span(self) -> tuple[int, int]:
        return self._begin, self._begin + self.bytes.numel()

    @property
    def taken(self) -> bool:
        """Whether anybody uses a storage on its bytes."""
        return bool(self._ledger.holders(*self._span))

    def admit(self, tensor: torch.Tensor, *, written: bool) -> tuple[RunCopy | None, str]:
        """Let a tensor live here from now on, or copy it in for one run. See [Note: moving in].

        Args:
            tensor: As large as the placement.
            written: Whether the run writes it.

        Returns:
            None, or the copy and why the tensor could not move.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            self._crowded = self._crowded or any(former() is tensor for former in self._former)
            stays = _why_it_stays(tensor)
            if self._crowded:
                self.move_out()
                stays = (
                    "several tensors take turns in one compiled graph; compile the module that "
                    "holds it by itself, or all of them as one"
                )
            if self.taken and not stays and not self.move_out():
                stays = (
                    "it was replaced while other tensors still use the old one's storage; drop "
                    "those (state dicts, detached views) before the next run"
                )
            if not stays:
                self._house(tensor)
                return None, ""
            saved = copied(self.bytes) if self.taken else None
            placed = self._filled(tensor, lease_out(self.bytes))
        return RunCopy(self, tensor, placed, saved, written), stays

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor begins in its bytes."""
        return self.address <= tensor.data_ptr() < self.address + self.bytes.numel()

    def _filled(self, like: torch.Tensor, leased: torch.Tensor) -> torch.Tensor:
        if self.has(like):
            like = like.clone()  # a part of what is pinned: it must not be read while it is written
        return leased.view(like.dtype).as_strided(like.size(), like.stride()).copy_(like)

    def move_out(self) -> bool:
        """Move what is pinned to ordinary memory. False if others look at its storage, too."""
        pinned = self._living()
        if pinned is None or _is_shared(pinned):
            return not self.taken
        with torch.inference_mode(mode=False), torch.no_grad():
            pinned.data = torch.empty_strided(
                pinned.size(), pinned.stride(), dtype=pinned.dtype, device=pinned.device
            ).copy_(pinned)
        self._former = [f for f in self._former if f() is not None] + [self._pinned]
        return not self.taken


def _why_it_stays(tensor: torch.Tensor) -> str:
    """Why a tensor cannot move, with what would let it; empty if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_inference():
        return f"it is a {type(tensor).__name__} that cannot move"
    storage = tensor.untyped_storage()
    whole = tensor.storage_offset() == 0 and storage.nbytes() == (
        tensor.numel() * tensor.element_size()
    )
    if not whole or _is_shared(tensor):
        return (
            "other tensors use its storage, too; give it one of its own (p.data = p.data.clone()), "
            "or drop the others"
        )
    if not storage.resizable() or (tensor.is_cpu and storage.is_shared()):
        return (
            "torch does not own its memory, or shares it with other processes; copy it "
            "(p.data = p.data.clone())"
        )
    return ""


def _is_shared(tensor: torch.Tensor) -> bool:
    return dispatch.storage_use_count(tensor.untyped_storage()._cdata) > _OWN_USES


@define(eq=False)
class PinnedPart:
    """Placements that were made together; a tenant of the pool, see `symmplan.memory.pool`.

    Attributes:
        arena: Their memory.
        places: ``{buffer: its placement}``.
        still: How many runs of the backend's graphs there were, None if one goes on.
        progress: How far the ranks are.
    """

    arena: Arena
    places: dict[str, Place]
    _still: Callable[[], int | None]
    _progress: Progress

    def __attrs_post_init__(self) -> None:
        settled(self, self.arena)

    @contextmanager
    def still(self) -> Iterator[int | None]:
        """As of a `symmplan.runtime.tenants.Tenant`."""
        free = all(place.can_move for place in self.places.values())
        yield self._still() if free else None

    def move_in(self, there: Arena) -> None:
        """The same."""
        for name, place in self.places.items():
            place.move(there, name)
        old, self.arena = self.arena, there
        settled(self, there)
        self._progress.add(there)
        self._progress.remove(old)
        old.give_back()


@define(eq=False)
class Places:
    """All such placements of a backend.

    Attributes:
        copies: How often a tensor was not in its placement and was copied there.
        parts: Their memory.
    """

    copies: int = field(init=False, default=0)
    parts: list[PinnedPart] = field(init=False, factory=list)
    _all: list[Place] = field(init=False, factory=list)
    _away: dict[Any, tuple[str, str, str, str]] = field(init=False, factory=dict)
    _used: set[tuple[Any, tuple[int | None, ...]]] = field(init=False, factory=set)

    @property
    def arenas(self) -> list[Arena]:
        """Their memory."""
        return [part.arena for part in self.parts]

    @property
    def count(self) -> int:
        """How many are lived in."""
        return sum(place.taken for place in self._all)

    @property
    def away(self) -> tuple[tuple[str, str, str, str], ...]:
        """What was not in its placement when it was last used; as `CompileBackend.staged`."""
        return tuple(self._away.values())

    def note(self, key: Any, row: tuple[str, str, str, str] | None) -> None:
        """Remember what had to be copied in, or that it is in its placement."""
        if row is None:
            self._away.pop(key, None)
        else:
            self.copies += 1
            self._away[key] = row

    def of(self, process_group: Any) -> list[Place]:
        """Those of one process group."""
        return [p for p in self._all if p.process_group is process_group]

    def add(
        self, process_group: Any, buffers: Sequence[str], arena: Arena, *given: Any
    ) -> list[Place]:
        """The placements of some buffers of a plan, which are new; ``given`` to `PinnedPart`."""
        made = {}
        for number, name in enumerate(buffers, len(self.of(process_group))):
            made[name] = place = Place(number, process_group)
            place.lie(arena, name)
        places = [*made.values()]
        self._all += places
        self.use(process_group, [p.number for p in places])
        self.parts.append(PinnedPart(arena, made, *given))
        return places

    def use(self, process_group: Any, numbers: Sequence[int | None]) -> None:
        """Remember which placements the inputs of a graph have, on all ranks alike."""
        self._used.add((process_group, tuple(numbers)))

    def were_used(self, process_group: Any, numbers: Sequence[int | None]) -> bool:
        """Whether a graph's inputs had these placements, all of them, on all ranks.

        Then a graph that one rank compiles alone may have them, too, and nobody need be asked.
        """
        return None not in numbers and (process_group, tuple(numbers)) in self._used

    def release(self) -> None:
        """Move all pinned inputs out, and give the memory back. Idempotent. Collective: no."""
        for place in self._all:
            place.move_out()
        for part in self.parts:
            part.arena.give_back()


def check_others(copies: Sequence[RunCopy], args: Sequence[Any]) -> None:
    """A run must not be given the tensor that was pinned in a placement beside a copy.

    Raises:
        RunError: It is. The copies have ended.
    """
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    for copy in copies:
        for other in tensors:
            if other is not copy.placed and copy.place.has(other):
                for each in copies:
                    each.end()
                raise RunError(
                    f"an input of shape {tuple(other.shape)} lies where another one must be "
                    "copied to",
                    expected="inputs that were not in each other's placement before",
                    got="the same bytes for two of them",
                    fix="pass a copy of one of the two, or compile without bind=True",
                )
