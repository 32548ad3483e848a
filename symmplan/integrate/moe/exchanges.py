"""How rows move: the algorithms of an exchange but for the kernels, and an exchange under way.

[Note: rows are pushed]
    All ranks have the same `Routes`, so each knows where in its peers' memory its rows belong and
    copies them there itself: in shared memory with the processor, on devices with copy engines,
    which take no multiprocessor from the experts' products. Then the ranks meet, and each takes
    out what has come. Before they push again they must have met since: where the program has not
    told its routes meanwhile, which is a meeting, they meet once more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from attrs import define

from symmplan.memory.kernels import copy_bytes
from symmplan.memory.meeting.calls import REFUSED, note

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from symmplan.coordination.groups import Group
    from symmplan.integrate.moe.routes import PaddedRoutes, Routes
    from symmplan.memory.segment import Rendezvous
    from symmplan.memory.streams import Queued
    from symmplan.model import Placement

    #: Starts to move rows into a result; what is returned ends that.
    Start: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Routes], Callable[[], Any]]

__all__ = ["RowExchange", "RowPushes", "plain"]


@define(eq=False)
class RowExchange:
    """One that was started and not yet waited for.

    Attributes:
        routes: Who sends what to whom.
        take: What ends it; None once it is over.
        result: Where the rows go, and ``rows`` what was sent: they stay until it is over.
        stream: On which it was started; None on the CPU.
        ended: Where its end was queued, for other streams.
        returns: Its gradients, between the backward of its end and that of its start.
    """

    routes: Routes | PaddedRoutes
    take: Callable[[], Any] | None
    result: torch.Tensor | None
    rows: torch.Tensor | None
    stream: Any = None
    ended: Queued | None = None
    returns: Any = None


def plain(group: Any, *, apart: bool) -> Start:
    """Torch's own exchange; ``apart``: not waited for where it starts."""

    def start(result: torch.Tensor, rows: torch.Tensor, routes: Routes) -> Callable[[], Any]:
        splits = routes.received, routes.sent
        work = dist.all_to_all_single(result, rows, *splits, group=group, async_op=apart)
        return (lambda: None) if work is None else work.wait

    return start


class RowPushes:
    """Copies into the peers' memory. See [Note: rows are pushed].

    Args:
        meeting: How the ranks meet.
        slot: Where rows come in.
        group: The ranks.
    """

    def __init__(self, meeting: Rendezvous, slot: Placement, group: Group) -> None:
        self.meeting, self._slot, self._group = meeting, slot, group
        #: Whether all have met since they took out what came last.
        self.met = True

    def start(self, result: torch.Tensor, rows: torch.Tensor, routes: Routes) -> Callable[[], Any]:
        """Push rows; see `Start`. Collective: yes, and what is returned, too."""
        rank, size = self._group.rank, self._group.size
        row = math.prod(rows.shape[1:]) * rows.element_size()
        call = self._call(rows, row, routes)
        if not self.met:
            self._meet(call)
        sent = routes.sent
        for peer in (*range(rank + 1, size), *range(rank)):
            begin, count = sum(sent[:peer]), sent[peer]
            if count:
                start = self._slot.offset + routes.begins(peer) * row
                part = rows[begin : begin + count]
                copy_bytes(self.meeting.peers[peer], start, part, count * row)
        begin, own = sum(sent[:rank]), sum(routes.received[:rank])
        result[own : own + sent[rank]] = rows[begin : begin + sent[rank]]

        def take() -> None:
            self._meet(call)
            here = self.meeting.peers[rank][self._slot.offset :]
            there = here[: result.shape[0] * row].view(rows.dtype).view(result.shape)
            result[:own] = there[:own]
            result[own + sent[rank] :] = there[own + sent[rank] :]
            self.met = False

        return take

    def _call(self, rows: torch.Tensor, row: int, routes: Routes) -> bytes:
        """What the ranks compare of an exchange."""
        kind = f"{rows.dtype} {row} {routes.table}"
        return note("all_to_all_single_out", kind, out_offset=self._slot.offset)

    def compare(self, row: int) -> None:
        """Check in shared memory that all ranks come with rows of ``row`` bytes.

        Raises:
            RunError: They do not; raised on every rank.

        Collective: yes.
        """
        if self.meeting.memory == "shm":
            self.met = True
            self.meeting.enter(note("all_to_all_single_out", f"rows of {row} bytes"))

    def refuse(self) -> None:
        """Let the peers' call fail. Collective: yes, with that."""
        self.met = True
        self.meeting.enter(REFUSED)

    def _meet(self, call: bytes) -> None:
        self.met = True  # also where calls turn out to differ: then nobody takes anything out
        self.meeting.enter(call)
