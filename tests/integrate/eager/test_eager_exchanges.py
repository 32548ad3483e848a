"""All-to-alls of sessions: of equal parts, of unequal ones, and of others than planned."""

from __future__ import annotations

import contextlib
import functools
import time

import pytest
import torch
from doubles import installed
from hypothesis import given
from hypothesis import strategies as st
from ranks import pool_of

from examples import examples

pytestmark = pytest.mark.ranks

TURNS = 4

two = pool_of(2, timeout=100.0)

MEMORY = {"shm": {}, "process group": {"collectives": "process group"}, "debug": {"debug": True}}


def _even(rank, turn):
    import torch.distributed as dist

    out = torch.empty(8)
    dist.all_to_all_single(out, torch.arange(8.0) + 10 * rank + turn)
    return out


def _even_later(rank, turn):
    import torch.distributed as dist

    out = torch.empty(4, 2)
    work = dist.all_to_all_single(out, torch.arange(8.0) + 10 * rank + turn, async_op=True)
    work.wait()
    return out


def _functional_all_to_all(rank, turn):
    ops = torch.ops._c10d_functional
    x = torch.arange(8.0).view(4, 2) + 10 * rank + turn
    return ops.wait_tensor(ops.all_to_all_single(x, [2, 2], [2, 2], "0"))


def _by_rank(rank, turn):
    """Rank 0 gets more rows in each iteration, rank 1 fewer."""
    import torch.distributed as dist

    counts = 3 + turn, 5 - turn
    out = torch.empty(2 * counts[rank])
    received = [counts[rank]] * 2
    dist.all_to_all_single(out, torch.arange(8.0) + 10 * rank + turn, received, [*counts])
    return out


def _functional_by_rank(rank, turn):
    ops = torch.ops._c10d_functional
    counts = 3 + turn, 5 - turn
    x = torch.arange(8.0) + 10 * rank + turn
    return ops.wait_tensor(ops.all_to_all_single(x, [counts[rank]] * 2, [*counts], "0"))


def _iterate(rank, turns, program, session):
    """Iterations in a session, whose results are compared with those without one."""
    from symmplan.coordination.own import own_work

    for turn in range(turns):
        got = program(rank, turn)
        with own_work:
            wanted = program(rank, turn)
        assert torch.equal(got, wanted), (turn, got, wanted)
        del got
        session.step()


def _all_to_all(rank, world_size, program, options):
    import symmplan

    with symmplan.eager(timeout=20.0, memory="shm", **options) as session:
        _iterate(rank, TURNS, program, session)
        assert sum(n for _, n in session.stats.reasons) == session.stats.plain
        reasons = {unplanned.reason for unplanned in session.plan.unplanned}
        return session.stats.served, session.stats.recorded, reasons


ALL_TO_ALLS = [_even, _even_later, _functional_all_to_all, _by_rank, _functional_by_rank]


# Parts that are not all of one size, and the same in each iteration.


def _dealt(rank, turn, counts, **options):
    """Rank r gets ``counts[r]`` rows of each rank."""
    import torch.distributed as dist

    x = torch.arange(float(sum(counts) * 4)).view(sum(counts), -1) + 10 * rank + turn
    out = torch.empty(2 * counts[rank], 4)
    work = dist.all_to_all_single(out, x, [counts[rank]] * 2, [*counts], **options)
    if work is not None:
        work.wait()
    return out


def _uneven(rank, turn):
    return _dealt(rank, turn, (3, 5))


def _uneven_later(rank, turn):
    return _dealt(rank, turn, (5, 2), async_op=True)


def _to_one(rank, turn):
    """Rank 1 gets nothing."""
    return _dealt(rank, turn, (4, 0))


def _functional_uneven(rank, turn):
    """Back and forth: the input of the second is the result of the first."""
    ops = torch.ops._c10d_functional
    counts = 3, 1
    x = torch.arange(8.0).view(4, 2) + 10 * rank + turn
    mine = [counts[rank]] * 2
    there = ops.wait_tensor(ops.all_to_all_single(x, mine, [*counts], "0"))
    return ops.wait_tensor(ops.all_to_all_single(there * 2, [*counts], mine, "0"))


def _in_part(rank, turn):
    """The result is a part of a tensor."""
    import torch.distributed as dist

    counts = 3, 5
    whole = torch.zeros(20)
    out = whole[rank : rank + 2 * counts[rank]]
    dist.all_to_all_single(out, torch.arange(8.0) + turn, [counts[rank]] * 2, [*counts])
    return whole


def _by_owner(rank, turn):
    """Who gets rows works with them; the others do something else, and less."""
    import torch.distributed as dist

    mine = _dealt(rank, turn, (4, 0))
    if rank == 0:
        mine = mine.view(2, -1).sum(0).exp().log().view(4, 4)
        mine = (mine @ mine).mul(0.5) + mine
    rows = mine if rank == 0 else torch.zeros(0, 4)
    back = torch.empty(2, 4)
    dist.all_to_all_single(back, rows, [2, 0], [2, 2] if rank == 0 else [0, 0])
    whole = torch.empty(4, 4)
    dist.all_gather_into_tensor(whole, back * 2)
    return whole + 1


def _asked_for_early(rank, turn):
    """Memory for the second result is asked for before the first one is dropped."""
    import torch.distributed as dist

    import symmplan

    mine = _dealt(rank, turn, (3, 5))
    counts, total = (1, 2), mine.sum()
    other = symmplan.placed.empty(2 * counts[rank], 4)
    del mine
    rows = torch.ones(3, 4) * total
    dist.all_to_all_single(other, rows, [counts[rank]] * 2, [*counts])
    return other + total


def _gathered_by_one(rank, turn):
    """Rank 0 gathers what it got, rank 1 another tensor."""
    import torch.distributed as dist

    mine = _dealt(rank, turn, (4, 0))
    rows = mine if rank == 0 else torch.ones(8, 4)
    whole = torch.empty(16, 4)
    dist.all_gather_into_tensor(whole, rows)
    return whole + 1


def _changes(rank, turn):
    """Other sizes in one iteration of rank 0 than in those that were recorded."""
    return _dealt(rank, turn, (3, 5) if turn != 3 else (4, 4))


STEADY = [_uneven, _uneven_later, _to_one, _functional_uneven, _by_owner]
STEADY += [_asked_for_early, _gathered_by_one]
#: How many calls they make, and how many of them get placements.
CALLS = {_functional_uneven: (2, 2), _by_owner: (3, 3)}
CALLS |= {_asked_for_early: (2, 2), _gathered_by_one: (2, 1)}
OPTIONS = {**MEMORY, "measured": {"choose": "measure"}}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", ALL_TO_ALLS)
def test_even_all_to_alls_are_served_and_others_are_ordinary_on_all_ranks(two, program, options):
    for served, recorded, reasons in two.run(_all_to_all, program, OPTIONS[options]):
        assert recorded == 1
        if "by_rank" in program.__name__:
            assert served == 0
            assert any("not all of one size on all ranks" in why for why in reasons), reasons
        elif options != "measured":
            assert served == TURNS - 1


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", STEADY)
def test_all_to_alls_of_unequal_parts_are_served_if_two_iterations_have_the_same(
    two, program, options
):
    calls, placed = CALLS.get(program, (1, 1))
    for served, recorded, reasons in two.run(_all_to_all, program, OPTIONS[options]):
        assert recorded == calls
        if options != "measured":
            assert served == (TURNS - 2) * placed
            assert any("one size" in why for why in reasons) == (placed < calls), reasons


@pytest.mark.parametrize("options", MEMORY)
def test_a_part_of_a_tensor_does_not_take_unequal_parts(two, options):
    for served, _, reasons in two.run(_all_to_all, _in_part, OPTIONS[options]):
        assert served == 0
        assert any("not a whole tensor" in why for why in reasons)


@pytest.mark.parametrize("options", MEMORY)
def test_unequal_parts_may_change_after_the_plan(two, options):
    for served, recorded, _ in two.run(_all_to_all, _changes, OPTIONS[options]):
        assert (served, recorded) == (TURNS - 3, 1)


def _exchange(how, x, received, sent):
    """What a rank gets, in a tensor that it makes in some way."""
    import torch.distributed as dist

    import symmplan

    if how == "functional":
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_to_all_single(x, received, sent, "0"))
    make = {"placed": symmplan.placed.empty, "zeros": torch.zeros}.get(how, torch.empty)
    out = make(sum(received), 2)
    if how == "placed":
        x = symmplan.placed.out(torch.mul, x, 1.0)
    work = dist.all_to_all_single(out, x, received, sent, async_op=how == "pending")
    if work is not None:
        x = x * 2
        work.wait()
    return out


HOW = ["functional", "placed", "zeros", "pending", "empty"]


def _exchanges(rank, turn, steps):
    """Exchanges of any sizes; what they bring is dropped some calls later.

    One rank alone works with what comes in unequal parts; the others all do the same.
    """
    import torch.distributed as dist

    held, found = [], []
    for number, (sent, held_for, owner, how, gathers) in enumerate(steps):
        if (turn + number) % 2 == rank:
            time.sleep(0.001)
        mine, theirs = list(sent[rank]), [row[rank] for row in sent]
        x = torch.arange(float(2 * sum(mine))).view(-1, 2) + 100 * rank + 10 * number + turn
        out = _exchange(how, x, theirs, mine)
        held.append((number + held_for, out))
        if rank == owner and len({rows for row in sent for rows in row}) > 1:
            found.append((out @ torch.ones(2, 3)).sin().sum())
            out.add_(1.0)
        found.append(torch.zeros(3) + out.sum())
        if gathers:
            whole = torch.empty(6)
            dist.all_gather_into_tensor(whole, found[-1])
            found.append(whole * 1)
        found += [2 * out.sum() for end, out in held if end == number]
        held = [(end, out) for end, out in held if end > number]
    found += [out.sum() for _, out in held]
    return torch.cat([x.view(-1) for x in found])


def _random(rank, world_size, steps, options):
    return _all_to_all(rank, world_size, functools.partial(_exchanges, steps=steps), options)


_ROWS = st.integers(0, 4)
_PARTS = st.tuples(st.tuples(_ROWS, _ROWS), st.tuples(_ROWS, _ROWS))
_STEP = st.tuples(_PARTS, st.integers(0, 3), st.integers(0, 2), st.sampled_from(HOW), st.booleans())


@pytest.mark.further
@examples(40)
@given(steps=st.lists(_STEP, min_size=1, max_size=6), options=st.sampled_from([*OPTIONS.values()]))
def test_random_exchanges_bring_the_same_bits(two, steps, options):
    found = two.run(_random, steps, options)
    served, recorded, reasons = zip(*found, strict=True)
    assert len({*served}) == len({*recorded}) == 1
    assert not any("the ranks do not use" in why for why in {*reasons[0], *reasons[1]})


# All-to-alls that were recorded with equal parts, and have others later.


def _sometimes(rank, turn):
    """In the third iteration rank 0 keeps more to itself, which the others do not see."""
    ops = torch.ops._c10d_functional
    mine = 3 if turn == 2 and rank == 0 else 2
    splits = [mine, 2] if rank == 0 else [2, 2]
    x = torch.arange(float(2 * sum(splits))).view(-1, 2) + 10 * rank + turn
    return ops.wait_tensor(ops.all_to_all_single(x, splits, splits, "0"))


def _turned(rank, turn):
    """Each rank has as many rows as ever, but those of each peer are others."""
    ops = torch.ops._c10d_functional
    splits = [3, 1] if turn == 2 else [2, 2]
    received = [splits[rank]] * 2
    x = torch.arange(8.0).view(4, 2) + 10 * rank + turn
    rows = ops.wait_tensor(ops.all_to_all_single(x, received, splits, "0"))
    return ops.wait_tensor(ops.all_gather_into_tensor(rows[:1] * 2, 2, "0"))


def _once(rank, turn):
    """The result of an all-to-all is an input of the next, and of a gather."""
    ops = torch.ops._c10d_functional
    a, b = (3, 1) if turn == 2 else (2, 2)
    mine, theirs = ([a, b], [a, b]) if rank == 0 else ([b, a], [b, a])
    x = torch.arange(8.0).view(4, 2) + 10 * rank + turn
    there = ops.wait_tensor(ops.all_to_all_single(x, theirs, mine, "0"))
    back = ops.wait_tensor(ops.all_to_all_single(there, mine, theirs, "0"))
    return back + ops.wait_tensor(ops.all_gather_into_tensor(there, 2, "0"))[2:6]


def _smaller(rank, turn):
    """All ranks have fewer rows in the third iteration."""
    import torch.distributed as dist

    out, x = torch.empty(8), torch.arange(8.0) + 10 * rank + turn
    if turn == 2:
        out, x = out[:4], x[:4]
    dist.all_to_all_single(out, x)
    return out


def _smaller_later(rank, turn):
    import torch.distributed as dist

    out, x = torch.empty(8), torch.arange(8.0) + 10 * rank + turn
    if turn == 2:
        out, x = out[:4], x[:4]
    dist.all_to_all_single(out, x, async_op=True).wait()
    return out


def _uneven_once(rank, turn):
    """Sizes are given in the third iteration only."""
    import torch.distributed as dist

    out, x = torch.empty(8), torch.arange(8.0) + 10 * rank + turn
    if turn == 2:
        k = 3 - 2 * rank
        out = torch.empty(2 * k)
        dist.all_to_all_single(out, x[:4], [k, k], [3, 1])
    else:
        dist.all_to_all_single(out, x)
    return out


LATER = [_sometimes, _turned, _once, _smaller, _smaller_later, _uneven_once]


def _other_sizes(rank, world_size, program, options):
    import symmplan

    with symmplan.eager(timeout=20.0, memory="shm", **options) as session:
        _iterate(rank, TURNS + 1, program, session)
        stats = session.stats
    return stats.recorded, stats.served, stats.plain, stats.reasons


@pytest.mark.parametrize("options", MEMORY)
@pytest.mark.parametrize("program", LATER)
def test_an_all_to_all_with_other_sizes_than_planned_is_ordinary_on_all_ranks(
    two, program, options
):
    for rank, found in enumerate(two.run(_other_sizes, program, MEMORY[options])):
        recorded, served, plain, reasons = found
        ordinary = 2 if program is _once else 1
        if options == "process group" and program is _sometimes and rank == 1:
            ordinary = 0  # its own part of the call is as planned
        assert served == TURNS * recorded - ordinary
        assert plain == ordinary
        assert sum(n for why, n in reasons if "other sizes than planned" in why) == ordinary


def _in_nccls_memory(rank, world_size, program):
    """How often it was served there, and what was raised."""
    import symmplan
    from symmplan.errors import RunError

    said = ""
    with installed():
        session = symmplan.eager(timeout=20.0, memory="nccl", choose="placed")
        with contextlib.suppress(RunError), session:
            for turn in range(TURNS):
                try:
                    program(rank, turn)
                except RunError as error:
                    said = str(error)
                    raise
                session.step()
    return session.stats.served, said


@pytest.mark.parametrize("program", [_even, _uneven, _smaller])
def test_in_nccls_memory_parts_are_equal_and_stay_so(two, program):
    for served, said in two.run(_in_nccls_memory, program):
        assert served == {_even: TURNS - 1, _uneven: 0, _smaller: 1}[program]
        assert ("diverges from its plan" in said) == (program is _smaller)
