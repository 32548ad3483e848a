"""Collectives of a group on several hosts.

See [Note: two levels] in `symmplan.memory.meeting.counterparts`.

Each function is the work of an op of `symmplan.memory.ops.one_sided` between its handshake and its
release. Both levels overlap, piece by piece: pieces from other hosts are passed on while more
arrive.

[Note: sums over hosts]
    First each rank sums, over the ranks of its host in their order, its own part and the parts of
    all its counterparts. Then the sums of the hosts are added, in the order of the counterparts:
    on devices that of their ranks, otherwise that of the hosts' first ranks.
    Types narrower than float32 are summed in float32. What crosses the network is rounded once for
    it, so that a number takes no more bytes there than in the program; the sum of this rank's own
    host is not. The result is rounded once. Averages are averages within each host already, as the
    sums of many ranks may be too large for the type.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeAlias

import torch

from symmplan.memory.kernels import as_bytes, copy_bytes, reduce_into
from symmplan.memory.meeting.calls import parts_of
from symmplan.torch_private import autograd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from symmplan.memory.meeting.calls import OpCall
    from symmplan.memory.meeting.counterparts import HostsMeeting
    from symmplan.memory.meeting.device_hosts import DeviceHostsMeeting

    Levels: TypeAlias = HostsMeeting | DeviceHostsMeeting

__all__ = ["SHOWN", "gather_parts", "reduce_parts", "reduce_shares"]

#: Under this name they show in a profile, beside the op's.
SHOWN = "symmplan::between hosts"

#: Parts of a shard that cross at a time, in bytes at least, and how many there are at most.
_PART, _PARTS = 1 << 20, 4


def gather_parts(call: OpCall, levels: Levels, pieces: Sequence[tuple[int, int]]) -> None:
    """All-gathers inside the segment; each rank's part of each is in place.

    Args:
        call: The call.
        levels: How its group meets.
        pieces: Where each begins in the segment, and the bytes of each rank's part.
    """
    mine = levels.near_peers[levels.place]
    ranks = levels.counterparts.ranks
    with autograd.shown(SHOWN):
        started = []
        for begin, count in pieces:
            for low, high in _cut(count):
                spans = [(begin + r * count + low, begin + r * count + high) for r in ranks]
                views = [mine[a:b] for a, b in spans]
                work = levels.counterparts.gather(views, views[ranks.index(call.rank)])
                started.append((work, spans))
        for begin, count in pieces:
            _push(levels, begin + call.rank * count, begin + (call.rank + 1) * count)
        for work, spans in started:
            levels.wait(work)
            for rank, (low, high) in zip(ranks, spans, strict=True):
                if rank != call.rank:
                    _push(levels, low, high)


def reduce_parts(
    call: OpCall, levels: Levels, like: torch.Tensor, out: torch.Tensor, reduction: str
) -> None:
    """A reduce-scatter: this rank's part of the sum of what all have at the call's offset.

    Args:
        call: The call.
        levels: How its group meets.
        like: Of the elements' type.
        out: This rank's part, flat.
        reduction: The reduction.
    """
    nbytes = out.numel() * like.element_size()
    spans = [(r * nbytes, (r + 1) * nbytes) for r in levels.counterparts.ranks]
    with autograd.shown(SHOWN):
        _reduce(call, levels, spans, out, like, reduction)


def reduce_shares(
    call: OpCall,
    levels: Levels,
    like: torch.Tensor,
    nbytes: int,
    targets: Sequence[torch.Tensor],
    out_offset: int,
    reduction: str,
) -> None:
    """An all-reduce: each rank of a host sees to one share of it.

    Args:
        call: The call.
        levels: How its group meets.
        like: Of the elements' type.
        nbytes: Bytes of the input.
        targets: The segment of the result on each rank of the host.
        out_offset: Where the result begins there.
        reduction: The reduction.
    """
    place, hosts = levels.place, len(levels.counterparts.ranks)
    # Shares are whole cache lines, which ranks never share, and so are the parts of a share.
    share = -(-nbytes // (len(levels.near) * 64)) * 64
    begin, end = min(place * share, nbytes), min((place + 1) * share, nbytes)
    step = -(-(end - begin) // (hosts * 64)) * 64
    cuts = [min(begin + i * step, end) for i in range(hosts + 1)]
    spans = list(itertools.pairwise(cuts))
    index = levels.counterparts.ranks.index(call.rank)
    low, high = spans[index]
    count, device = step // like.element_size(), like.device
    total = torch.zeros(count, dtype=like.dtype, device=device)
    with autograd.shown(SHOWN):
        _reduce(call, levels, spans, total[: (high - low) // like.element_size()], like, reduction)
        whole = torch.empty((hosts, count), dtype=like.dtype, device=device)
        levels.wait(levels.counterparts.gather(list(whole), total))
    for row, (low, high) in zip(whole, spans, strict=True):
        for target in targets:
            copy_bytes(target, out_offset + low, as_bytes(row)[: high - low], high - low)


def _reduce(
    call: OpCall,
    levels: Levels,
    spans: Sequence[tuple[int, int]],
    out: torch.Tensor,
    like: torch.Tensor,
    reduction: str,
) -> None:
    """The reduction of this rank's span, of those that it and its counterparts are to have.

    Args:
        call: The call.
        levels: How its group meets.
        spans: Where each lies behind the call's offset, in bytes.
        out: This rank's, flat.
        like: Of the elements' type.
        reduction: The reduction.
    """
    narrow = like.dtype.is_floating_point and like.dtype.itemsize < 4
    wide = torch.float32 if narrow else like.dtype
    size = max(high - low for low, high in spans) // like.element_size()
    sums = torch.zeros((len(spans), size), dtype=wide, device=like.device)
    within = "sum" if reduction == "avg" and not narrow else reduction
    for row, (low, high) in zip(sums, spans, strict=True):
        parts = parts_of(levels.near_peers, call.offset, low, high, like)
        reduce_into([row[: parts[0].numel()]], parts, within)
    sent = sums.to(like.dtype)
    received = torch.empty_like(sent)
    levels.wait(levels.counterparts.exchange(received, sent))
    rows, ranks = list(received), call.size
    if narrow:
        own = levels.counterparts.ranks.index(call.rank)
        rows = [row if i == own else row.copy_(received[i]) for i, row in enumerate(sums)]
        ranks = len(rows)
    reduce_into([out], [row[: out.numel()] for row in rows], reduction, ranks=ranks)


def _cut(nbytes: int) -> list[tuple[int, int]]:
    """Bytes in parts that are worth a message."""
    step = max(_PART, -(-nbytes // _PARTS))
    return [(low, min(low + step, nbytes)) for low in range(0, nbytes, step)]


def _push(levels: Levels, low: int, high: int) -> None:
    """Copy bytes of this rank's segment to the others of its host."""
    place, size = levels.place, len(levels.near)
    source = levels.near_peers[place][low:high]
    for shift in range(1, size):
        copy_bytes(levels.near_peers[(place + shift) % size], low, source, high - low)
