"""Two levels of devices, on CPU ranks: gloo stands for NCCL, and mapped files for CUDA's mappings.

`tests/gpu/test_hosts_gpu.py` runs the same on devices.
"""

from __future__ import annotations

import random
import time

import pytest
import torch
from device_hosts import files_of, segment_on_hosts
from ranks import pool_of

from symmplan.memory.topology import Topology


def _on_hosts(rank, size):
    """Two ranks on each host."""
    import os

    os.environ["NCCL_HOSTID"] = f"host {rank // 2}"


four = pool_of(4, setup=_on_hosts, timeout=60.0)


def _collectives(rank, size, folder):
    """How rank and counterparts lie, and which results are wrong."""
    from symmplan.coordination.groups import resolve_groups
    from symmplan.errors import BackendError

    ops = torch.ops.symmplan
    (group,) = resolve_groups(["default"]).values()
    segment, own = segment_on_hosts(group, folder)
    meeting = segment.meeting("default")
    wrong, chance = [], random.Random(rank)

    def check(what, got, want):
        if not torch.equal(got, want):
            wrong.append((what, got.tolist(), want.tolist()))

    try:
        for turn in range(6):
            time.sleep(chance.choice([0.0, 0.01]))
            dtype = (torch.float32, torch.bfloat16)[turn % 2]
            every = [torch.arange(8.0) + 10 * r + turn for r in range(size)]
            whole = own[256 : 256 + 8 * size * dtype.itemsize].view(dtype)
            ops.all_gather_out(every[rank].to(dtype), size, "default", out=whole)
            check("gather", whole, torch.cat(every).to(dtype))
            given = [torch.arange(8.0 * size) % 7 + r + turn for r in range(size)]
            whole.copy_(given[rank])
            part = torch.empty(8, dtype=dtype)
            ops.reduce_scatter_out(whole, "sum", size, "default", out=part)
            check("scatter", part, sum(given).view(size, -1)[rank].to(dtype))
            whole.copy_(given[rank])
            ops.all_reduce_out(whole, "avg", "default", out=whole)
            check("sum", whole, (sum(given) / size).to(dtype))
            segment.barrier("default")
        with pytest.raises(BackendError, match="several hosts"):
            meeting.peers  # noqa: B018
        return meeting.near, meeting.counterparts.ranks, wrong
    finally:
        segment.release()


@pytest.mark.ranks
def test_collectives_of_devices_in_two_levels(four, tmp_path):
    found = four.run(_collectives, files_of(tmp_path, 4))
    assert [near for near, *_ in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [across for _, across, *_ in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert not any(wrong for *_, wrong in found)


@pytest.mark.parametrize(
    ("facts", "memory", "why"),
    [
        ({}, "cuda", ""),
        ({}, "nccl", "memory='nccl' has no two levels"),
        ({"hosts": 4}, "cuda", "several ranks on each host"),
        ({"per_host": 0}, "cuda", "equally many ranks on each host"),
        ({"peer_access": False}, "cuda", "devices of one host to reach each other"),
    ],
)
def test_what_devices_two_levels_serve(facts, memory, why):
    topology = Topology(**{"ranks": 4, "hosts": 2, "device": "cuda", **facts})
    assert topology.two_levels(memory) == (why == "")
    assert why in topology.why_ordinary(memory)


def test_devices_that_nvlink_joins_have_one_level():
    assert not Topology(ranks=4, hosts=2, device="cuda", nvlink=True).two_levels("cuda")
