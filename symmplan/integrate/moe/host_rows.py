"""How rows move over several hosts: once to each, and from there to the ranks that want them.

[Note: rows over hosts]
    Each rank sends what is for the ranks of another host to its counterpart there, in one message,
    and that one pushes it on. A token that goes to several experts of a host is several rows of a
    dispatch, which are equal: such rows cross once. A message ahead of them says how many cross,
    and for each row of the other side which of these it is. What is equal is found by the rows
    themselves: sorted by a hash of each, rows are compared with the one before. Rows that come back
    from experts differ. All of them cross, in the order of the routes, and nothing goes ahead.

    Only ranks of a host write in each other's memory, so they alone meet before they push again.

[Note: one wait of the host]
    How many rows cross is found on the device, and the host needs it for the sizes of a message. So
    in a dispatch it waits once: for its own numbers and those of its counterparts, in one copy. All
    else is in the order of the streams.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from symmplan.device import device_of
from symmplan.integrate.moe.exchanges import RowPushes
from symmplan.memory.kernels import as_bytes, copy_bytes, select_rows, word_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from symmplan.integrate.moe.routes import Routes
    from symmplan.memory.ops.two_levels import Levels

__all__ = ["HostRows", "distinct"]

_INDEX = torch.int32
#: Bytes of rows that are hashed or compared at a time.
_CHUNK = 16 << 20


class HostRows(RowPushes):
    """Rows over hosts. See [Note: rows over hosts].

    Args:
        meeting: How the ranks meet.
        slot: Where rows come in.
        group: The ranks.
    """

    meeting: Levels

    def start(self, result: torch.Tensor, rows: torch.Tensor, routes: Routes) -> Callable[[], Any]:
        """Send rows to the other hosts; see `Start`. Collective: yes, and what is returned, too."""
        row = math.prod(rows.shape[1:]) * rows.element_size()
        call = self._call(rows, row, routes)
        if not self.met:
            self._meet(call)
        across = self.meeting.counterparts
        wanted = [self._wanted(sender, routes) for sender in across.ranks]
        source, sent, received, places = self._crossing(rows, row, routes, wanted)
        kind = self._word(row)
        shape = sum(received), row // kind.itemsize
        incoming = torch.empty(shape, dtype=kind, device=rows.device)
        sizes = ([count * row for count in counts] for counts in (received, sent))
        work = across.exchange(incoming, source, *sizes)
        self._push_here(rows, row, routes)

        def take() -> None:
            self.meeting.wait(work)
            _used_here(source, incoming, *(at for at in places if at is not None))
            parts = zip(across.ranks, incoming.split(received), places, wanted, strict=True)
            for sender, part, at, counts in parts:
                whole = len(part) == sum(counts)  # and in order
                self._push_on(sender, part, None if whole else at, counts, routes)
            self._meet(call)
            here = self.meeting.near_peers[self.meeting.place][self._slot.offset :]
            result.copy_(here[: result.shape[0] * row].view(rows.dtype).view(result.shape))
            self.met = False

        return take

    def refuse(self) -> None:
        """See `RowPushes.refuse`; on devices the peers would not hear of it."""
        if self.meeting.memory == "shm":
            super().refuse()

    def _crossing(
        self, rows: torch.Tensor, row: int, routes: Routes, wanted: list[list[int]]
    ) -> tuple[torch.Tensor, list[int], list[int], list[torch.Tensor | None]]:
        """The rows that cross, host by host; how many to each, and from each; and the places.

        The places say which of a counterpart's rows each one is that is wanted here. Where as many
        come as are wanted, they are these, in order.
        """
        hosts = [() if self._group.rank in ranks else ranks for ranks in self.meeting.hosts]
        sent = [sum(routes.sent[rank] for rank in ranks) for ranks in hosts]
        received = [sum(counts) for counts in wanted]
        spans = _spans(routes.sent, list(itertools.chain(*hosts)))
        if not routes.out:
            parts = [rows[begin:end] for begin, end in spans]
            source = parts[0] if len(parts) == 1 else torch.cat(parts)
            return source, sent, received, [None] * len(sent)
        picks = torch.cat([torch.arange(*span, device=rows.device) for span in spans])
        kind = word_of(row, int(rows.storage_offset()) * rows.element_size())
        words = as_bytes(rows).view(kind).view(rows.shape[0], row // kind.itemsize)
        first, kept, at = _kept(words, picks, sent)
        told = self._told(kept, at.split(sent), received)
        # Here the host waits; see [Note: one wait of the host].
        counts = torch.cat([kept.to(_INDEX), *(part[:1] for part in told)]).tolist()
        sent, received = counts[: len(sent)], counts[len(sent) :]
        firsts = first.byte().argsort(descending=True, stable=True)[: sum(sent)]
        return words[picks[firsts]], sent, received, [part[1:] for part in told]

    def _told(
        self, kept: torch.Tensor, at: Sequence[torch.Tensor], wanted: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """What each counterpart says: how many rows it sends, and the places of those wanted here.

        Collective: yes, over the counterparts.
        """
        sizes = [1 + count for count in wanted]
        told = torch.empty(sum(sizes), dtype=_INDEX, device=kept.device)
        each = zip(kept.split(1), at, strict=True)
        message = torch.cat([x for pair in each for x in pair]).to(_INDEX)
        nbytes = _INDEX.itemsize
        received, sent = ([n * nbytes for n in of] for of in (sizes, [1 + len(x) for x in at]))
        self.meeting.wait(self.meeting.counterparts.exchange(told, message, received, sent))
        parts: tuple[torch.Tensor, ...] = told.split(sizes)
        return parts

    def _wanted(self, sender: int, routes: Routes) -> list[int]:
        """How many rows a counterpart sends here for each rank of this host."""
        if sender == self._group.rank:
            return [0] * len(self.meeting.near)
        return [routes.table[sender][rank] for rank in self.meeting.near]

    def _push_here(self, rows: torch.Tensor, row: int, routes: Routes) -> None:
        """Push what this rank sends to its own host, itself included."""
        sent = routes.sent
        for place, peer in enumerate(self.meeting.near):
            begin, count = sum(sent[:peer]), sent[peer]
            if count:
                start = self._slot.offset + routes.begins(peer) * row
                there = self.meeting.near_peers[place]
                copy_bytes(there, start, rows[begin : begin + count], count * row)

    def _push_on(
        self,
        sender: int,
        rows: torch.Tensor,
        at: torch.Tensor | None,
        counts: Sequence[int],
        routes: Routes,
    ) -> None:
        """Push what has come from a counterpart to the ranks of this host."""
        row = rows.shape[1] * rows.element_size()
        ends = list(itertools.accumulate(counts))
        for place, (count, end) in enumerate(zip(counts, ends, strict=True)):
            if not count:
                continue
            peer = self.meeting.near[place]
            start = self._slot.offset + sum(of[peer] for of in routes.table[:sender]) * row
            there = self.meeting.near_peers[place]
            if at is None:
                copy_bytes(there, start, rows[end - count : end], count * row)
            else:
                select_rows(there, start, rows, at[end - count : end])

    def _word(self, row: int) -> torch.dtype:
        """The widest type for rows of so many bytes in the slot."""
        here = self.meeting.near_peers[self.meeting.place]
        return word_of(row, int(here.storage_offset()) | self._slot.offset)


def _spans(sent: Sequence[int], ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Where the rows for some ranks begin and end, one behind the other; at least one span."""
    begins = [0, *itertools.accumulate(sent)]
    found = [(0, 0)]
    for begin, end in ((begins[rank], begins[rank + 1]) for rank in ranks):
        low, high = found[-1]
        if low == high:
            found[-1] = begin, end
        elif high == begin:
            found[-1] = low, end
        elif begin < end:
            found.append((begin, end))
    return found


def _kept(
    words: torch.Tensor, picks: torch.Tensor, sent: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which rows for each host cross, how many, and for each which of the host's that is."""
    told = torch.tensor(sent, device="cpu", pin_memory=device_of(words.device).pins_memory)
    counts = told.to(words.device, non_blocking=True)
    host = torch.repeat_interleave(counts, output_size=len(picks))
    first, number = distinct(words, picks, host)
    upto = torch.nn.functional.pad(first.cumsum(0), (1, 0))
    ends = counts.cumsum(0)
    begins = upto[ends - counts]
    return first, upto[ends] - begins, number - begins[host]


def distinct(
    words: torch.Tensor, picks: torch.Tensor, part: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows in several parts the first of each kind of equal ones in its part.

    The host waits for nothing.

    Args:
        words: ``(n, width)`` whole numbers, each row of a kind if all of it is equal.
        picks: ``(rows,)``: which of these the rows are.
        part: ``(rows,)``: the part of each, ascending.

    Returns:
        Whether each is a first, and the number of its own first among the firsts.

    >>> rows = torch.tensor([[5], [7], [5]])
    >>> distinct(rows, torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 0, 1]))
    (tensor([ True,  True, False,  True]), tensor([0, 1, 0, 2]))
    """
    count = picks.shape[0]
    every = torch.arange(count, device=picks.device)
    if not count:
        return every.bool(), every
    step = max(1, _CHUNK // (8 * words.shape[1]))
    hashes = torch.cat([_hashes(words[of]) for of in picks.split(step)])
    order = hashes.argsort(stable=True)  # so rows of one kind and part are neighbours, ascending
    pairs = zip(order[:-1].split(step), order[1:].split(step), strict=True)
    alike = [(words[picks[a]] == words[picks[b]]).all(1) for a, b in pairs]
    same = torch.cat(alike) & (part[order[:-1]] == part[order[1:]])
    begins = torch.nn.functional.pad(~same, (1, 0), value=True)
    latest = torch.where(begins, every, 0).cummax(0).values
    own = torch.empty_like(order).scatter_(0, order, order[latest])
    first = own == every
    return first, (first.cumsum(0) - 1)[own]


def _hashes(words: torch.Tensor) -> torch.Tensor:
    """A word of 64 bits for each row; of equal rows the same."""
    chance = torch.Generator(words.device).manual_seed(0)
    shape = (words.shape[1],)
    factors = torch.randint(1 << 62, shape, generator=chance, device=words.device) * 2 + 1
    return (words * factors).sum(1)


def _used_here(*tensors: torch.Tensor) -> None:
    """Tell torch's allocator that the current stream uses them, which may be of another one."""
    for tensor in tensors:
        there = device_of(tensor.device)
        there.record_stream(tensor, there.current_stream())
