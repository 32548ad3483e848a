"""Which memory the groups of a simulated world get, with its hosts and NVLink domains."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import symmplan
from symmplan.choose.tuning_table import Table, TuningRow

F = torch.ops._c10d_functional


def _trained(shape):
    """A step of FSDP2, or of HSDP."""
    names = ("replicate", "shard")[-len(shape) :]
    model = torch.nn.Linear(2048, 2048, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    symmplan.fsdp.apply(model, capacity="1GiB")
    model(torch.ones(4, 2048)).sum().backward()


def _report(shape, **given):
    return symmplan.simulate(functools.partial(_trained, shape), ranks=math.prod(shape), **given)


_PLACED = {"copy engine", "push"}
_OF_FOUR = {"ranks_per_host": 4}


@pytest.mark.parametrize(
    ("shape", "hosts", "memory", "algorithms"),
    [
        ((8,), {}, "nccl", _PLACED),
        ((8,), _OF_FOUR, "cuda", {"ordinary"}),
        ((8,), {**_OF_FOUR, "ranks_per_domain": 8}, "nccl", _PLACED),
        ((8,), {"ranks_per_host": 3}, "nccl", {"ordinary"}),
        ((8,), {**_OF_FOUR, "memory": "shm"}, "shm", {"two-level"}),
        ((2, 4), _OF_FOUR, "nccl", _PLACED),
        ((1,), {"ranks_per_host": 1}, "nccl", set()),
    ],
)
def test_the_memory_is_what_devices_get(shape, hosts, memory, algorithms):
    report = _report(shape, **hosts)
    assert report.memory == memory
    ran = {c.algorithm for c in report.collectives if c.op in ("all_gather", "reduce_scatter")}
    assert ran == algorithms


@pytest.mark.parametrize(
    ("seconds", "hosts", "algorithms"),
    [
        ({"ordinary": 2.0, "two-level": 1.0}, _OF_FOUR, {"two-level"}),
        ({"ordinary": 2.0, "two-level": 1.0}, {}, _PLACED),
        ({"ordinary": 2.0, "symmetric": 1.0}, _OF_FOUR, {"ordinary"}),
        ({"ordinary": 2.0, "symmetric": 1.0}, {}, {"symmetric"}),
    ],
)
def test_a_row_of_a_table_says_nothing_of_groups_on_more_hosts_or_fewer(
    tmp_path, seconds, hosts, algorithms
):
    table = tmp_path / "choices.json"
    kinds, found = ("all_gather", "reduce_scatter"), min(seconds, key=seconds.__getitem__)
    rows = tuple(TuningRow(op, 8, 16 << 20, found, seconds) for op in kinds)
    table.write_text(Table("cuda", rows).to_json())
    report = _report((8,), choices=table, **hosts)
    ran = {c.algorithm for c in report.collectives if c.op in kinds}
    assert ran == algorithms


@pytest.mark.parametrize("memory", ["nccl", "cuda"])
def test_a_memory_that_was_given_is_kept(memory):
    report = _report((8,), **_OF_FOUR, memory=memory)
    assert report.memory == memory
    reasons = {u.reason for u in report.plans[0].unplanned}
    served = [r for r in reasons if r.endswith("memory='cuda' serves it in two levels")]
    assert len(served) == (memory == "nccl")


def test_programs_of_a_world_have_one_memory():
    def program():
        _trained((8,))
        _trained((2, 4))

    report = symmplan.simulate(program, ranks=8, **_OF_FOUR)
    assert report.memory == "cuda"
    assert len(report.plans) == 2


def test_groups_of_one_rank_decide_nothing():
    def program():
        one = init_device_mesh("cpu", (8, 1)).get_group(1)
        with symmplan.eager(one) as session:
            F.wait_tensor(F.all_reduce(torch.ones(4), "sum", one.group_name))
            session.step()
        _trained((8,))

    assert symmplan.simulate(program, ranks=8, **_OF_FOUR).memory == "cuda"
