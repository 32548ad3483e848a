"""All-to-alls of sessions: of equal parts, of unequal ones, and of others than planned."""

from __future__ import annotations

import functools

import pytest
import torch
from exchanged_programs import (
    ALL_TO_ALLS,
    CALLS,
    EXCHANGE,
    STEADY,
    TURNS,
    all_to_all,
    changes,
    exchanges,
    iterate,
    smaller,
)
from hypothesis import given
from hypothesis import strategies as st
from ranks import pool_of

from examples import examples

pytestmark = pytest.mark.ranks
two = pool_of(2, timeout=100.0)
MEMORY = {"shm": {}, "process group": {"collectives": "process group"}, "debug": {"debug": True}}
OPTIONS = {**MEMORY, "measured": {"choose": "measure"}}


def _in_part(rank, turn):
    """The result is a part of a tensor."""
    import torch.distributed as dist

    counts = 3, 5
    whole = torch.zeros(20)
    out = whole[rank : rank + 2 * counts[rank]]
    dist.all_to_all_single(out, torch.arange(8.0) + turn, [counts[rank]] * 2, [*counts])
    return whole


def _taking_turns(rank, turn, first):
    """Two results; the ranks of ``first`` drop one before they ask for memory for the other."""
    import torch.distributed as dist

    import symmplan

    counts = 8, 4
    mine = symmplan.placed.empty(2 * counts[rank], 4)
    x = torch.arange(48.0).view(12, 4) + 10 * rank + turn
    dist.all_to_all_single(mine, x, [counts[rank]] * 2, [*counts])
    total = mine.sum()
    if rank in first:
        del mine
    other = symmplan.placed.empty(2 * counts[rank], 4)
    mine = None
    dist.all_to_all_single(other, x * total, [counts[rank]] * 2, [*counts])
    return other + 1


def _bytes_of_turns(rank, world_size, first):
    import symmplan

    with symmplan.eager(timeout=20.0, memory="shm", choose="placed") as session:
        iterate(rank, TURNS, functools.partial(_taking_turns, first=first), session)
        return session.plan.peak_bytes


@pytest.mark.parametrize(("first", "results"), [((0, 1), 1), ((0,), 2), ((1,), 2), ((), 2)])
def test_results_take_turns_where_all_ranks_drop_one_first(two, first, results):
    assert two.run(_bytes_of_turns, first) == [16 * 4 * 4 * results] * 2


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", ALL_TO_ALLS)
def test_even_all_to_alls_are_served_and_others_are_ordinary_on_all_ranks(two, program, options):
    for served, recorded, reasons in two.run(all_to_all, program, OPTIONS[options]):
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
    for served, recorded, reasons in two.run(all_to_all, program, OPTIONS[options]):
        assert recorded == calls
        if options != "measured":
            assert served == (TURNS - 2) * placed
            assert any("one size" in why for why in reasons) == (placed < calls), reasons


@pytest.mark.parametrize("options", MEMORY)
def test_a_part_of_a_tensor_does_not_take_unequal_parts(two, options):
    for served, _, reasons in two.run(all_to_all, _in_part, OPTIONS[options]):
        assert served == 0
        assert any("not a whole tensor" in why for why in reasons)


@pytest.mark.parametrize("options", MEMORY)
def test_unequal_parts_may_change_after_the_plan(two, options):
    for served, recorded, _ in two.run(all_to_all, changes, OPTIONS[options]):
        assert (served, recorded) == (TURNS - 3, 1)


def _random(rank, world_size, steps, options):
    return all_to_all(rank, world_size, functools.partial(exchanges, steps=steps), options)


@pytest.mark.further
@examples(40)
@given(
    steps=st.lists(EXCHANGE, min_size=1, max_size=6), options=st.sampled_from([*OPTIONS.values()])
)
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


LATER = [_sometimes, _turned, _once, smaller, _smaller_later, _uneven_once]


def _other_sizes(rank, world_size, program, options):
    import symmplan

    with symmplan.eager(timeout=20.0, memory="shm", **options) as session:
        iterate(rank, TURNS + 1, program, session)
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
