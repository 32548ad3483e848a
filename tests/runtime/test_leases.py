"""The ledger of a segment's bytes: who holds which, who used them last, who makes algorithm."""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from symmplan.memory.leased import lease_out
from symmplan.runtime.leases import Lease, Ledger, Run, StorageLease, in_use


def live(ledger):
    """Which of 64 bytes are held, as spans of one lease each."""
    found = []
    for byte in range(64):
        for lease in ledger.holders(byte, byte + 1):
            if found and found[-1][1:] == (byte, lease):
                found[-1] = (found[-1][0], byte + 1, lease)
            else:
                found.append((byte, byte + 1, lease))
    return [(begin, end) for begin, end, _ in found]


class Waits(Lease):
    """A lease that notes who waited for it."""

    def wait(self):
        self._marks.append("waited")

    @property
    def waits(self):
        return len(self._marks)


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 16)), max_size=30))
def test_whoever_takes_bytes_waits_for_all_who_had_them(ranges):
    """A model: each byte remembers its last lease; a new one waits for exactly those."""
    kept = []
    ledger = Ledger(kept)
    last = [None] * 32
    for begin, length in ranges:
        end = begin + length
        before = {t: t.waits for t in last if t is not None}
        old = {t for t in last[begin:end] if t is not None}
        lease = Waits()
        ledger.take(begin, end, lease)
        assert {t for t in before if t.waits > before[t]} == old
        last[begin:end] = [lease] * length
        assert ledger.holders(begin, end) == [lease]
        for byte in range(32):
            held = [last[byte]] if last[byte] is not None and last[byte].live else []
            assert Ledger(kept).holders(byte, byte + 1) == held
        assert {b for x, y in live(ledger) for b in range(x, y)} == {
            b for b, t in enumerate(last) if t is not None and t.live
        }
        assert kept == sorted(kept, key=lambda piece: piece[0])
        assert all(e <= b for (_, e, _), (b, _, _) in itertools.pairwise(kept))
        if begin % 3 == 0:
            lease.drop()
            assert not ledger.holders(begin, end)


class Owner:
    """Somebody who can leave, or cannot."""

    def __init__(self, lease, can):
        self.lease, self.can = lease, can
        lease.owner = self

    def step_aside(self):
        if self.can:
            self.lease.drop()
        return self.can


def test_who_can_leave_makes_algorithm_and_who_cannot_is_told_of():
    ledger, leases = Ledger([]), [Lease() for _ in range(4)]
    for i, lease in enumerate(leases):
        ledger.take(10 * i, 10 * i + 10, lease)
    Owner(leases[0], can=True)
    Owner(leases[1], can=False)
    leases[3].drop()
    assert ledger.give_room(5, 40, but=leases[2:3]) == ([leases[0]], [leases[1]])
    assert ledger.give_room(5, 40) == ([], [leases[1], leases[2]])
    assert live(ledger) == [(10, 20), (20, 30)]
    assert ledger.give_room(0, 10) == ([], [])


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[2:], lambda x: x.view(torch.uint8)])
def test_a_storage_is_held_as_long_as_anybody_has_a_tensor_on_it(view):
    lease = StorageLease(lease_out(torch.zeros(8)))
    ledger = Ledger([])
    ledger.take(0, 32, lease)
    assert ledger.holders(0, 32) == []
    there = view(lease.tensor.detach())
    assert ledger.holders(31, 32) == [lease]
    del there
    gc.collect()
    assert ledger.holders(0, 32) == []


def _part(pieces, begin, end):
    """Some bytes of a segment, which are its own there."""
    return SimpleNamespace(leases=pieces, begin=begin, nbytes=end - begin, tensor=_BYTES[begin:end])


_BYTES = torch.zeros(64, dtype=torch.uint8)


def test_a_run_sets_aside_what_cannot_leave_and_puts_it_back():
    """In bytes that lie somewhere in a segment; of its arguments, those in the way are copied."""
    pieces = []
    ledger, keeps = Ledger(pieces), Lease()
    ledger.take(20, 24, keeps)
    _BYTES.copy_(torch.arange(64))
    args = [_BYTES[20:22], 7, torch.ones(3)]
    run, before = Run(Lease()), list(args)
    part = {"s": _part(pieces, 16, 48)}
    assert run.hold(part, [("s", 0, 10), ("s", 16, 20)], args) == 1
    assert ledger.holders(16, 48) == [keeps, run.lease]
    assert live(ledger) == [(20, 24), (32, 36)]
    part["s"].tensor.fill_(255)
    assert args[0].tolist() == [20, 21]
    assert args[1:] == before[1:]
    assert in_use(part.values())
    run.over()
    assert _BYTES[16:26].tolist() == list(range(16, 26))
    assert _BYTES[26:48].eq(255).all()
    assert live(ledger) == [(20, 24)]
    assert in_use([SimpleNamespace(leases=pieces, begin=16, nbytes=5)])
    assert not in_use([SimpleNamespace(leases=pieces, begin=24, nbytes=40)])


def test_a_run_goes_ahead_where_somebody_does_not_mind_or_leaves():
    pieces = []
    ledger, stays, leaves = Ledger(pieces), Lease(), Lease()
    ledger.take(0, 8, stays)
    ledger.take(8, 16, leaves)
    Owner(leaves, can=True)
    run = Run(Lease())
    assert run.hold({"s": _part(pieces, 0, 64)}, [("s", 4, 12)], [], but=[stays]) == 0
    assert run.left == [leaves]
    assert live(ledger) == [(0, 4), (4, 12)]
    run.over()
    assert live(ledger) == [(0, 4)]


def test_a_claim_takes_what_nobody_holds_and_else_says_who_does():
    pieces = []
    ledger = Ledger(pieces)
    first, second = (StorageLease(lease_out(torch.zeros(8)), name=name) for name in "ab")
    assert ledger.claim(0, 32, first) == []
    held = first.tensor.detach()
    assert ledger.claim(0, 32, first) == [first]
    assert ledger.claim(16, 48, second) == ledger.claim(31, 32, None) == [first]
    assert [lease for *_, lease in pieces] == [first]
    del held
    gc.collect()
    assert ledger.claim(31, 32, None) == ledger.claim(16, 48, second) == []
    held = second.tensor.detach()
    assert ledger.claim(0, 32, first) == [second]
    assert ledger.claim(0, 16, first) == []
    assert [(begin, end) for begin, end, _ in pieces] == [(0, 16), (16, 48)]
    del held
