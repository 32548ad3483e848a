"""How rows move over several hosts: once to each, and from there to the ranks that want them.

[Note: rows over hosts]
    Each rank sends what is for the ranks of another host to its counterpart there, in one message,
    and that one pushes it on. A token that goes to several experts of a host is several rows of a
    dispatch, which are equal: such rows cross once, with the places that they have on the other
    side. What is equal is found by the rows themselves, by a hash of each and a comparison with
    what it would be taken for. Rows that come back from experts differ, and all cross.

    Only ranks of a host write in each other's memory, so they alone meet before they push again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from symmplan.integrate.moe.exchanges import RowPushes
from symmplan.memory.kernels import as_bytes, copy_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.integrate.moe.routes import Routes
    from symmplan.memory.counterparts import HostsMeeting

__all__ = ["HostRows", "distinct"]

_INDEX = torch.int32


class HostRows(RowPushes):
    """Rows over hosts. See [Note: rows over hosts].

    Args:
        meeting: How the ranks meet.
        slot: Where rows come in.
        group: The ranks.
    """

    meeting: HostsMeeting

    def start(self, result: torch.Tensor, rows: torch.Tensor, routes: Routes) -> Callable[[], Any]:
        """Send rows to the other hosts; see `Start`. Collective: yes, and what is returned, too."""
        row = math.prod(rows.shape[1:]) * rows.element_size()
        call = self._call(rows, row, routes)
        if not self.met:
            self._meet(call, rows)
        messages = self._messages(rows, routes)
        counts = torch.tensor([len(kept) for kept, _ in messages])
        theirs = torch.empty_like(counts)
        across = self.meeting.counterparts
        self.meeting.wait(across.exchange(theirs, counts))
        parts = [x for kept, at in messages for x in (as_bytes(rows[kept]), as_bytes(at))]
        wanted = [self._wanted(sender, routes) for sender in across.ranks]
        received = [
            int(kept) * row + sum(of) * _INDEX.itemsize
            for kept, of in zip(theirs.tolist(), wanted, strict=True)
        ]
        sent = [a.numel() + b.numel() for a, b in zip(parts[::2], parts[1::2], strict=True)]
        incoming = torch.empty(sum(received), dtype=torch.uint8)
        work = across.exchange(incoming, torch.cat(parts), received, sent)
        self._push_here(rows, row, routes)

        def take() -> None:
            self.meeting.wait(work)
            for sender, kept, of, part in zip(
                across.ranks, theirs.tolist(), wanted, incoming.split(received), strict=True
            ):
                self._push_on(sender, part, int(kept), of, row, routes)
            self._meet(call, rows)
            here = self.meeting.near_peers[self.meeting.place][self._slot.offset :]
            result.copy_(here[: result.shape[0] * row].view(rows.dtype).view(result.shape))
            self.met = False

        return take

    def _messages(
        self, rows: torch.Tensor, routes: Routes
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each host which rows cross, and which of those each row for its ranks is."""
        begins = [sum(routes.sent[:rank]) for rank in range(routes.ranks + 1)]
        nothing = torch.empty(0, dtype=torch.int64)
        found = []
        for ranks in self.meeting.hosts:
            if self._group.rank in ranks:
                found.append((nothing, nothing.to(_INDEX)))
                continue
            spans = [torch.arange(begins[rank], begins[rank + 1]) for rank in ranks]
            mine = torch.cat(spans)
            first, at = distinct(rows[mine]) if routes.out else (None, torch.arange(len(mine)))
            found.append((mine if first is None else mine[first], at.to(_INDEX)))
        return found

    def _wanted(self, sender: int, routes: Routes) -> list[int]:
        """How many rows a counterpart sends here for each rank of this host."""
        if sender == self._group.rank:
            return [0] * len(self.meeting.near)
        return [routes.table[sender][rank] for rank in self.meeting.near]

    def _push_here(self, rows: torch.Tensor, row: int, routes: Routes) -> None:
        """Push what this rank sends to its own host, itself included."""
        sent, rank = routes.sent, self._group.rank
        for place, peer in enumerate(self.meeting.near):
            begin, count = sum(sent[:peer]), sent[peer]
            self._write(place, rows[begin : begin + count], rank, peer, row, routes)

    def _push_on(
        self,
        sender: int,
        part: torch.Tensor,
        kept: int,
        counts: Sequence[int],
        row: int,
        routes: Routes,
    ) -> None:
        """Push what has come from a counterpart to the ranks of this host."""
        if not sum(counts):
            return
        rows = part[: kept * row].view(kept, row)
        at = part[kept * row :].clone().view(_INDEX).long()  # of whatever address
        for place, of in enumerate(at.split(list(counts))):
            self._write(place, rows[of], sender, self.meeting.near[place], row, routes)

    def _write(
        self,
        place: int,
        rows: torch.Tensor,
        sender: int,
        peer: int,
        row: int,
        routes: Routes,
    ) -> None:
        """Write a sender's rows where a rank of this host has them."""
        if rows.shape[0]:
            before = sum(of[peer] for of in routes.table[:sender])
            start = self._slot.offset + before * row
            copy_bytes(self.meeting.near_peers[place], start, rows, rows.shape[0] * row)


def distinct(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of each kind of equal rows, and for each row which of these it is.

    Args:
        rows: Contiguous; compared bit by bit.

    Returns:
        Their numbers, ascending, and ``(rows,)`` numbers of these.

    >>> distinct(torch.tensor([[5.0], [7.0], [5.0]]))
    (tensor([0, 1]), tensor([0, 1, 0]))
    """
    count = rows.shape[0]
    every = torch.arange(count)
    if not rows.numel():
        return every, every
    flat = as_bytes(rows).view(count, -1)
    _, kind = torch.unique(_hashes(flat), return_inverse=True)
    first = torch.full((int(kind.max()) + 1,), count).scatter_reduce(0, kind, every, "amin")
    first, order = first.sort()
    at = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))[kind]
    if not torch.equal(flat[first[at]], flat):  # rows of one hash that differ
        return every, every
    return first, at


def _hashes(flat: torch.Tensor) -> torch.Tensor:
    """A word of 64 bits for each row of bytes; of equal rows the same."""
    words = flat.view(torch.int64) if flat.shape[1] % 8 == 0 else flat.long()
    chance = torch.Generator().manual_seed(0)
    factors = torch.randint(1 << 62, (words.shape[1],), generator=chance) * 2 + 1
    return (words * factors).sum(1)
