"""Activations that cross from a forward into its backward, in their placements.

[Note: crossing tensors]
    A forward that saves a tensor which lies in a placement returns the placement itself, and the
    backward reads it there. The plan keeps the bytes for it until the backward's last reader, as
    long as a backward follows its forward. A program may do otherwise: run the forward twice, keep
    the graph of a backward, run another graph in between. So whoever is about to write bytes that
    somebody still holds *evacuates* them first: the tensors that the forward returned are given
    copies, in place (autograd keeps the very tensors that it was given, and sees no new version).

    That is decided by each rank alone, because it changes no offset and no order between ranks. A
    peer overwrites our bytes only behind a meeting of all ranks in the graph that it runs, which
    this rank enters after it has evacuated: an op that handshakes is one, and for others there is a
    barrier at the entry of each graph (see `Shared.enter`).

    A backward takes what was saved as an input. Whether that lies in its placement makes no
    difference to ordinary readers; for an op that needs it there, it is copied back on entry, and
    for a CUDA graph, which would be recorded again for every new address.

[Note: who still holds them]
    Each crossing buffer is handed out as a storage of its own, and somebody holds it while that
    storage has more references than it began with. Hooks on saved tensors (checkpointing,
    offloading) take other tensors on the same storage, which nobody could move: where such hooks
    are active, copies are handed out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from torch.utils.weak import TensorWeakRef

from symmplan._compat import storage_use_count
from symmplan._compat_autograd import has_saved_tensor_hooks, keeps_graph
from symmplan.errors import RunError
from symmplan.memory.lend import lend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from symmplan.integrate.compile.pool import Shared
    from symmplan.integrate.compile.records import Rewritten
    from symmplan.model import Placement

__all__ = ["REASONS", "Given", "Lane", "Zone", "hand_over", "overlap", "reasons", "take_over"]

#: Why a crossing tensor was copied, and what avoids it.
REASONS = {
    "again": "its forward ran again before its backward; run each backward before the next "
    "forward, or compile the whole model instead of a part that runs several times",
    "other": "another graph was about to write its bytes; compile the graphs that run between a "
    "forward and its backward in that order the first time, or give them a symmplan.backend() "
    "of their own",
    "kept": "a backward kept its graph (retain_graph=True)",
    "hooks": "hooks on saved tensors (checkpointing, offloading) were active; checkpoint inside "
    "of what is compiled",
    "back": "it had been copied out, and an op of the backward (or a CUDA graph) needs it in its "
    "placement",
    "released": "the backend was released before its backward",
}


@frozen
class Given:
    """An input of a backward that its forward left in a placement.

    Attributes:
        index: Which input.
        place: Where its buffer lies.
        offset: Where it begins in its buffer, in elements.
        needed: An op of the backward, or its CUDA graph, needs it there.
        overwritten: The backward overwrites the bytes.
    """

    index: int
    place: Placement
    offset: int
    needed: bool
    overwritten: bool


@define(eq=False)
class Zone:
    """Where what a forward saved lies until its backward, for graphs that are planned meanwhile.

    Attributes:
        structure: The segments' structure that the placements refer to.
        places: ``(placement, group)`` of every crossing buffer.
        ahead: Whether the forward has run and the backward has not, since.
    """

    structure: Any
    places: tuple[tuple[Placement, str], ...]
    ahead: bool = False


def overlap(a: Placement, b: Placement) -> bool:
    """Whether two placements have a byte in common."""
    return a.segment == b.segment and a.offset < b.end and b.offset < a.end


@define(eq=False)
class Lane:
    """The bytes of a crossing buffer, as a storage of their own.

    Attributes:
        place: Where they lie.
        tensor: The bytes, uint8.
        owner: The graph whose forward handed them out last.
    """

    place: Placement
    tensor: torch.Tensor
    owner: Any = field(init=False, default=None)
    _storage: Any = field(init=False)
    _idle: int = field(init=False)
    _out: list[TensorWeakRef] = field(init=False, factory=list)

    @classmethod
    def of(cls, place: Placement, segment: torch.Tensor) -> Lane:
        """The lane of a placement in a segment's bytes."""
        return cls(place, lend(segment[place.offset : place.end], _nothing))

    def __attrs_post_init__(self) -> None:
        self._storage = self.tensor.untyped_storage()
        self._idle = storage_use_count(self._storage._cdata)

    @property
    def held(self) -> bool:
        """Whether somebody still holds what was handed out."""
        return storage_use_count(self._storage._cdata) > self._idle

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies here."""
        begin = self.tensor.data_ptr()
        return begin <= tensor.data_ptr() < begin + self.place.nbytes

    def hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that lies here, as one that can be moved."""
        offset = (tensor.data_ptr() - self.tensor.data_ptr()) // tensor.element_size()
        out = self._like(tensor, self._storage, offset)
        self._out.append(TensorWeakRef(out))
        return out

    def begin(self, owner: Any) -> None:
        """Nothing is handed out; a forward of ``owner`` is about to."""
        self._out.clear()
        self.owner = owner

    def evacuate(self) -> None:
        """Give everything that was handed out a copy.

        Raises:
            RunError: Somebody holds another tensor on the same bytes.
        """
        self.move(self.tensor.clone())
        if self.held:
            raise RunError(
                f"bytes [{self.place.offset}, {self.place.end}) of {self.place.segment!r} are "
                "about to be overwritten, and a view of a tensor saved for backward refers to them",
                expected="that autograd alone holds what a compiled forward saved",
                got="another tensor on the same storage",
                fix="clone what you keep of saved tensors",
            )

    def move(self, to: torch.Tensor) -> None:
        """Let everything that was handed out lie elsewhere.

        Args:
            to: As many bytes, uint8, at the beginning of their storage. They hold the same.
        """
        for reference in self._out:
            tensor = reference()
            if tensor is not None and self.has(tensor):
                tensor.data = self._like(tensor, to.untyped_storage(), tensor.storage_offset())
        self._out = [reference for reference in self._out if reference() is not None]

    def move_to(self, lane: Lane) -> None:
        """Let everything that was handed out lie in another lane, which takes it over."""
        if self.held:
            lane.tensor.copy_(self.tensor)
            self.move(lane.tensor)
            lane.owner, lane._out, self._out = self.owner, self._out, []

    def copy(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of tensors that lie here, alike in their storage."""
        storage = self.tensor.clone().untyped_storage()
        begin = self.tensor.data_ptr()
        return [self._like(t, storage, (t.data_ptr() - begin) // t.element_size()) for t in tensors]

    def fill(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Copy a tensor back that was moved away.

        Args:
            tensor: The tensor; hooks on saved tensors may have made it anew.
            offset: Where it begins here, in elements.

        Returns:
            A tensor like it, here.
        """
        here = self._like(tensor, self._storage, offset)
        moved = tensor.untyped_storage()
        if tensor.storage_offset() == offset and moved.nbytes() == self.place.nbytes:
            self.tensor.copy_(tensor.new_empty(0, dtype=torch.uint8).set_(moved))
        else:
            here.copy_(tensor)
        return here

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that lies here, but is not moved with what was handed out."""
        return self._like(tensor, self._storage, tensor.storage_offset())

    @staticmethod
    def _like(tensor: torch.Tensor, storage: Any, offset: Any) -> torch.Tensor:
        return tensor.new_empty(0).set_(storage, offset, tensor.size(), tensor.stride())


def _nothing() -> None:
    """The segment outlives what is handed out."""


def take_over(shared: Shared, rewritten: Rewritten, args: list[Any]) -> None:
    """Before a part runs: what others saved makes room, what it needs in place is there.

    Args:
        shared: The segments.
        rewritten: The part.
        args: Its inputs; replaced where they have to lie elsewhere.
    """
    for place in rewritten.saved.values():
        shared.lane(place)
    here = {g.place for g in rewritten.given if shared.lane(g.place).has(args[g.index])}
    shared.evacuate(rewritten, here)
    if not rewritten.given:
        return
    if here and keeps_graph():
        _keep(shared, rewritten, args)
    for given in rewritten.given:
        lane, tensor = shared.lane(given.place), args[given.index]
        if lane.has(tensor):
            continue
        if given.needed:
            args[given.index] = lane.fill(tensor, given.offset)
            shared.copies["back"] += 1
        elif tensor.is_cuda:  # it may have been copied on another stream
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _keep(shared: Shared, rewritten: Rewritten, args: list[Any]) -> None:
    """Another backward will need what this one overwrites: let it have copies."""
    lost: dict[Placement, list[int]] = {}
    for given in rewritten.given:
        if given.overwritten and shared.lane(given.place).has(args[given.index]):
            lost.setdefault(given.place, []).append(given.index)
    for place, indices in lost.items():
        lane = shared.lane(place)
        lane.evacuate()
        shared.copies["kept"] += 1
        for i in indices:
            args[i] = lane.view(args[i])


def hand_over(shared: Shared, rewritten: Rewritten, results: list[Any]) -> list[Any]:
    """What a forward returns: what it saved, as tensors that can be moved.

    Args:
        shared: The segments.
        rewritten: The forward.
        results: What the compiled code returned; changed.
    """
    hooks = has_saved_tensor_hooks()
    together: dict[Placement, list[int]] = {}
    for i, place in rewritten.saved.items():
        if shared.lane(place).has(results[i]):
            together.setdefault(place, []).append(i)
    for place, indices in together.items():
        lane = shared.lane(place)
        if hooks:
            shared.copies["hooks"] += 1
            made = lane.copy([results[i] for i in indices])
        else:
            lane.begin(rewritten.owner)
            made = [lane.hand_out(results[i]) for i in indices]
        for i, tensor in zip(indices, made, strict=True):
            results[i] = tensor
    return results


def reasons(counts: Mapping[str, int]) -> tuple[tuple[int, str], ...]:
    """How often each reason, in words."""
    return tuple((counts[key], text) for key, text in REASONS.items() if counts.get(key))
