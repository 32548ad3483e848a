"""Reductions by pushes: gradients go straight into the peers' slots, and nothing is copied in.

FSDP2 arranges all gradients of a module in one tensor, which is then reduced and scattered. A push
instead copies each rank's part of each gradient into that rank's slot, on devices by copy engines.
Then the ranks meet, and each rank sums its slot. On devices a rank reads its own part from the
gradient itself. If sharded gradients exist already, in FSDP2's layout, the sums are added to them
directly.

[Note: slots take turns]
    No rank asks a peer whether its slot is free. Each group has two slots, and its reductions
    alternate between them. A rank pushes for reduction k + 2 after the meeting of k + 1, which its
    peers begin after they have summed k. The ranks meet once more if a program leaves the order of
    the plan and needs a slot twice in a row, if a step has an odd number of reductions, or if a
    reduction failed between a push and its meeting.

[Note: shared slots]
    Two slots take as many bytes as two gathers, all the time. If there is no room for them, each
    reduction has a separate slot in bytes that other buffers use before and after, mostly those of
    the parameters that its module has just released. A rank takes the bytes, and then the ranks
    meet, before any of them pushes. The next user of the bytes waits for the sum.

    If another tensor on this rank still uses the bytes, this rank joins that meeting only when it
    can sum: it saves the bytes, meets, pushes, meets, sums, and restores them. If a step fails
    between a push and its meeting, peers may still push, so the ranks meet before anything else.

[Note: wider gradients]
    Slots are as large as the gradients of the recorded steps. A rank that has wider ones, as after
    accumulating, pushes nothing. In shared memory it says so at the meeting, and then all ranks
    reduce in torch's own way. On devices no host hears what is said there.
"""

from __future__ import annotations

import contextlib
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import frozen

from symmplan.coordination.own import own_work
from symmplan.device import device_of
from symmplan.integrate.fsdp.ops import factor_of
from symmplan.integrate.fsdp.sums import OwnRow, sum_parts, sum_rows, sums_parts
from symmplan.memory.meeting.calls import note
from symmplan.memory.streams import mark, wait_for
from symmplan.runtime.leases import set_aside
from symmplan.torch_private import autograd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from symmplan.memory.segment import Rendezvous
    from symmplan.memory.streams import Mark
    from symmplan.model import Placement

__all__ = ["Pushes", "sent_as"]

#: Of a tensor; a reduction asks each gradient, and so makes no Python call.
_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")
#: What ranks compare that meet because a step failed.
_FAILED = note("barrier_", "a failed push")


class Pushes:
    """The reductions over one group, one after the other.

    Args:
        peers: The segment that holds the slots, uint8, on each rank of the group.
        meeting: How these ranks meet.
        rank: This one.
        device: Where the gradients lie.

    Attributes:
        unmet: Whether a reduction has pushed, or begun to, and did not come to its meeting yet.
    """

    def __init__(
        self,
        peers: Sequence[torch.Tensor],
        meeting: Rendezvous,
        rank: int,
        device: torch.device,
    ) -> None:
        self._peers = peers
        self._meeting = meeting
        self._rank = rank
        self._device = device_of(device)
        self._stream = self._device.new_stream()
        self._last: Placement | None = None
        self.unmet = False
        # A shared slot that was not summed yet, and what is pushed late.
        self._shared: Placement | None = None
        self._late: Callable[[], None] | None = None
        # On devices: after the last meeting, and the last sum.
        self._met: list[Mark] = []
        self._summed: list[Mark] = []
        self._made: dict[Any, _Sent] = {}
        self._gradients: list[torch.Tensor] = []
        self._sent: _Sent | None = None
        # What the ranks compare when they meet; in shared memory what they reduce otherwise.
        self._call, self._site = b"", ""
        # That of each module, slot, type and shapes.
        self._calls: dict[Any, bytes] = {}
        self._kept: tuple[torch.Tensor, ...] = ()
        self._fits = True

    def send(
        self,
        gradients: Sequence[torch.Tensor],
        slot: Placement,
        travels: torch.dtype,
        take: Callable[[], bool] | None = None,
        *,
        site: str = "",
        fits: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """Push each rank's part of the gradients, from the current stream on.

        Args:
            gradients: To be sharded along their first dimension.
            slot: Where each rank receives.
            travels: The type in which all ranks push.
            take: Takes the bytes of a shared slot, whether that can be; None if it is none.
            site: Name of the module, equal on all ranks; shared memory compares it.
            fits: Whether the gradients can be cast to that type. See [Note: wider gradients].

        Returns:
            What has to stay alive until the current stream has waited for the reduction.

        Collective: if the slot is shared or the last reduction had the same, or that never came to
        its meeting.
        """
        shared, made = take is not None, gradients
        again = shared or self.unmet or self._last == slot
        self._last, self.unmet = slot, True
        # Where there is no room for that, the copies cast.
        with contextlib.suppress(torch.OutOfMemoryError):
            if fits and set(map(_dtype_of, made)) != {travels}:
                made = [g if g.dtype == travels else g.to(travels) for g in made]
        self._shared = slot if shared else None
        kept = tuple(made)  # FSDP2 forgets those of its list
        self._kept, self._fits = kept if self._stream is None else (), fits
        self._site, shapes = site, tuple(map(_shape_of, kept))
        call = self._calls.get((site, slot, travels, shapes))
        if call is None:
            call = note(
                "reduce_scatter_out",
                f"push {site} {travels}",
                in_offset=slot.offset,
                nbytes=sum(shape.numel() for shape in shapes) * travels.itemsize,
            )
            self._calls[site, slot, travels, shapes] = call
        self._call = call

        def push() -> None:
            if again:
                self._meeting.enter(self._call, site=self._site)
            if fits:
                self._copy(kept, shapes, slot, travels)

        stream = self._stream
        if stream is not None:
            stream.wait_stream(self._device.current_stream())
        with self._device.on_stream(stream):
            wait_for(self._summed if again else self._met)
            if take is None or take():
                push()
            else:
                self._late = push
        return kept

    def meet(self) -> None:
        """Meet the peers if a reduction with a shared slot failed before its meeting.

        Collective: then.
        """
        if self._shared is None or not self.unmet:
            return
        with self._pushed():
            self._meeting.enter(_FAILED)
        self.unmet, self._shared, self._kept = False, None, ()

    def _pushed(self) -> contextlib.AbstractContextManager[None]:
        """Inside, all that this rank pushes precedes what the current stream does."""
        if self._stream is not None:
            self._device.current_stream().wait_stream(self._stream)
        late, self._late = self._late, None
        return contextlib.nullcontext() if late is None else self._aside(late)

    @contextlib.contextmanager
    def _aside(self, late: Callable[[], None]) -> Iterator[None]:
        """What is late is pushed; whoever has the bytes of the slot has them again afterwards."""
        assert self._shared is not None
        with set_aside(self._peers[self._rank][self._shared.offset : self._shared.end]):
            late()
            yield

    def reduce(
        self,
        output: torch.Tensor,
        op: Any,
        rounded: torch.dtype,
        otherwise: Callable[[Sequence[torch.Tensor]], None],
        *,
        add: bool = False,
    ) -> Callable[[], Literal[True] | None] | None:
        """What sums what was pushed, on the current stream.

        It returns True if a rank did not push, and all reduced otherwise.

        Args:
            output: This rank's part of the result.
            op: The reduction.
            rounded: The type to which sums are rounded before they are written.
            otherwise: Reduces gradients in torch's own way. See [Note: wider gradients].
            add: Whether they are added to what ``output`` has.

        Returns:
            None if the reduction is no sum, average, or sum with a factor.

        Collective: yes, to call it.
        """
        factor = factor_of(op, len(self._peers))
        if factor is None:
            return None

        def act() -> Literal[True] | None:
            with own_work:
                with self._pushed():
                    all_fit = self._all_fit()
                    self.unmet, self._met = False, self._marked()
                    if all_fit:
                        self._sum(output.view(-1), factor, rounded, add=add)
                    self._summed = self._marked()
                kept, self._kept = self._kept, ()
                if all_fit:
                    return None
                otherwise(kept)
                return True

        return act

    def _marked(self) -> list[Mark]:
        """All that the current stream has queued; nothing on the CPU."""
        if self._stream is None:
            return []
        return [mark(self._device.current_stream().record_event(), self._device)]

    def _all_fit(self) -> bool:
        """Whether all ranks, which meet, have pushed. Collective: yes."""
        if self._stream is not None:
            self._meeting.enter(self._call, site=self._site)
            return True
        self._meeting.enter(self._call, [self._fits], self._site)
        return all(map(itemgetter(0), self._meeting.free_words()))

    def _sum(self, total: torch.Tensor, factor: float, rounded: torch.dtype, *, add: bool) -> None:
        gradients, self._gradients = self._gradients, []
        sent = self._sent
        assert sent is not None
        if sent.own is None:
            sum_rows(sent.rows, total, factor, rounded, add=add)
            return
        sum_parts(sent.rows, sent.own, gradients, total, factor, rounded, add=add)

    def _copy(
        self,
        gradients: Sequence[torch.Tensor],
        shapes: Sequence[torch.Size],
        slot: Placement,
        dtype: torch.dtype,
    ) -> None:
        cast = set(map(_dtype_of, gradients)) != {dtype}
        key = (slot, dtype, shapes, cast)
        sent = self._made.get(key)
        if sent is None:
            sent = self._made[key] = self._make(*key, gradients[0].device)
        flat = list(map(torch.Tensor.ravel, gradients))
        with autograd.shown("symmplan::push"):
            sent.copy(flat)
        self._sent = sent
        self._gradients = [] if sent.own is None else flat

    def _make(
        self,
        slot: Placement,
        dtype: torch.dtype,
        shapes: Sequence[Any],
        cast: bool,
        device: torch.device,
    ) -> _Sent:
        ranks, rank = len(self._peers), self._rank
        counts = [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes]  # FSDP2 pads
        size = sum(counts) * dtype.itemsize
        begin = slot.offset + rank * size
        own = None
        if sums_parts(device) and not cast:
            own = OwnRow(rank, _spans(shapes, counts, rank), device)
        copies = []
        for to in (*range(rank + 1, ranks), *range(rank + 1)):
            if to == rank and own is not None:
                continue
            row = self._peers[to][begin : begin + size].view(dtype)
            for which, (first, last, at) in enumerate(_spans(shapes, counts, to)):
                if first < last:
                    copies.append((which, first, last - first, row[at : at + last - first]))
        mine = self._peers[rank][slot.offset : slot.offset + ranks * size]
        return _Sent(mine.view(dtype).view(ranks, -1), self._device.copies(copies), own)


def sent_as(gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients travel: as autograd made them, if that is no wider.

    Args:
        gradients: They.
        dtype: In which FSDP2 reduces.
    """
    made = set(map(_dtype_of, gradients))
    if made == {dtype}:
        return dtype
    wider = len(made) > 1 or max(d.itemsize for d in made) > dtype.itemsize
    return dtype if wider else gradients[0].dtype


@frozen(eq=False)
class _Sent:
    """Where gradients of some shapes go.

    Attributes:
        rows: Where this rank receives, a row from each.
        copy: Copies the parts of the gradients, which it takes, to their ranks.
        own: This rank's row; None if it is copied, too.
    """

    rows: torch.Tensor
    copy: Callable[[Sequence[torch.Tensor]], None]
    own: OwnRow | None


def _spans(
    shapes: Sequence[torch.Size], counts: Sequence[int], to: int
) -> tuple[tuple[int, int, int], ...]:
    """Of each gradient where a rank's part begins and ends, and begins in a row, in elements."""
    spans, at = [], 0
    for shape, count in zip(shapes, counts, strict=True):
        whole = shape.numel()
        spans.append((min(whole, to * count), min(whole, (to + 1) * count), at))
        at += count
    return tuple(spans)
