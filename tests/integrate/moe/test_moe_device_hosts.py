"""Rows of devices over several hosts, on CPU ranks: see `device_hosts`.

`tests/gpu/test_hosts_experts_gpu.py` runs whole programs on devices.
"""

from __future__ import annotations

import functools
import os
import random
import time

import pytest
import torch
from device_hosts import files_of, segment_on_hosts
from ranks import pool_of

pytestmark = pytest.mark.ranks
_NBYTES = 1 << 20


def _on_hosts(rank, size, *, per_host=2, mixed=False):
    """Ranks on hosts, one host after the other or in turn."""
    hosts = size // per_host
    os.environ["NCCL_HOSTID"] = f"host {rank % hosts if mixed else rank // per_host}"


def _crosswise(rank, size):
    """Two ranks on each host, of which the second host has those in between."""
    os.environ["NCCL_HOSTID"] = f"host {'abba'[rank]}"


four = pool_of(4, setup=_on_hosts, timeout=60.0)
crosswise = pool_of(4, setup=_crosswise, timeout=60.0)
mixed = pool_of(4, setup=functools.partial(_on_hosts, mixed=True), timeout=60.0)
six = pool_of(6, setup=_on_hosts, timeout=60.0)


def _tables(chance, size):
    """Who sends how many rows to whom: any, few, of one rank alone, to one rank alone, none."""
    kind = chance.choice(["any", "any", "few", "from one", "to one", "none"])
    one, most = chance.randrange(size), {"few": 2, "none": 0}.get(kind, 9)
    table = [[chance.randint(0, most) for _ in range(size)] for _ in range(size)]
    for sender, receiver in ((s, r) for s in range(size) for r in range(size)):
        if (kind == "from one" and sender != one) or (kind == "to one" and receiver != one):
            table[sender][receiver] = 0
    return tuple(map(tuple, table))


def _rows(chance, table, rank):
    """Rows of which some are equal, anywhere in a larger tensor; all ranks draw equally often."""
    width = chance.choice([(8,), (5,), (3, 2), (), (1030,)])
    dtype = chance.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
    kinds, begin = chance.choice([1, 3, 1000]), chance.randrange(2)
    generator = torch.Generator().manual_seed(chance.randrange(2**31) + rank)
    kept = torch.randint(0, 250, (kinds, *width), generator=generator).to(dtype)
    rows = kept[torch.randint(kinds, (sum(table[rank]),), generator=generator)]
    room = torch.empty(begin + rows.numel(), dtype=dtype)[begin:].view(rows.shape)
    return room.copy_(rows)


def _plain(rows, routes):
    """Torch's own exchange."""
    import torch.distributed as dist

    result = rows.new_empty((sum(routes.received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows, routes.received, routes.sent)
    return result


def _cases(seeds, rank, size):
    """Dispatches and combines of random rows: what is sent, along which routes, what comes."""
    from symmplan.integrate.moe.routes import Routes

    cases = []
    for seed in seeds:
        chance = random.Random(seed)
        routes = Routes(_tables(chance, size), rank)
        rows = _rows(chance, routes.table, rank)
        for at in (routes, routes.back):
            want = _plain(rows, at)
            cases.append((seed, rows, at, want))
            rows = want + 1
    return cases


def _exchanged(rank, size, folder, seeds, hosts=2):
    """Dispatches and combines that differ from torch's own, and how many there were."""
    from symmplan.coordination.groups import resolve_groups
    from symmplan.integrate.moe.host_rows import HostRows
    from symmplan.model import Placement

    (group,) = resolve_groups(["default"]).values()
    segment, _ = segment_on_hosts(group, folder, hosts, _NBYTES)
    cases, wrong, slow = _cases(seeds, rank, size), [], random.Random(rank)
    meeting = segment.meeting("default")
    pushes, enter = HostRows(meeting, Placement("s0", 64, _NBYTES // 2), group), meeting.enter

    def late(*call):
        enter(*call)
        time.sleep(slow.choice([0.0, 0.0, 0.0, 0.01]))

    meeting.enter = late
    try:
        for seed, rows, routes, want in cases:
            got = torch.full_like(want, 77)
            take = pushes.start(got, rows, routes)
            time.sleep(slow.choice([0.0, 0.0, 0.0, 0.01]))
            take()
            wrong += [] if torch.equal(got, want) else [(seed, routes.out)]
        return len(cases), wrong
    finally:
        segment.release()


@pytest.mark.further
def test_rows_of_devices_in_two_levels(four, tmp_path):
    assert four.run(_exchanged, files_of(tmp_path, 4, _NBYTES), range(60)) == [(120, [])] * 4


@pytest.mark.further
def test_rows_of_devices_that_are_not_in_the_order_of_hosts(mixed, tmp_path):
    folder = files_of(tmp_path, 4, _NBYTES)
    assert mixed.run(_exchanged, folder, range(60, 120)) == [(120, [])] * 4


@pytest.mark.further
def test_rows_of_devices_whose_counterparts_are_not_in_the_order_of_hosts(crosswise, tmp_path):
    folder = files_of(tmp_path, 4, _NBYTES)
    assert crosswise.run(_exchanged, folder, range(60, 120)) == [(120, [])] * 4


@pytest.mark.further
def test_rows_of_devices_over_three_hosts(six, tmp_path):
    folder = files_of(tmp_path, 6, _NBYTES)
    assert six.run(_exchanged, folder, range(120, 180), 3) == [(120, [])] * 6
