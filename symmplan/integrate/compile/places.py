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
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from symmplan.coordination.world import address_of
from symmplan.errors import RunError
from symmplan.memory.leased import lease_out
from symmplan.runtime.leases import Ledger, StorageLease, copied
from symmplan.torch_private.dispatch import storage_use_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.integrate.compile.progress import Progress
    from symmplan.memory.arena import Arena

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
                self.place.lease.tensor.copy_(self.saved)
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
    """One placement, and its permanent lease.

    Attributes:
        number: How many its process group had before; equal on all ranks.
        process_group: The process group.
        lease: Of its bytes, held while anybody uses them.
        address: Of its first byte.
    """

    number: int
    process_group: Any
    lease: StorageLease = field(init=False)
    address: int = field(init=False)
    _pinned: Any = field(init=False, default=None)
    _former: list[Any] = field(init=False, factory=list)
    _crowded: bool = field(init=False, default=False)

    def lie(self, arena: Arena, buffer: str) -> None:
        """Be the placement of a buffer of an arena's plan from now on."""
        place = arena.plan.placements[buffer]
        segment = arena.segments[place.segment]
        self.lease = StorageLease(lease_out(segment.tensor[place.offset : place.end]), name=buffer)
        self.address = address_of(self.lease.tensor)
        begin = segment.begin + place.offset
        Ledger(segment.leases).take(begin, begin + place.nbytes, self.lease)

    @property
    def _is_lived_in_alone(self) -> bool:
        return storage_use_count(self.lease.storage) == self.lease.uses + 1

    def _living(self) -> torch.Tensor | None:
        """What lives in its bytes, if that is known."""
        pinned = None if self._pinned is None else self._pinned()
        return pinned if pinned is not None and address_of(pinned) == self.address else None

    def _house(self, tensor: torch.Tensor) -> None:
        # To the letter what it was, elsewhere.
        tensor.data = self._filled(tensor, self.lease.tensor)
        self._pinned = weakref.ref(tensor)

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
            if self.lease.held and not stays and not self.move_out():
                stays = (
                    "it was replaced while other tensors still use the old one's storage; drop "
                    "those (state dicts, detached views) before the next run"
                )
            if not stays:
                self._house(tensor)
                return None, ""
            saved = copied(self.lease.tensor) if self.lease.held else None
            placed = self._filled(tensor, lease_out(self.lease.tensor))
        return RunCopy(self, tensor, placed, saved, written), stays

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor begins in its bytes."""
        return self.address <= address_of(tensor) < self.address + self.lease.tensor.numel()

    def _filled(self, like: torch.Tensor, leased: torch.Tensor) -> torch.Tensor:
        if self.has(like):
            like = like.clone()  # a part of what is pinned: it must not be read while it is written
        return leased.view(like.dtype).as_strided(like.size(), like.stride()).copy_(like)

    def move_out(self) -> bool:
        """Move what is pinned to ordinary memory. False if others look at its storage, too."""
        pinned = self._living()
        if pinned is None or not self._is_lived_in_alone:
            return not self.lease.held
        with torch.inference_mode(mode=False), torch.no_grad():
            pinned.data = torch.empty_strided(
                pinned.size(), pinned.stride(), dtype=pinned.dtype, device=pinned.device
            ).copy_(pinned)
        self._former = [f for f in self._former if f() is not None] + [self._pinned]
        return not self.lease.held


def _why_it_stays(tensor: torch.Tensor) -> str:
    """Why a tensor cannot move, with what would let it; empty if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_inference():
        return f"it is a {type(tensor).__name__} that cannot move"
    storage = tensor.untyped_storage()
    whole = tensor.storage_offset() == 0 and storage.nbytes() == (
        tensor.numel() * tensor.element_size()
    )
    if not whole or storage_use_count(storage._cdata) > _OWN_USES:
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


@define(eq=False)
class PinnedPart:
    """Placements that were made together.

    Attributes:
        arena: Their memory.
        places: ``{buffer: its placement}``.
        progress: How far the ranks are.
    """

    arena: Arena
    places: dict[str, Place]
    _progress: Progress

    def release(self) -> None:
        """Move all pinned inputs out, and give the memory back. Idempotent. Collective: no."""
        for place in self.places.values():
            place.move_out()
        self._progress.remove(self.arena)
        self.arena.give_back()


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
                    f"an input of shape {tuple(other.shape)} is in the placement of another "
                    "input, which must be copied there",
                    expected="inputs that are not in each other's placements",
                    got="the same bytes for two of them",
                    fix="pass a copy of one of the two, or compile without bind=True",
                )
