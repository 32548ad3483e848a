"""Activations that cross from a forward into its backward, in their placements.

[Note: crossing tensors]
    A forward that saves a tensor which lies in a placement returns the placement itself, and the
    backward reads it there. The plan reserves the bytes for it until the backward's last reader, on
    the assumption that each backward follows its forward. A program may also run the forward twice,
    keep the graph of a backward, or run another graph in between. So a graph *evacuates* bytes that
    are still held before it writes them: the tensors that the forward returned get copies as their
    storage. Autograd keeps the same tensor objects and sees no new version.

    Each rank decides alone whether to evacuate, because this changes no offset and no order between
    ranks. A peer overwrites this rank's bytes only after all ranks have met in the graph that it
    runs, and this rank enters that meeting after it has evacuated. An op that handshakes is such a
    meeting; otherwise there is a barrier at the entry of the graph (see `Shared.enter`).

    A backward takes the saved tensors as inputs. Ordinary readers do not care whether these lie in
    their placements. They are copied back on entry for an op that needs them there, and for a CUDA
    graph, which would otherwise be recorded again for every new address.

[Note: who still holds them]
    Each crossing buffer is handed out as a storage of its own. It is held while that storage has
    more references than it began with. Hooks on saved tensors (checkpointing, offloading) create
    other tensors on the same storage, and these cannot be moved. While such hooks are active,
    copies are handed out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch.utils.weak import TensorWeakRef

from symmplan.coordination.world import address_of
from symmplan.device import device_of
from symmplan.errors import RunError
from symmplan.memory.leased import lease_out
from symmplan.memory.streams import synchronize
from symmplan.runtime.leases import Ledger, StorageLease
from symmplan.torch_private.autograd import has_saved_tensor_hooks, keeps_graph

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Mapping

    from symmplan.integrate.compile.parts import PlannedPart, Record
    from symmplan.memory.arena import Arena
    from symmplan.model import Placement
    from symmplan.runtime.leases import Run

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
    "aside": "something else was in bytes that a graph was about to write; let the program do what "
    "it did when it was planned, and keep no buffers of FSDP2",
    "released": "the backend was released before its backward",
}


@define(eq=False)
class CrossingLease(StorageLease):
    """The bytes of a crossing buffer, uint8, as a storage of their own.

    Attributes:
        place: Where they lie.
        graph: The one whose forward handed them out last.
        due: The graphs whose forward has run and whose backward has not, since: alike on all ranks,
            which what is still held need not be. Graphs that are planned meanwhile keep away.
    """

    place: Placement
    graph: Any = field(init=False, default=None)
    due: set[Any] = field(init=False, factory=set)
    _out: list[TensorWeakRef] = field(init=False, factory=list)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies here."""
        begin = address_of(self.tensor)
        return begin <= address_of(tensor) < begin + self.place.nbytes

    def hand_out(self, tensors: Iterable[torch.Tensor], graph: Any) -> list[torch.Tensor]:
        """Tensors that lie here, as ones that can be moved; a forward of ``graph`` made them."""
        made = self._on(self.tensor, tensors)
        self.graph, self._out = graph, [TensorWeakRef(t) for t in made]
        return made

    def copies(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of tensors that lie here, alike in their storage."""
        return self._on(self.tensor.clone(), tensors)

    def _on(self, leased: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        begin = address_of(self.tensor)
        return [_like(t, leased, (address_of(t) - begin) // t.element_size()) for t in tensors]

    def step_aside(self) -> bool:
        """Others need the bytes: everything that was handed out gets a copy."""
        self.evacuate()
        return True

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
                expected="that only autograd holds tensors which a compiled forward saved",
                got="another tensor on the same storage",
                fix="clone the saved tensors that you keep",
            )

    def move(self, to: torch.Tensor) -> None:
        """Let everything that was handed out lie in a copy of the bytes, which begins a storage."""
        for reference in self._out:
            tensor = reference()
            if tensor is not None and self.has(tensor):
                tensor.data = _like(tensor, to, tensor.storage_offset())
        self._out = [reference for reference in self._out if reference() is not None]

    def move_to(self, lease: CrossingLease) -> None:
        """Let everything that was handed out lie in other bytes, whose lease takes it over."""
        lease.tensor.copy_(self.tensor)
        self.move(lease.tensor)
        lease.graph, lease._out, self._out = self.graph, self._out, []

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that lies here, but is not moved with what was handed out."""
        return _like(tensor, self.tensor, tensor.storage_offset())

    def fill(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Copy a tensor back that was moved away, to an offset in elements.

        Hooks on saved tensors may have made it anew.
        """
        here = _like(tensor, self.tensor, offset)
        moved = tensor.untyped_storage()
        if tensor.storage_offset() == offset and moved.nbytes() == self.place.nbytes:
            self.tensor.copy_(tensor.new_empty(0, dtype=torch.uint8).set_(moved))
        else:
            here.copy_(tensor)
        return here


@define(eq=False)
class Crossings:
    """What crosses in the segments that graphs take turns in.

    Attributes:
        copies: How many crossing tensors were copied, by reason.
    """

    copies: Counter[str]
    # The bytes of each crossing buffer that a graph has had so far.
    _leases: dict[Placement, CrossingLease] = field(init=False, factory=dict)

    @property
    def used(self) -> bool:
        """Whether a graph has had any."""
        return bool(self._leases)

    def _at(self, arena: Arena, place: Placement) -> CrossingLease:
        lease = self._leases.get(place)
        if lease is None:
            segment = arena.segments[place.segment].tensor
            lease = self._leases[place] = CrossingLease(
                lease_out(segment[place.offset : place.end]), place
            )
        return lease

    def make_room(self, arena: Arena, part: PlannedPart, args: list[Any], run: Run) -> None:
        """Before a part runs: what others saved makes room, what it needs in place is put there."""
        for place in part.saved.values():
            self._at(arena, place)
        given = [(g, self._at(arena, g.place)) for g in part.given]
        here = [lease for g, lease in given if lease.has(args[g.index])]
        self.copies["aside"] += run.hold(arena.segments, part.spans, args, but=here)
        for left in run.left:
            mine = isinstance(left, CrossingLease) and left.graph is part.record
            self.copies["again" if mine else "other"] += 1
        if here and keeps_graph():
            self._keep(part, args)
        for g, lease in given:
            tensor = args[g.index]
            if lease.has(tensor):
                continue
            if g.needed:
                args[g.index] = lease.fill(tensor, g.offset)
                self.copies["back"] += 1
            else:  # it may have been copied on another stream
                there = device_of(tensor.device)
                there.record_stream(tensor, there.current_stream())

    def _keep(self, part: PlannedPart, args: list[Any]) -> None:
        """Another backward will need what this one overwrites: let it have copies."""
        overwritten = ((g.place, g.index) for g in part.given if g.overwritten)
        for place, indices in self._together(overwritten, args).items():
            lease = self._leases[place]
            lease.evacuate()
            self.copies["kept"] += 1
            for i in indices:
                args[i] = lease.view(args[i])

    def hand_over(self, arena: Arena, part: PlannedPart, results: list[Any]) -> list[Any]:
        """What a forward returns: what it saved, as tensors that can be moved, in ``results``."""
        hooks = has_saved_tensor_hooks()
        saved = ((place, i) for i, place in part.saved.items())
        for place, indices in self._together(saved, results).items():
            lease, tensors = self._leases[place], [results[i] for i in indices]
            if hooks:
                self.copies["hooks"] += 1
                made = lease.copies(tensors)
            else:
                made = lease.hand_out(tensors, part.record)
                _take(arena, lease)
            for i, tensor in zip(indices, made, strict=True):
                results[i] = tensor
        return results

    def expect(self, part: PlannedPart, *, backward: bool) -> None:
        """Note whether a backward is due for what this forward saves."""
        for place in part.saved.values():
            if place in self._leases:  # else it never ran here
                due = self._leases[place].due
                (due.add if backward else due.discard)(part.record)

    def held(self) -> Placement | None:
        """What somebody still holds of what a forward saved; None if nothing."""
        return next((place for place, lease in self._leases.items() if lease.held), None)

    def due(self, but: Record) -> list[Placement]:
        """What other graphs' forwards saved whose backwards are due."""
        return [place for place, lease in self._leases.items() if lease.due - {but}]

    def _together(
        self, found: Iterable[tuple[Placement, int]], tensors: list[Any]
    ) -> dict[Placement, list[int]]:
        """The indices of tensors that do lie in their placements, by placement."""
        together: dict[Placement, list[int]] = {}
        for place, index in found:
            if self._leases[place].has(tensors[index]):
                together.setdefault(place, []).append(index)
        return together

    def move(self, arena: Arena) -> None:
        """Let everything that is held lie in other segments, as large or larger."""
        saved, self._leases = self._leases, {}
        for place, lease in saved.items():
            there = self._at(arena, place)
            there.due = lease.due
            if lease.held:
                lease.move_to(there)
                _take(arena, there)
        if saved:
            synchronize(next(iter(saved.values())).tensor.device)  # what was saved has been copied

    def clear(self) -> None:
        """Copy everything out that was saved; what cannot move keeps the memory it lies in."""
        for lease in self._leases.values():
            if lease.held:
                lease.move(lease.tensor.clone())
                self.copies["released"] += 1
        self._leases.clear()


def _take(arena: Arena, lease: CrossingLease) -> None:
    segment, place = arena.segments[lease.place.segment], lease.place
    begin = segment.begin + place.offset
    Ledger(segment.leases).take(begin, begin + place.nbytes, lease)


def _like(tensor: torch.Tensor, on: torch.Tensor, offset: Any) -> torch.Tensor:
    """A tensor like another one on the storage of a third, at an offset in elements."""
    storage: Any = on.untyped_storage()
    return tensor.new_empty(0).set_(storage, offset, tensor.size(), tensor.stride())


def reasons(counts: Mapping[str, int]) -> tuple[tuple[int, str], ...]:
    """How often each reason, in words."""
    return tuple((counts[key], text) for key, text in REASONS.items() if counts.get(key))
