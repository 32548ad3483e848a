"""Sessions in NCCL's memory: both ends of what is sent lie in placements, or neither does.

See [Note: both ends] in `symmplan.place.algorithms`. The doubles refuse what would never come to an
end on devices.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from unittest import mock

import pytest
import torch
from doubles import installed, state
from exchanged_programs import (
    EXCHANGE,
    TURNS,
    all_to_all,
    asked_for_early,
    beside_a_sum,
    beside_changing,
    by_owner,
    changes,
    even,
    even_for_one,
    exchanges,
    functional_uneven,
    smaller,
    to_one,
    told_on_one,
    uneven,
)
from hypothesis import given
from hypothesis import strategies as st
from ranks import pool_of

from examples import examples

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=100.0)


def _in_nccls_memory(rank, world_size, program):
    """How it was served there, what was copied, and what was raised."""
    import symmplan
    from symmplan.coordination.own import own_work
    from symmplan.errors import RunError

    said = ""
    with installed(races=True):
        session = symmplan.eager(timeout=20.0, memory="nccl", choose="placed")
        with contextlib.suppress(RunError), session:
            for turn in range(TURNS):
                _KEPT.clear()
                with own_work:
                    wanted = program(rank, turn)
                _KEPT.clear()
                try:
                    got = program(rank, turn)
                except RunError as error:
                    said = str(error)
                    raise
                assert torch.equal(got, wanted), (turn, got, wanted)
                del got
                session.step()
        stats = session.stats
        assert state().races == []
    return stats.served, stats.recorded, stats.copies, said


#: Results that outlive an iteration.
_KEPT = []


def _dealt_in_placements(rank, turn):
    """Rank 1 sends more than it receives, and the other way round; nothing needs a copy."""
    import torch.distributed as dist

    import symmplan

    counts = 1, 3
    x = symmplan.placed.out(torch.add, torch.arange(16.0).view(4, 4), torch.tensor(turn + rank))
    mine = torch.empty(2 * counts[rank], 4)
    dist.all_to_all_single(mine, x, [counts[rank]] * 2, [*counts])
    del x
    sums = symmplan.placed.out(torch.cumsum, mine.view(2, -1), 0).view(-1, 4)
    del mine
    back = torch.empty(4, 4)
    dist.all_to_all_single(back, sums, [*counts], [counts[rank]] * 2)
    return back + 1


def _made_while_pending(rank, turn):
    """What is sent next is made while an exchange is under way, whose input is a copy."""
    import torch.distributed as dist

    import symmplan

    counts = 1, 3
    x = torch.arange(16.0).view(4, 4) + turn + rank
    mine = torch.empty(2 * counts[rank], 4)
    work = dist.all_to_all_single(mine, x, [counts[rank]] * 2, [*counts], async_op=True)
    y = symmplan.placed.out(torch.add, torch.ones(1, 4), torch.tensor(turn + rank))
    work.wait()
    total, more = mine.sum(), (1, 0)
    del mine
    got = torch.empty(2 * more[rank], 4)
    dist.all_to_all_single(got, y, [more[rank]] * 2, [*more])
    return got + total


def _of_one_by_turns(rank, turn):
    """Sizes that change, of what a gather brought; one rank alone sends that."""
    y = _gathered(rank, turn)
    sent = y if rank else torch.arange(8.0)
    counts = (3 + turn, 5 - turn)
    return _received(sent, counts, rank) + y.sum()


def _gathered(rank, turn):
    import torch.distributed as dist

    whole = torch.empty(8)
    dist.all_gather_into_tensor(whole, torch.arange(4.0) + 10 * rank + turn)
    return whole


def _received(x, counts, rank, out=None):
    import torch.distributed as dist

    out = torch.empty(2 * counts[rank]) if out is None else out[: 2 * counts[rank]]
    dist.all_to_all_single(out, x, [counts[rank]] * 2, [*counts])
    return out


def _reduced_by_one(rank, turn):
    """One rank alone reduces what it got, the other one something else, and then that in lists."""
    import torch.distributed as dist

    mine = _received(torch.arange(7.0) + turn, (4, 3), rank)
    added = mine if rank == 0 else torch.arange(8.0) + turn
    dist.reduce(added, 0)
    got = [torch.empty(2), torch.empty(2)]
    dist.all_gather(got, mine[:2] * 1)
    return torch.cat([added, *got])


def _added_up_by_one(rank, turn):
    """The same, where a declared collective adds up."""
    import torch.distributed as dist

    mine = _received(torch.arange(7.0) + turn, (4, 3), rank)
    added = mine if rank == 0 else torch.arange(8.0) + turn
    dist.all_reduce(added)
    return added + 1


def _into_a_placement(rank, turn):
    """Memory for a gather gets rows of an all-to-all before, whose sizes change."""
    import torch.distributed as dist

    import symmplan

    counts = (3 + turn, 5 - turn)
    rows = symmplan.placed.empty(16)
    _received(torch.arange(8.0) + 10 * rank + turn, counts, rank, rows)
    rows[2 * counts[rank] :] = 0
    whole = torch.empty(32)
    dist.all_gather_into_tensor(whole, rows)
    return whole + 1


def _sent_on(rank, turn):
    """One rank sends what a gather brought."""
    import torch.distributed as dist

    y = _gathered(rank, turn)
    z = torch.empty(8)
    if rank:
        dist.send(y, 0)
    else:
        dist.recv(z, 1)
    return y + 1


def _in_lists(rank, turn):
    import torch.distributed as dist

    y, z = _gathered(rank, turn), torch.empty(8)
    dist.all_to_all([*z.chunk(2)], [*y.chunk(2)])
    return z + 1


def _kept_with_its_view(rank, turn):
    """The result cannot be in a placement, so the input is in none."""
    import symmplan

    ops = torch.ops._c10d_functional
    x = symmplan.placed.out(torch.mul, torch.arange(8.0) + rank + turn, 10)
    pending = ops.all_to_all_single(x, [4, 4], [4, 4], "0")
    _KEPT.append(pending.view(4, 2))
    _KEPT.append(ops.wait_tensor(pending))
    return _KEPT[-1] + 1


#: How many calls are served in all iterations, are recorded in each, and are copied.
BOTH_ENDS = {
    even: (TURNS - 1, 1, None),
    uneven: (TURNS - 2, 1, TURNS - 2),
    even_for_one: (TURNS - 2, 1, TURNS - 2),
    told_on_one: (TURNS - 2, 1, TURNS - 2),
    to_one: (TURNS - 2, 1, None),
    functional_uneven: (2 * (TURNS - 2), 2, None),
    by_owner: (3 * (TURNS - 2), 3, None),
    asked_for_early: (2 * (TURNS - 2), 2, None),
    beside_a_sum: (2 * (TURNS - 2), 2, None),
    beside_changing: (2 * (TURNS - 2), 3, None),
    _dealt_in_placements: (2 * (TURNS - 2), 2, 0),
    _made_while_pending: (2 * (TURNS - 2), 2, TURNS - 2),
    _of_one_by_turns: (TURNS - 2, 2, None),
    _reduced_by_one: (TURNS - 2, 1, None),
    _into_a_placement: (TURNS - 2, 2, None),
    _sent_on: (TURNS - 1, 1, None),
    _in_lists: (TURNS - 1, 1, None),
    _kept_with_its_view: (0, 1, 0),
}


@pytest.mark.parametrize("program", BOTH_ENDS)
def test_in_nccls_memory_both_ends_of_what_is_sent_are_in_placements_or_none_is(two, program):
    for served, recorded, copies, said in two.run(_in_nccls_memory, program):
        assert said == ""
        assert (served, recorded) == BOTH_ENDS[program][:2]
        assert BOTH_ENDS[program][2] in (None, copies)


def _ordinary_sums(rank, world_size):
    from symmplan.choose import trials

    def fastest(*_, **__):
        case = sys._getframe(1).f_locals.get("case")
        return "ordinary" if case is not None and "all_reduce" in case.op else "symmetric"

    given = {"memory": "nccl", "choose": "measure"}
    with installed(races=True), mock.patch.object(trials, "fastest", fastest):
        served, recorded, reasons = all_to_all(rank, world_size, _added_up_by_one, given)
    return served, recorded, any("do not pass" in why for why in reasons)


def test_in_nccls_memory_what_one_rank_passes_to_an_ordinary_sum_is_ordinary(two):
    assert two.run(_ordinary_sums) == [(0, 2, True)] * 2


def _placements(rank, world_size):
    import symmplan

    with installed(), symmplan.eager(timeout=20.0, memory="nccl", choose="placed") as session:
        for turn in range(3):
            _made_while_pending(rank, turn)
            session.step()
        return {name: (place.offset, place.end) for name, place in session.plan.placements.items()}


def test_what_is_made_while_a_copy_is_sent_lies_beside_it(two):
    for places in two.run(_placements):
        (begin, end), (other, _) = (places[f"all_to_all_single_into{n}.input"] for n in ("", "_1"))
        assert not begin <= other < end


@pytest.mark.parametrize("program", [smaller, changes])
def test_in_nccls_memory_sizes_stay(two, program):
    for served, _, _, said in two.run(_in_nccls_memory, program):
        assert served == 1
        assert "diverges from its plan" in said


def _random_in_nccls_memory(rank, world_size, steps):
    program = functools.partial(exchanges, steps=steps)
    with installed(races=True):
        found = all_to_all(rank, world_size, program, {"memory": "nccl", "choose": "placed"})
        assert state().races == []
    return found


@pytest.mark.further
@examples(40)
@given(steps=st.lists(EXCHANGE, min_size=1, max_size=6))
def test_random_exchanges_in_nccls_memory_bring_the_same_bits(two, steps):
    found = two.run(_random_in_nccls_memory, steps)
    served, recorded, reasons = zip(*found, strict=True)
    assert len({*served}) == len({*recorded}) == 1
    assert not any("the ranks do not use" in why for why in {*reasons[0], *reasons[1]})
