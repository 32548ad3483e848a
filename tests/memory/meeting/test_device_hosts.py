"""Two levels of devices, on CPU ranks: gloo stands for NCCL, and mapped files for CUDA's mappings.

`tests/gpu/test_hosts_gpu.py` runs the same on devices.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
from device_hosts import files_of, segment_on_hosts
from ranks import pool_of

from symmplan.memory.meeting.topology import Topology


def _on_hosts(rank, size):
    """Two ranks on each host."""
    os.environ["NCCL_HOSTID"] = f"host {rank // 2}"


def _crosswise(rank, size):
    """Two ranks on each host, of which the second host has those in between."""
    os.environ["NCCL_HOSTID"] = f"host {'abba'[rank]}"


four = pool_of(4, setup=_on_hosts, timeout=60.0)
crosswise = pool_of(4, setup=_crosswise, timeout=60.0)


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


@pytest.mark.ranks
def test_counterparts_need_not_be_in_the_order_of_hosts(crosswise, tmp_path):
    found = crosswise.run(_collectives, files_of(tmp_path, 4))
    assert [near for near, *_ in found] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert [across for _, across, *_ in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert not any(wrong for *_, wrong in found)


@pytest.mark.parametrize(
    ("facts", "memory", "why"),
    [
        ({}, "cuda", ""),
        ({}, "nccl", "memory='nccl' has no two levels; memory='cuda' serves it in two levels"),
        ({"hosts": 4}, "cuda", "several ranks on each host"),
        ({"hosts": 4}, "nccl", "memory='nccl' has no two levels"),
        ({"per_host": 0}, "cuda", "equally many ranks on each host"),
        ({"peer_access": False}, "cuda", "devices of one host to reach each other"),
    ],
)
def test_what_devices_two_levels_serve(facts, memory, why):
    topology = Topology(**{"ranks": 4, "hosts": 2, "device": "cuda", **facts})
    assert topology.two_levels(memory) == (why == "")
    said = topology.why_ordinary(memory)
    assert said.endswith(why)
    assert bool(said) == bool(why)


def test_devices_that_nvlink_joins_have_one_level():
    assert not Topology(ranks=4, hosts=2, device="cuda", nvlink=True).two_levels("cuda")


# ---- what memory="auto" is ----------------------------------------------------------------------

CUDA = torch.device("cuda")
_APART = {"hosts": 2, "device": "cuda"}


class _Allocator:
    """Stands for torch's choice of an allocator, of which CUDA cannot be chosen by name."""

    def __init__(self, name="CUDA", *, used=False):
        self.name, self.used = name, used

    def backend_of(self, _):
        return self.name

    def set_backend(self, name):
        if name != self.name and (self.used or name == "CUDA"):
            raise RuntimeError("no")
        self.name = name

    def put(self, stack):
        """Be torch's, for groups of NCCL."""
        from unittest import mock

        from symmplan.torch_private import nccl, symm_mem

        for where, what, to in (
            (symm_mem, "backend_of", self.backend_of),
            (symm_mem, "set_backend", self.set_backend),
            (nccl, "serves", lambda _: True),
        ):
            stack.enter_context(mock.patch.object(where, what, to))
        return self


class _ProcessGroup:
    """Stands for torch's, of a communicator that registers no windows."""

    def _get_backend(self, device):
        return None


@pytest.mark.parametrize(
    ("groups", "allocator", "name"),
    [
        ([_APART], _Allocator(), "cuda"),
        ([_APART], _Allocator(used=True), "cuda"),
        ([_APART], _Allocator("NCCL"), "nccl"),
        ([_APART, {**_APART, "per_host": 0}], _Allocator(), "cuda"),
        ([_APART, {**_APART, "hosts": 4}], _Allocator(), "cuda"),
        ([_APART, {"device": "cuda"}], _Allocator(), "nccl"),
        ([_APART, {"device": "cuda"}], _Allocator(used=True), "cuda"),
        ([_APART, None], _Allocator(), "nccl"),
        ([{**_APART, "per_host": 0}], _Allocator(), "nccl"),
        ([{**_APART, "hosts": 4}], _Allocator(), "nccl"),
        ([{**_APART, "nvlink": True}], _Allocator(), "nccl"),
        ([{"device": "cuda"}], _Allocator(), "nccl"),
        ([{"device": "cuda", "peer_access": False}], _Allocator(), "nccl"),
        ([], _Allocator(), "local"),
    ],
)
def test_auto_is_cuda_where_only_that_serves(groups, allocator, name, monkeypatch):
    import contextlib

    from symmplan.coordination.groups import Group
    from symmplan.memory import resolve_backend
    from symmplan.process import PROCESS

    given = {}
    for number, of in enumerate(groups):
        process_group = _ProcessGroup()
        given[f"{number}"] = Group(f"{number}", "", size=4, process_group=process_group)
        if of is not None:
            PROCESS.topologies[process_group] = {"cuda": Topology(ranks=4, **of)}
    monkeypatch.setattr(PROCESS, "cuda_memory", False)
    with contextlib.ExitStack() as stack:
        allocator.put(stack)
        assert resolve_backend("auto", CUDA, given).name == name
        assert resolve_backend("auto", CUDA, given).name == name
        if groups and name == "nccl":
            assert allocator.name == "NCCL"


@pytest.mark.parametrize(
    ("theirs", "levels"), [([True, True], True), ([True, False], False), ([False, True], False)]
)
def test_what_peers_have_in_other_groups_counts(theirs, levels):
    import contextlib
    import json

    from symmplan.coordination.groups import Group
    from symmplan.memory.backends.resolve import agree_on_levels
    from symmplan.process import PROCESS

    class Peers:
        """An exchange in which others say what was given."""

        def round(self, phase, mine, groups):
            return {name: [mine, json.dumps(theirs).encode()] for name in groups}

    process_group = _ProcessGroup()
    groups = {"g": Group("g", "", size=2, process_group=process_group)}
    PROCESS.topologies[process_group] = {"cuda": Topology(ranks=2, **_APART)}
    with contextlib.ExitStack() as stack:
        _Allocator().put(stack)
        assert agree_on_levels(Peers(), groups, groups, CUDA) is levels


def _meshes():
    """Groups of four ranks on two hosts of two, by name."""
    import torch.distributed as dist

    near = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    return {"flat": dist.group.WORLD, "near": near[rank // 2], "across": across[rank % 2]}


def _put_devices(stack, number):
    """Let this rank have a device, on a host of that number."""
    from unittest import mock

    from symmplan.memory.meeting import topology
    from symmplan.process import PROCESS

    facts = {"host": f"host {number}", "device": "cuda", "uuid": f"GPU {os.getpid()}"}
    facts |= {"blocked": [], "fabric": "", "multicast": False, "copy_engines": True}
    facts |= {"nccl": [2, 28, 9]}
    PROCESS.topologies.clear()
    PROCESS.cuda_memory = False
    stack.callback(PROCESS.topologies.clear)
    stack.enter_context(mock.patch.object(topology, "facts_of", return_value=facts))


def _agreed(rank, size, of_ranks, memories, taken, hosts):
    """What memory a program gets, twice; its rounds; who asks later what its groups are.

    Args:
        of_ranks: Names of each rank's groups.
        memories: What each rank is given.
        taken: The rank whose allocator is NCCL's.
        hosts: On how many hosts the ranks are.
    """
    import contextlib
    import warnings
    from unittest import mock

    from symmplan.coordination.exchange import Exchange
    from symmplan.errors import AgreementError
    from symmplan.memory.meeting import topology
    from symmplan.runtime.options import Options
    from symmplan.runtime.prepare import Preparation

    meshes = _meshes()
    groups = {name: meshes[name] for name in of_ranks[rank]}
    rounds, round_ = [], Exchange.round

    def noted(exchange, phase, *args, **more):
        rounds.append(phase)
        return round_(exchange, phase, *args, **more)

    def never(*args):
        raise AssertionError("asked again")

    with contextlib.ExitStack() as stack:
        _Allocator("NCCL" if rank == taken else "CUDA").put(stack)
        _put_devices(stack, rank * hosts // size)
        stack.enter_context(mock.patch.object(Exchange, "round", noted))
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))
        preparation = Preparation(Options(memory=memories[rank], timeout=20.0), "it", "it")
        time.sleep(random.Random(rank).choice([0.0, 0.05]))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = [preparation.agree(CUDA, groups) for _ in range(2)]
        except AgreementError as error:
            return error.option, error.values, rounds
        with mock.patch.object(topology, "all_gather_json", never):
            told = [of.hosts for of in topology.survey(groups, CUDA, 20.0).values()]
    return found, told, rounds


_FLAT, _HSDP = [["flat"]] * 4, [["near", "across"]] * 4
_ONCE = ["options", "memory", "ended 0", "ended 1", "ended 2"]
_LEVELS = ["levels 0", "levels 1", "levels 2"]


@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("of_ranks", "taken", "name"),
    [
        (_FLAT, None, "cuda"),
        (_FLAT, 2, "nccl"),
        (_HSDP, None, "nccl"),
        ([["flat", "near"], ["flat", "near"], ["flat"], ["flat"]], None, "nccl"),
        ([["across", "near"], ["across", "near"], ["across"], ["across"]], None, "nccl"),
    ],
)
def test_all_ranks_agree_on_what_auto_is(four, of_ranks, taken, name):
    for found, _, rounds in four.run(_agreed, of_ranks, ["auto"] * 4, taken, 2):
        assert found == [name, name]
        assert rounds[:8] == [_ONCE[0], *_LEVELS, *_ONCE[1:]]


def _graphs(rank, size, of_ranks, one_program):
    """What memory graphs get, each with a group; whether it is in two levels; the allocator.

    Args:
        of_ranks: Names of each rank's groups, in order.
        one_program: Whether the graphs are of one program; else each is of its own.
    """
    import contextlib
    from unittest import mock

    from symmplan.memory.meeting.topology import served
    from symmplan.runtime.options import Options
    from symmplan.runtime.prepare import Preparation

    meshes, found = _meshes(), {}
    with contextlib.ExitStack() as stack:
        allocator = _Allocator().put(stack)
        _put_devices(stack, rank * 2 // size)
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))
        preparation = None
        for name in of_ranks[rank]:
            if preparation is None or not one_program:
                preparation = Preparation(Options(timeout=20.0), "it", "it")
            groups = {name: meshes[name]}
            memory = preparation.agree(CUDA, groups)
            levels, _ = served(groups, memory, CUDA, 20.0)
            found.setdefault(name, []).append((memory, bool(levels), preparation.reason))
        return found, allocator.name


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.parametrize("one_program", [True, False])
def test_graphs_in_another_order_on_each_host_get_the_same_memory(four, one_program):
    orders = ["flat", "near", "flat"], ["flat", "flat", "near"]
    of_ranks = [orders[0], orders[0], orders[1], orders[1]]
    if not one_program:  # where each agrees anew, which is collective
        of_ranks = [["flat", "near", "flat"]] * 4
    for found, allocator in four.run(_graphs, of_ranks, one_program):
        assert found == {"flat": [("cuda", True, "")] * 2, "near": [("cuda", False, "")]}
        assert allocator == "CUDA"


@pytest.mark.ranks
def test_who_has_nccl_s_memory_keeps_it(four):
    for found, allocator in four.run(_graphs, [["near", "flat", "near"]] * 4, True):
        assert found == {"near": [("nccl", False, "")] * 2, "flat": [("nccl", False, "")]}
        assert allocator == "NCCL"


@pytest.mark.ranks
def test_ranks_of_one_host_exchange_nothing_for_two_levels(four):
    for found, hosts, rounds in four.run(_agreed, _FLAT, ["auto"] * 4, None, 1):
        assert found == ["nccl", "nccl"]
        assert hosts == [1]
        assert rounds[:5] == _ONCE


@pytest.mark.ranks
def test_ranks_that_name_what_auto_is_agree_with_it(four):
    for found, hosts, _ in four.run(_agreed, _FLAT, ["auto", "cuda", "auto", "cuda"], None, 2):
        assert found == ["cuda", "cuda"]
        assert hosts == [2]


@pytest.mark.ranks
def test_ranks_that_name_another_memory_than_auto_is_hear_of_it(four):
    for option, values, _ in four.run(_agreed, _FLAT, ["auto", "auto", "nccl", "auto"], None, 2):
        assert option == "memory"
        assert values == ("auto", "nccl")


def _examined(rank, size, hosts):
    """What ``symmplan doctor --group`` says without trying anything."""
    import contextlib
    from unittest import mock

    from symmplan.cli import group

    with contextlib.ExitStack() as stack:
        _Allocator().put(stack)
        _put_devices(stack, rank * hosts // size)
        stack.enter_context(mock.patch.object(group, "_tried", return_value={}))
        found = group._examined(CUDA)
    return None if found is None else group.render(found).splitlines()[0]


@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("hosts", "what"),
    [
        (1, "4 ranks on one host, cuda, memory 'nccl'"),
        (2, "4 ranks on 2 hosts without NVLink between them, cuda, memory 'cuda'"),
    ],
)
def test_a_doctor_says_what_auto_is(four, hosts, what):
    first, *others = four.run(_examined, hosts)
    assert first.startswith(what)
    assert others == [None] * 3


def _named(rank, size):
    """How a gather in two levels runs where copy engines were asked for."""
    from symmplan.integrate.fsdp.cases import CallCase
    from symmplan.runtime.measure import choose_algorithms
    from symmplan.runtime.options import Options
    from symmplan.runtime.prepare import Preparation

    given = {"memory": "cuda", "group": "0", "ranks": size, "dtype": "float32", "numels": (8,)}
    case = CallCase(op="all_gather", algorithms=("two-level",), **given)
    preparation = Preparation(Options(choose="copy engine", timeout=20.0), "it", "it")
    chosen = choose_algorithms({"it": case}, {}, torch.device("cpu"), preparation, memory="cuda")
    return chosen.algorithms["it"].name


@pytest.mark.ranks
def test_an_algorithm_of_one_host_is_two_levels_on_several(four):
    assert four.run(_named) == ["two-level"] * 4
