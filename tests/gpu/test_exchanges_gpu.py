"""Large all-to-alls, sends and receives of sessions in NCCL's memory: they come to an end.

Small messages would do so wherever their ends lie. `python -m pytest -m gpu
tests/gpu/test_exchanges_gpu.py`, two devices of one host.
"""

from __future__ import annotations

import pytest
import torch
from devices import needs_devices, pool_on

pytestmark = [*needs_devices(), pytest.mark.first]

two = pool_on(2, timeout=60.0)
TURNS = 4
#: Elements of a row: 4 MiB.
ROW = 1 << 20


def _rows(number, rank, turn):
    made = torch.arange(number * 64.0, device="cuda").view(number, 64)
    return (made + 10 * rank + turn).repeat(1, ROW // 64)


def _received(x, counts, rank):
    """Rank r gets ``counts[r]`` rows of each rank."""
    import torch.distributed as dist

    out = torch.empty(2 * counts[rank], ROW, device="cuda")
    dist.all_to_all_single(out, x, [counts[rank]] * 2, [*counts])
    return out


def _gathered(rank, turn):
    import torch.distributed as dist

    whole = torch.empty(8, ROW, device="cuda")
    dist.all_gather_into_tensor(whole, _rows(4, rank, turn))
    return whole


def _copied(rank, turn):
    return _received(_rows(8, rank, turn), (3, 5), rank) + 1


def _in_placements(rank, turn):
    import torch.distributed as dist

    import symmplan

    counts = 1, 3
    sent = symmplan.placed.out(torch.add, _rows(4, rank, turn), 1.0)
    mine = _received(sent, counts, rank)
    del sent
    sums = symmplan.placed.out(torch.mul, mine, 2.0)
    del mine
    back = torch.empty(4, ROW, device="cuda")
    dist.all_to_all_single(back, sums, [*counts], [counts[rank]] * 2)
    return back + 1


def _even_for_one(rank, turn):
    import torch.distributed as dist

    rows = [(4, 4), (4, 2)][rank]
    out = torch.empty(sum(rows), ROW, device="cuda")
    dist.all_to_all_single(out, _rows(sum(rows), rank, turn), [*rows], [*rows])
    return out + 1


def _to_one(rank, turn):
    return _received(_rows(8, rank, turn), (8, 0), rank) + 1


def _changing(rank, turn):
    """Ordinary, of what a gather has brought to a placement; one rank sends something else."""
    whole = _gathered(rank, turn)
    counts = (3 + turn % 2, 5 - turn % 2)
    return _received(whole if rank else _rows(8, rank, turn), counts, rank).sum(0) + whole


def _sent_on(rank, turn):
    import torch.distributed as dist

    whole, got = _gathered(rank, turn), torch.empty(8, ROW, device="cuda")
    if rank:
        dist.send(whole, 0)
        got.copy_(whole)
    else:
        dist.recv(got, 1)
    return whole + got


def _in_lists(rank, turn):
    import torch.distributed as dist

    whole, got = _gathered(rank, turn), torch.empty(8, ROW, device="cuda")
    dist.all_to_all([*got.chunk(2)], [*whole.chunk(2)])
    return whole + got


_KEPT = []


def _kept(rank, turn):
    """The result cannot be in a placement, so the input is in none."""
    import symmplan

    ops = torch.ops._c10d_functional
    x = symmplan.placed.out(torch.mul, _rows(8, rank, turn), 2.0)
    pending = ops.all_to_all_single(x, [4, 4], [4, 4], torch.distributed.group.WORLD.group_name)
    _KEPT[:] = [pending.view(-1)]
    _KEPT.append(ops.wait_tensor(pending))
    return _KEPT[-1] + 1


#: How many of each iteration's calls are served, and from which iteration on.
PROGRAMS = {
    _copied: (1, 2),
    _in_placements: (2, 2),
    _even_for_one: (1, 2),
    _to_one: (1, 2),
    _changing: (1, 2),
    _sent_on: (1, 1),
    _in_lists: (1, 1),
    _kept: (0, 1),
}


def _served(rank, world, program):
    import symmplan
    from symmplan.coordination.own import own_work

    torch.cuda.set_device(rank)
    given = {"timeout": 30.0, "memory": "nccl", "choose": "placed"}
    with symmplan.eager(device=torch.device("cuda", rank), **given) as session:
        for turn in range(TURNS):
            with own_work:
                wanted = program(rank, turn)
            got = program(rank, turn)
            assert torch.equal(got, wanted), turn
            del got, wanted
            session.step()
        return session.stats.served, session.stats.copies


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_sent_comes_to_an_end(two, program):
    calls, first = PROGRAMS[program]
    for served, copies in two.run(_served, program):
        assert served == calls * (TURNS - first)
        if program is _in_placements:
            assert copies == 0
