"""The kernels of `symmplan.integrate.moe.device_rows`; only where Triton is.

Numbers are 64-bit. ``table`` is that of `PaddedRoutes`: a line for each rank, of how many rows it
sends to each, and behind them how many it has. ``addresses`` has where each rank's segment begins,
as seen from here; ``rows_at`` and ``signals`` are offsets there, in bytes.

[Note: signals]
    Of a rank's signals each peer has a word of four kinds: how much of the peer's rows has come,
    ``WHOLE`` for each call (``arrived``), how many calls the peer has taken out of its memory
    (``emptied``), how many times it has told its counts (``counted``), and how many bytes a row of
    its last call has (``widths``). Behind them are two tables of counts, which take turns. But for
    ``widths`` words only grow, so nobody has to reset them, and how far they must have grown
    follows from the calls that this rank has made, which are counted in ``state`` on the device:
    the same kernels serve each replay of a CUDA graph.

    A rank writes to a peer when that has emptied what the last call brought. It takes rows out when
    all programs of all peers have arrived. Whoever signals has written before (release); whoever
    waits reads behind it (acquire), both for all devices (sys).

[Note: loops]
    They are written with ``while``: Triton's interpreter takes no numbers of its own as bounds of a
    range where numpy is 2.4 or newer.

[Note: faults]
    A call that does not fit writes nothing. All ranks have the same table, so all of them find
    that. From then on ``state`` says so and no kernel does or waits for anything: no rank hangs,
    and the host of each raises. A rank that waits too long gives up after ``limit`` looks. Rows of
    different widths have come before a rank finds that. Each rank's fit where they come in by its
    own width, so they have overwritten nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["COUNTS", "FITS", "LATE", "OVERFLOW", "WHOLE", "WIDTHS"]
__all__ += ["exchange_counts", "push_rows", "take_rows"]

#: What ``told`` says first.
FITS, OVERFLOW, COUNTS, LATE, WIDTHS = 0, 1, 2, 3, 4
#: See [Note: signals]; a multiple of how many programs send.
WHOLE = 128

# ruff: noqa: ANN001, ANN201, ANN202, N803 (Triton reads annotations)
# mypy: disable-error-code="no-untyped-def"


@triton.jit
def _words(addresses, rank, offset):
    return (tl.load(addresses + rank) + offset).to(tl.pointer_type(tl.int64))


@triton.jit
def _come(word, wanted, limit):
    """Look at a number until it is as large as wanted; whether it came to that."""
    looks = 0
    while (tl.atomic_add(word, 0, sem="acquire", scope="sys") < wanted) & (looks < limit):
        looks += 1
    return looks < limit


@triton.jit
def _signal(word, more):
    """What all threads of this program have written is there for who sees the number grow."""
    tl.debug_barrier()
    tl.atomic_add(word, more, sem="release", scope="sys")


@triton.jit
def _fault(table, ranks, room, RANKS: tl.constexpr):
    """What is wrong with a table of counts, and with which number."""
    at = tl.arange(0, RANKS)
    there = at < ranks
    line = table + at * (ranks + 1)
    rows = tl.load(line[:, None] + at[None, :], mask=there[:, None] & there[None, :], other=0)
    given = tl.load(line + ranks, mask=there, other=0)
    wrong = (tl.min(rows, 1) < 0) | (tl.sum(rows, 1) > given)
    first = tl.min(tl.where(wrong, at, RANKS), 0)
    most = tl.maximum(tl.max(tl.sum(rows, 0), 0), tl.max(given, 0))
    code = tl.where(first < RANKS, 2, tl.where(most > room, 1, 0))
    return code, tl.where(first < RANKS, first.to(tl.int64), most)


@triton.jit
def _tell(state, told, code, value):
    """Stop for good, and tell the host why; the first reason counts."""
    if tl.load(state + 2) == 0:
        tl.store(told + 1, value)
        tl.store(told, code)
        tl.store(state + 2, 1)


@triton.jit
def _copy(source, target, count, program, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """This program's part of ``count`` elements."""
    block = program.to(tl.int64)
    while block * BLOCK < count:  # see [Note: loops]
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        found = tl.load(source + at, mask=inside, cache_modifier=".cg")
        tl.store(target + at, found, mask=inside)
        block += PROGRAMS


@triton.jit(do_not_specialize=["rank", "ranks", "given", "signals", "limit"])
def exchange_counts(
    counts, table, addresses, state, told, rank, ranks, given, signals, limit, RANKS: tl.constexpr
):
    """Tell all ranks how many rows this one sends to each, and get the table of all. One program.

    See [Note: signals].
    """
    at = tl.arange(0, 2 * RANKS)
    words = ranks + 1
    everything = tl.arange(0, 2 * RANKS * RANKS)
    if tl.load(state + 2) == 0:
        calls = tl.load(state + 3)
        begin = 4 * ranks + (calls & 1) * ranks * words
        line = tl.load(counts + at, mask=at < ranks, other=0)
        line = tl.where(at == ranks, given, line)
        shift = 0
        while shift < ranks:
            theirs = _words(addresses, (rank + shift) % ranks, signals)
            tl.store(theirs + begin + rank * words + at, line, mask=at < words)
            _signal(theirs + 2 * ranks + rank, 1)
            shift += 1
        ours = _words(addresses, rank, signals)
        peer = 0
        while peer < ranks:
            if not _come(ours + 2 * ranks + peer, calls + 1, limit):
                _tell(state, told, 3, peer)
            peer += 1
        inside = everything < ranks * words
        found = tl.load(ours + begin + everything, mask=inside, other=0, cache_modifier=".cg")
        tl.store(table + everything, found, mask=inside)
        tl.store(state + 3, calls + 1)
    else:
        tl.store(table + everything, everything.to(tl.int64) * 0, mask=everything < ranks * words)


@triton.jit(
    do_not_specialize=["rank", "ranks", "from_step", "to_step", "room", "width", "made", "limit"]
)
def push_rows(
    rows,
    result,
    table,
    addresses,
    state,
    told,
    rank,
    ranks,
    from_step,
    to_step,
    room,
    width,
    made,
    rows_at,
    signals,
    limit,
    RANKS: tl.constexpr,
    ALIGN: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    SENDERS: tl.constexpr,
    KEEPERS: tl.constexpr,
):
    """Write each peer's rows into its memory, and this rank's own into the result.

    ``table[from * from_step + to * to_step]`` rows go from one rank to another; each has ``width``
    elements of ``ITEM`` bytes, a multiple of ``ALIGN``. The result's other rows, ``made`` in all,
    get zeros, but for those that `take_rows` takes out. The first programs send; what this rank
    keeps is moved by others, ``KEEPERS`` of them, meanwhile.
    """
    program = tl.program_id(0)
    code, value = _fault(table, ranks, room, RANKS)
    if (code != 0) & (program == 0):
        _tell(state, told, code, value)
    well = (code == 0) & (tl.load(state + 2) == 0)
    at = tl.arange(0, RANKS)
    ours = _words(addresses, rank, signals)
    if well & (program < SENDERS):
        calls = tl.load(state)
        shift = 1
        while shift < ranks:
            peer = (rank + shift) % ranks
            shift += 1
            rows_there = tl.load(table + rank * from_step + peer * to_step)
            count = tl.multiple_of(rows_there * width, ALIGN)
            before = tl.load(table + rank * from_step + at * to_step, mask=at < peer, other=0)
            source = rows + tl.multiple_of(tl.sum(before, 0) * width, ALIGN)
            ahead = tl.load(table + at * from_step + peer * to_step, mask=at < rank, other=0)
            target = tl.multiple_of(tl.sum(ahead, 0) * width, ALIGN)
            if _come(ours + ranks + peer, calls, limit):
                theirs = _words(addresses, peer, signals)
                if program == 0:
                    tl.store(theirs + 3 * ranks + rank, width.to(tl.int64) * ITEM)
                there = tl.load(addresses + peer) + rows_at
                there = tl.multiple_of(there.to(tl.pointer_type(rows.dtype.element_ty)), 16)
                _copy(source, there + target, count, program, BLOCK, SENDERS)
                _signal(theirs + rank, WHOLE // SENDERS)
            else:
                _tell(state, told, 3, peer)
    if program >= SENDERS:
        keeper = program - SENDERS
        come = tl.load(table + at * from_step + rank * to_step, mask=at < ranks, other=0)
        filled = tl.sum(come, 0) * 0
        if well:
            filled = tl.sum(come, 0) * width
            mine = tl.load(table + rank * from_step + rank * to_step)
            count = tl.multiple_of(mine * width, ALIGN)
            before = tl.load(table + rank * from_step + at * to_step, mask=at < rank, other=0)
            source = rows + tl.multiple_of(tl.sum(before, 0) * width, ALIGN)
            target = tl.multiple_of(tl.sum(tl.where(at < rank, come, 0), 0) * width, ALIGN)
            _copy(source, result + target, count, keeper, BLOCK, KEEPERS)
        whole = made.to(tl.int64) * width
        empty = filled + keeper * BLOCK
        while empty < whole:
            rest = empty + tl.arange(0, BLOCK)
            tl.store(result + rest, tl.zeros((BLOCK,), result.dtype.element_ty), mask=rest < whole)
            empty += KEEPERS * BLOCK


@triton.jit(do_not_specialize=["rank", "ranks", "from_step", "to_step", "room", "width", "limit"])
def take_rows(
    result,
    table,
    addresses,
    state,
    told,
    rank,
    ranks,
    from_step,
    to_step,
    room,
    width,
    rows_at,
    signals,
    limit,
    RANKS: tl.constexpr,
    ALIGN: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Take out what the peers have pushed, in rows as wide as this rank's."""
    program = tl.program_id(0)
    code, _ = _fault(table, ranks, room, RANKS)
    if (code == 0) & (tl.load(state + 2) == 0):
        at = tl.arange(0, RANKS)
        ours = _words(addresses, rank, signals)
        come = tl.load(table + at * from_step + rank * to_step, mask=at < ranks, other=0)
        arrived = (tl.load(state) + 1) * WHOLE
        shift = 1
        while shift < ranks:
            peer = (rank + ranks - shift) % ranks
            shift += 1
            rows_here = tl.load(table + peer * from_step + rank * to_step)
            count = tl.multiple_of(rows_here * width, ALIGN)
            begin = tl.multiple_of(tl.sum(tl.where(at < peer, come, 0), 0) * width, ALIGN)
            if _come(ours + peer, arrived, limit):
                wide = tl.load(ours + 3 * ranks + peer, cache_modifier=".cg")
                if wide == width.to(tl.int64) * ITEM:
                    here = tl.load(addresses + rank) + rows_at
                    here = tl.multiple_of(here.to(tl.pointer_type(result.dtype.element_ty)), 16)
                    _copy(here + begin, result + begin, count, program, BLOCK, PROGRAMS)
                else:
                    _tell(state, told, 4, peer)
            else:
                _tell(state, told, 3, peer)
        tl.debug_barrier()
        if tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
            tl.store(state + 1, 0)
            tl.store(state, tl.load(state) + 1)
            shift = 1
            while shift < ranks:
                peer = (rank + shift) % ranks
                _signal(_words(addresses, peer, signals) + ranks + rank, 1)
                shift += 1
