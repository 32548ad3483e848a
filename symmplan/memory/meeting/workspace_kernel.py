"""The kernel of `symmplan.memory.meeting.workspace`; only where Triton is.

Words have 32 bits. A workspace has some for calls of even and of odd numbers, one behind the other,
and there for each rank. An empty one is -1: not a number, nor is a half of it. Another such is sent
instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["lamport_all_reduce"]

# ruff: noqa: ANN001, ANN201, ANN202, N803 (Triton reads annotations)
# mypy: disable-error-code="no-untyped-def"


@triton.jit
def _come(place, inside, limit):
    """A peer's words, once there are any, and how often this looked."""
    word = tl.load(place, mask=inside, other=0, volatile=True)
    looks = 0
    while (tl.max((word == -1).to(tl.int32), 0) > 0) & (looks < limit):
        word = tl.load(place, mask=inside, other=0, volatile=True)
        looks += 1
    return word, looks


@triton.jit
def _trap(number):
    tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [number], tl.int32, False, 1)


@triton.jit(do_not_specialize=["numel"])
def lamport_all_reduce(
    given,
    workspace,
    addresses,
    calls,
    numel,
    room,
    limit,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    HALVES: tl.constexpr,
    WHOLE: tl.constexpr,
    TRAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """In place, the sum of all ranks' words: of a float32 each, with ``HALVES`` of two bfloat16.

    Each program sums a block, with ``WHOLE`` all words of it. Of ``calls`` the first says how many
    there were, the second how many programs have ended in this one. A program that waits too long
    ends the device's work with an error, if it ``TRAPS``.
    """
    call = tl.load(calls)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < numel) | WHOLE
    mine = tl.load(given + at, mask=inside, other=0)
    mine = tl.where(mine == -1, 0x7FFFFFFF, mine)
    turn = (call & 1) * RANKS * room
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            there = tl.load(addresses + peer).to(tl.pointer_type(tl.int32))
            there = tl.multiple_of(there, 16) + tl.multiple_of(turn + RANK * room, 4)
            tl.store(there + at, mine, mask=inside, cache_modifier=".wt")
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(RANKS):
        word = mine
        if peer != RANK:
            place = workspace + tl.multiple_of(turn + peer * room, 4) + at
            word, looks = _come(place, inside, limit)
            if TRAPS:  # noqa: SIM102 (what is compiled and what runs)
                if looks >= limit:
                    _trap(looks)
            tl.store(place, -1, mask=inside)
        if HALVES:
            first += (word << 16).to(tl.float32, bitcast=True)
            second += (word & -65536).to(tl.float32, bitcast=True)
        else:
            first += word.to(tl.float32, bitcast=True)
    if HALVES:
        low = first.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = second.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        total = low | high
    else:
        total = first.to(tl.int32, bitcast=True)
    tl.store(given + at, total, mask=inside)
    if tl.atomic_add(calls + 1, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store(calls + 1, 0)
        tl.store(calls, call + 1)
