"""Programs of all-to-alls for sessions: of equal parts, of unequal ones, of random ones."""

from __future__ import annotations

import time

import torch
from hypothesis import strategies as st

TURNS = 4


def even(rank, turn):
    import torch.distributed as dist

    out = torch.empty(8)
    dist.all_to_all_single(out, torch.arange(8.0) + 10 * rank + turn)
    return out


def even_later(rank, turn):
    import torch.distributed as dist

    out = torch.empty(4, 2)
    work = dist.all_to_all_single(out, torch.arange(8.0) + 10 * rank + turn, async_op=True)
    work.wait()
    return out


def functional_all_to_all(rank, turn):
    ops = torch.ops._c10d_functional
    x = torch.arange(8.0).view(4, 2) + 10 * rank + turn
    return ops.wait_tensor(ops.all_to_all_single(x, [2, 2], [2, 2], "0"))


def by_rank(rank, turn):
    """Rank 0 gets more rows in each iteration, rank 1 fewer."""
    import torch.distributed as dist

    counts = 3 + turn, 5 - turn
    out = torch.empty(2 * counts[rank])
    received = [counts[rank]] * 2
    dist.all_to_all_single(out, torch.arange(8.0) + 10 * rank + turn, received, [*counts])
    return out


def functional_by_rank(rank, turn):
    ops = torch.ops._c10d_functional
    counts = 3 + turn, 5 - turn
    x = torch.arange(8.0) + 10 * rank + turn
    return ops.wait_tensor(ops.all_to_all_single(x, [counts[rank]] * 2, [*counts], "0"))


def iterate(rank, turns, program, session):
    """Iterations in a session, whose results are compared with those without one."""
    from symmplan.coordination.own import own_work

    for turn in range(turns):
        got = program(rank, turn)
        with own_work:
            wanted = program(rank, turn)
        assert torch.equal(got, wanted), (turn, got, wanted)
        del got
        session.step()


def all_to_all(rank, world_size, program, options):
    import symmplan

    with symmplan.eager(timeout=20.0, **{"memory": "shm", **options}) as session:
        iterate(rank, TURNS, program, session)
        assert sum(n for _, n in session.stats.reasons) == session.stats.plain
        reasons = {unplanned.reason for unplanned in session.plan.unplanned}
        return session.stats.served, session.stats.recorded, reasons


ALL_TO_ALLS = [even, even_later, functional_all_to_all, by_rank, functional_by_rank]


def dealt(rank, turn, counts, **options):
    """Rank r gets ``counts[r]`` rows of each rank."""
    import torch.distributed as dist

    x = torch.arange(float(sum(counts) * 4)).view(sum(counts), -1) + 10 * rank + turn
    out = torch.empty(2 * counts[rank], 4)
    work = dist.all_to_all_single(out, x, [counts[rank]] * 2, [*counts], **options)
    if work is not None:
        work.wait()
    return out


def uneven(rank, turn):
    return dealt(rank, turn, (3, 5))


def uneven_later(rank, turn):
    return dealt(rank, turn, (5, 2), async_op=True)


def even_for_one(rank, turn):
    """The parts of rank 0 are all of one size."""
    import torch.distributed as dist

    rows = [(2, 2), (2, 1)][rank]
    x = torch.arange(4.0 * sum(rows)).view(-1, 4) + 10 * rank + turn
    out = torch.empty(sum(rows), 4)
    dist.all_to_all_single(out, x, [*rows], [*rows])
    return out


def told_on_one(rank, turn):
    """One rank alone makes what it sends in a placement if it is told to."""
    import torch.distributed as dist

    import symmplan

    x = torch.arange(16.0).view(4, 4) + turn
    x = symmplan.placed.out(torch.mul, x, 2) if rank else x + rank
    counts = 1, 3
    out = torch.empty(2 * counts[rank], 4)
    dist.all_to_all_single(out, x, [counts[rank]] * 2, [*counts])
    return out


def to_one(rank, turn):
    """Rank 1 gets nothing."""
    return dealt(rank, turn, (4, 0))


def functional_uneven(rank, turn):
    """Back and forth: the input of the second is the result of the first."""
    ops = torch.ops._c10d_functional
    counts = 3, 1
    x = torch.arange(8.0).view(4, 2) + 10 * rank + turn
    mine = [counts[rank]] * 2
    there = ops.wait_tensor(ops.all_to_all_single(x, mine, [*counts], "0"))
    return ops.wait_tensor(ops.all_to_all_single(there * 2, [*counts], mine, "0"))


def by_owner(rank, turn):
    """Who gets rows works with them; the others do something else, and less."""
    import torch.distributed as dist

    mine = dealt(rank, turn, (4, 0))
    if rank == 0:
        mine = mine.view(2, -1).sum(0).exp().log().view(4, 4)
        mine = (mine @ mine).mul(0.5) + mine
    rows = mine if rank == 0 else torch.zeros(0, 4)
    back = torch.empty(2, 4)
    dist.all_to_all_single(back, rows, [2, 0], [2, 2] if rank == 0 else [0, 0])
    whole = torch.empty(4, 4)
    dist.all_gather_into_tensor(whole, back * 2)
    return whole + 1


def asked_for_early(rank, turn):
    """Memory for the second result is asked for before the first one is dropped."""
    import torch.distributed as dist

    import symmplan

    mine = dealt(rank, turn, (3, 5))
    counts, total = (1, 2), mine.sum()
    other = symmplan.placed.empty(2 * counts[rank], 4)
    del mine
    rows = torch.ones(3, 4) * total
    dist.all_to_all_single(other, rows, [counts[rank]] * 2, [*counts])
    return other + total


def beside_a_sum(rank, turn):
    """What an all-reduce adds up is made before the result of an exchange is dropped."""
    import torch.distributed as dist

    import symmplan

    mine = dealt(rank, turn, (3, 5))
    added = symmplan.placed.out(torch.mul, torch.full((18, 4), 1.0 + turn), 2.0)
    total = mine.sum()
    del mine
    dist.all_reduce(added)
    return added + total


def beside_changing(rank, turn):
    """In sizes that change one rank sends what a gather brought, and multiplies more often."""
    import torch.distributed as dist

    import symmplan

    mine = dealt(rank, turn, (3, 5))
    if rank:
        mine = mine * 2
    whole = torch.empty(8)
    dist.all_gather_into_tensor(whole, symmplan.placed.out(torch.mul, torch.ones(4), 3.0))
    counts = (3 + turn, 5 - turn)
    got = torch.empty(2 * counts[rank])
    sent = whole if rank else torch.arange(8.0)
    dist.all_to_all_single(got, sent, [counts[rank]] * 2, [*counts], async_op=True).wait()
    return torch.cat([got, whole, mine.sum()[None]])


def sent_on_in_changing(rank, turn):
    """What an exchange brings is sent on in sizes that change."""
    import torch.distributed as dist

    mine = dealt(rank, turn, (3, 5)).view(-1)
    rows = [12 + turn, 12 - turn], [20 - turn, 20 + turn]
    got = torch.empty(32)
    received = [row[rank] for row in rows]
    dist.all_to_all_single(got, mine, received, rows[rank], async_op=True).wait()
    return got + mine.sum()


def gathered_by_one(rank, turn):
    """Rank 0 gathers what it got, rank 1 another tensor."""
    import torch.distributed as dist

    mine = dealt(rank, turn, (4, 0))
    rows = mine if rank == 0 else torch.ones(8, 4)
    whole = torch.empty(16, 4)
    dist.all_gather_into_tensor(whole, rows)
    return whole + 1


def changes(rank, turn):
    """Other sizes in one iteration of rank 0 than in those that were recorded."""
    return dealt(rank, turn, (3, 5) if turn != 3 else (4, 4))


STEADY = [
    uneven,
    uneven_later,
    even_for_one,
    told_on_one,
    to_one,
    functional_uneven,
    by_owner,
]
STEADY += [asked_for_early, beside_a_sum, beside_changing, sent_on_in_changing, gathered_by_one]
#: How many calls they make, and how many of them get placements.
CALLS = {functional_uneven: (2, 2), by_owner: (3, 3)}
CALLS |= {asked_for_early: (2, 2), beside_a_sum: (2, 2), gathered_by_one: (2, 1)}
CALLS |= {beside_changing: (3, 2), sent_on_in_changing: (2, 1)}


def _exchange(how, x, received, sent, late):
    """What a rank gets, in a tensor made in some way; then it drops those that are late."""
    import torch.distributed as dist

    import symmplan

    if how == "functional":
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_to_all_single(x, received, sent, "0"))
    make = {"placed": symmplan.placed.empty, "zeros": torch.zeros}.get(how, torch.empty)
    out = make(sum(received), 2)
    if how == "placed":
        x = symmplan.placed.out(torch.mul, x, 1.0)
    late.clear()
    work = dist.all_to_all_single(out, x, received, sent, async_op=how == "pending")
    if work is not None:
        x = x * 2
        work.wait()
    return out


HOW = ["functional", "placed", "zeros", "pending", "empty"]


def exchanges(rank, turn, steps):
    """Exchanges of any sizes; what they bring is dropped some calls later.

    One rank alone works with what comes in unequal parts, and drops it at once; the others all do
    the same, and have asked for memory for the next exchange before.
    """
    import torch.distributed as dist

    held, found, late = [], [], []
    for number, (sent, held_for, owner, how, gathers) in enumerate(steps):
        if (turn + number) % 2 == rank:
            time.sleep(0.001)
        mine, theirs = list(sent[rank]), [row[rank] for row in sent]
        x = torch.arange(float(2 * sum(mine))).view(-1, 2) + 100 * rank + 10 * number + turn
        out = _exchange(how, x, theirs, mine, late)
        late.clear()
        unequal = len({rows for row in sent for rows in row}) > 1
        held.append((number + held_for, out, unequal))
        if rank == owner and unequal:
            found.append((out @ torch.ones(2, 3)).sin().sum())
            out.add_(1.0)
        found.append(torch.zeros(3) + out.sum())
        if gathers:
            whole = torch.empty(6)
            dist.all_gather_into_tensor(whole, found[-1])
            found.append(whole * 1)
        found += [2 * out.sum() for end, out, _ in held if end == number]
        late += [out for end, out, unequal in held if end == number and unequal and rank != owner]
        held = [one for one in held if one[0] > number]
        del out
    found += [out.sum() for _, out, _ in held]
    return torch.cat([x.view(-1) for x in found])


_ROWS = st.integers(0, 4)


_PARTS = st.tuples(st.tuples(_ROWS, _ROWS), st.tuples(_ROWS, _ROWS))


EXCHANGE = st.tuples(
    _PARTS, st.integers(0, 3), st.integers(0, 2), st.sampled_from(HOW), st.booleans()
)


def smaller(rank, turn):
    """All ranks have fewer rows in the third iteration."""
    import torch.distributed as dist

    out, x = torch.empty(8), torch.arange(8.0) + 10 * rank + turn
    if turn == 2:
        out, x = out[:4], x[:4]
    dist.all_to_all_single(out, x)
    return out
