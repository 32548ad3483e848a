"""Reductions by pushes: gradients go straight into the peers' slots, and nothing is copied in.

FSDP2 arranges all gradients of a module in one tensor, which is then reduced and scattered. Here
each rank's part of each gradient is copied to where that rank sums, by the copy engines of a
device; the ranks meet, and each sums what has arrived.

[Note: slots take turns]
    Nobody asks a peer whether its slot is free. Each group has two, and its reductions take them in
    turn. A rank pushes for reduction k + 2 after the meeting of k + 1, which its peers begin after
    they have summed k. Where a program leaves the order of the plan and needs a slot twice in a
    row, a step has an odd number of reductions, or one failed between a push and its meeting, the
    ranks meet once more before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmplan.integrate.fsdp.ops import summed_over_ranks
from symmplan.memory.own import own_work
from symmplan.memory.streams import mark, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.memory.segment import Rendezvous
    from symmplan.memory.streams import Mark
    from symmplan.model import Placement

__all__ = ["Pushes"]


class Pushes:
    """The reductions over one group, one after the other.

    Args:
        peers: The segment that holds the slots, uint8, on each rank of the group.
        meeting: How these ranks meet.
        rank: This one.
        device: Where the gradients lie.
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
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: Placement | None = None
        self._unmet = False
        # On devices: after the last meeting, and the last sum.
        self._met: list[Mark] = []
        self._summed: list[Mark] = []
        self._targets: dict[Any, list[tuple[torch.Tensor, list[tuple[int, int, int]]]]] = {}
        self._received: torch.Tensor | None = None

    @own_work
    def send(self, gradients: Sequence[torch.Tensor], slot: Placement) -> None:
        """Push each rank's part of the gradients, from the current stream on.

        Args:
            gradients: Of one dtype, to be sharded along their first dimension.
            slot: Where each rank receives.

        Collective: if the last reduction had the same slot, or never came to its meeting.
        """
        again = self._unmet or self._last == slot
        self._last, self._unmet = slot, True
        if self._stream is None:
            if again:
                self._meeting.barrier()
            self._copy(gradients, slot)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            wait_for(self._summed if again else self._met)
            if again:
                self._meeting.barrier()
            self._copy(gradients, slot)
        for gradient in gradients:
            gradient.record_stream(self._stream)

    def reduce(self, output: torch.Tensor, op: Any) -> Callable[[], None] | None:
        """What sums what was pushed, on the current stream.

        Args:
            output: This rank's part of the result.
            op: The reduction.

        Returns:
            None if the reduction is no sum, average, or sum with a factor.

        Collective: yes, to call it.
        """
        total = summed_over_ranks(output, len(self._peers), op)
        if total is None:
            return None

        @own_work
        def act() -> None:
            stream = self._stream
            assert self._received is not None
            if stream is not None:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            self._meeting.barrier()
            self._unmet, self._met = False, _marked(stream)
            total(self._received)
            self._summed = _marked(stream)

        return act

    def _copy(self, gradients: Sequence[torch.Tensor], slot: Placement) -> None:
        dtype, shapes = gradients[0].dtype, tuple(g.shape for g in gradients)
        key = (slot, dtype, shapes)
        if key not in self._targets:
            self._targets[key] = self._made(slot, dtype, shapes)
        flat = [g.reshape(-1) for g in gradients]
        for target, parts in self._targets[key]:
            at = 0
            for i, begin, end in parts:
                target[at : at + end - begin].copy_(flat[i][begin:end], non_blocking=True)
                at += self._padded(shapes[i])
        size = sum(map(self._padded, shapes)) * dtype.itemsize * len(self._peers)
        mine = self._peers[self._rank][slot.offset : slot.offset + size]
        self._received = mine.view(dtype).view(len(self._peers), -1)

    def _made(
        self, slot: Placement, dtype: torch.dtype, shapes: Sequence[Any]
    ) -> list[tuple[torch.Tensor, list[tuple[int, int, int]]]]:
        """For each rank its row of this one's, and which part of each gradient goes there."""
        ranks = len(self._peers)
        size = sum(map(self._padded, shapes)) * dtype.itemsize
        begin = slot.offset + self._rank * size
        made = []
        for rank in (*range(self._rank + 1, ranks), *range(self._rank + 1)):
            parts = []
            for i, shape in enumerate(shapes):
                count, whole = self._padded(shape), shape.numel()
                parts.append((i, min(whole, rank * count), min(whole, (rank + 1) * count)))
            made.append((self._peers[rank][begin : begin + size].view(dtype), parts))
        return made

    def _padded(self, shape: torch.Size) -> int:
        """Elements of one rank's part, padded as FSDP2 does."""
        return -(-shape[0] // len(self._peers)) * shape[1:].numel()


def _marked(stream: torch.cuda.Stream | None) -> list[Mark]:
    """All that the current stream has queued; nothing on the CPU."""
    if stream is None:
        return []
    return [mark(torch.cuda.current_stream(stream.device).record_event().wait)]
