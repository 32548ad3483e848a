"""Memory in one process: arenas, segments, finding tensors, choosing a backend."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

import pytest
import torch
from held import segments_of_plans
from hypothesis import given
from hypothesis import strategies as st
from memory_plans import hand_made, two_segments
from steps import lines_of

import symmplan
from examples import examples
from symmplan.coordination.groups import Group, is_gone, this_process
from symmplan.errors import (
    BackendError,
    OutOfSharedMemoryError,
    ReleasedError,
    RunError,
    SymmplanError,
)
from symmplan.memory import (
    BACKENDS,
    NotSymmetricError,
    cache,
    handle,
    locate,
    realize,
    resolve_backend,
)
from symmplan.memory.backends.local import LocalBackend
from symmplan.memory.backends.torch_symm import TorchSymmBackend
from symmplan.memory.backends.windows import WindowsBackend
from symmplan.memory.health import Health
from symmplan.memory.meeting.calls import OPS, describe, note
from symmplan.memory.room import agreed_room
from symmplan.model import SegmentSpec
from symmplan.process import PROCESS

CPU = torch.device("cpu")


@pytest.fixture(params=["local", "shm"])
def arena(request):
    with realize(hand_made({"a": 1000, "b": 64}), memory=request.param) as made:
        yield made


def test_an_arena_knows_what_it_is(arena):
    assert arena.rendezvous == 1
    assert arena.segment_bytes == 1024 + 256
    assert list(arena.segments) == ["s0"]
    assert arena.memory in repr(arena)


def test_auto_is_local_for_one_process():
    with realize(hand_made({"a": 64})) as arena:
        assert arena.memory == "local"


def test_memory_that_no_rank_frees_alone_is_kept_for_the_next_user(monkeypatch):
    monkeypatch.setattr(PROCESS, "cache", kept := {})
    for frees in (True, False):
        arena = realize(hand_made({"a": 64}), memory="local", user="somebody")
        assert arena.frees
        arena.segments["s0"].backend.frees = frees
        assert [held.users for held in segments_of_plans()] == [("somebody",)]
        arena.give_back()
        assert arena.released is frees
        assert [held.users for held in segments_of_plans()] == ([] if frees else [()])
        assert [*kept.values()] == ([] if frees else [arena])
    arena.release()


@pytest.mark.parametrize(("memory", "frees"), [("cuda", True), ("nccl", False), ("nvshmem", False)])
def test_who_frees_its_memory_alone(memory, frees, monkeypatch):
    monkeypatch.setattr("symmplan.memory.backends.torch_symm._select", lambda *_: None)
    assert TorchSymmBackend(memory, torch.device("cuda", 0), {}).frees is frees


@pytest.mark.parametrize("temporary", [False, True])
def test_windows_are_given_back_at_once_where_all_ranks_release_in_one_order(temporary):
    assert WindowsBackend({}, temporary=temporary).frees is temporary


def test_what_leaves_a_device_without_room_to_register_it_is_not_there(monkeypatch):
    monkeypatch.setattr("symmplan.memory.backends.torch_symm._select", lambda *_: None)
    monkeypatch.setattr("symmplan.torch_private.symm_mem.empty", lambda *_: torch.empty(4096))
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    left = [1 << 20]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (left[0], 1 << 30))
    monkeypatch.setattr("symmplan.memory.device_memory.empty_cache", lambda _: None)
    device = torch.device("cuda", 0)
    backend, spec = TorchSymmBackend("nccl", device, {}), SegmentSpec("s0", ("g",), 4096, 4096)
    with pytest.raises(OutOfSharedMemoryError, match="too few to register memory"):
        backend.allocate(spec, device, (), Health())
    left[0] = 1 << 28
    assert backend.allocate(spec, device, (), Health())[0].numel() == 4096
    group = {"g": None}
    given = {"memory": "nccl", "device": device, "timeout": 1.0}
    monkeypatch.setattr("symmplan.coordination.all_gather.all_gather_json", lambda *_: {})
    assert agreed_room(None, 0, group, **given).nbytes == 0
    left[0] = 10 << 30
    assert agreed_room(None, 0, group, **given, besides=7).nbytes == (9 << 30) + 7


@pytest.mark.parametrize("error", [None, ArithmeticError])
def test_what_is_borrowed_comes_back(error):
    plan = hand_made({"a": 1000, "b": 64})
    with (
        contextlib.suppress(ArithmeticError),
        cache.borrowed(plan, {}, memory="local", device=CPU, timeout=5) as (arena, there),
    ):
        assert {name: t.numel() for name, t in there.items()} == {"a": 1000, "b": 64}
        assert there["b"].data_ptr() - there["a"].data_ptr() == 1024
        if error:
            raise error
    assert arena.released
    assert error or not there


def test_tensors_are_views_of_their_placement(arena):
    whole = arena.segments["s0"].tensor
    assert whole.dtype == torch.uint8
    assert whole.untyped_storage().nbytes() == whole.numel() == 1280
    a = arena.tensor("a")
    b = arena.tensor("b", torch.float32, (4, 4))
    assert a.numel() == 1000
    assert b.shape == (4, 4)
    assert b.is_contiguous()
    assert b.untyped_storage().data_ptr() == whole.data_ptr()
    b.fill_(1.0)
    assert whole[1024:1088].view(torch.float32).eq(1).all()
    assert arena.tensor("a", torch.int64).numel() == 125
    assert arena.tensor("b", torch.int64, ()).shape == ()
    assert arena.tensor("b", torch.int64, (0, 3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [("c", None, None), ("b", torch.float32, (17,)), ("b", torch.float64, (3, 3))],
)
def test_what_does_not_fit_is_refused(arena, name, dtype, shape):
    with pytest.raises(RunError) as caught:
        arena.tensor(name, dtype, shape)
    assert caught.value.buffer == name
    assert caught.value.expected is not None


def test_release_ends_everything(arena):
    x = arena.tensor("a")
    arena.release()
    arena.release()
    assert arena.released
    assert "released" in repr(arena)
    for use in (lambda: arena.tensor("a"), lambda: arena.segments["s0"].tensor):
        with pytest.raises(ReleasedError):
            use()
    assert locate(x) is None
    x.fill_(3)


def test_an_exception_releases():
    with pytest.raises(ZeroDivisionError), realize(hand_made({"a": 64})) as arena:
        1 / 0  # noqa: B018
    assert arena.released


def test_peers_of_one(arena):
    segment = arena.segments["s0"]
    (only,) = segment.peers("default")
    assert only.data_ptr() == segment.tensor.data_ptr()
    segment.barrier()
    placed = symmplan.placed.handle(arena.tensor("b", torch.int32))
    assert (placed.rank, placed.world_size, placed.offset) == (0, 1, 1024)
    placed.peer(0).fill_(4)
    assert arena.tensor("b", torch.int32).eq(4).all()
    for rank in (-1, 1):
        with pytest.raises(BackendError, match="no rank"):
            placed.peer(rank)
    with pytest.raises(RunError, match="not rendezvoused"):
        segment.barrier("someone")


def test_collectives_of_one(arena):
    ops = torch.ops.symmplan
    x = torch.arange(4.0)
    out = arena.tensor("b", torch.float32, (4,))
    ops.all_gather_out(x, 1, "default", out=out)
    assert torch.equal(out, x)
    ops.all_reduce_out(out, "sum", "default", out=out)
    assert torch.equal(out, x)
    ops.all_to_all_single_out(x + 1, [], [], "default", out=out)
    assert torch.equal(out, x + 1)
    ops.broadcast_out(x + 2, 0, "default", out=out)
    assert torch.equal(out, x + 2)
    part = torch.empty(4)
    ops.reduce_scatter_out(out, "avg", 1, "default", out=part)
    assert torch.equal(part, x + 2)
    ops.barrier_(out, "default")
    with pytest.raises(NotSymmetricError):
        ops.barrier_(part, "default")


@examples(50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    probes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6000)), max_size=10),
    drop=st.sets(st.integers(0, 5)),
)
def test_locate_finds_exactly_the_live_segments(sizes, probes, drop):
    arenas = [realize(hand_made({"x": size})) for size in sizes]
    try:
        for index in drop:
            if index < len(arenas):
                arenas[index].release()
        for index, offset in probes:
            if index >= len(arenas) or arenas[index].released:
                continue
            segment = arenas[index].segments["s0"]
            if offset < segment.nbytes:
                assert locate(segment.tensor[offset:]) == (segment, offset)
        assert locate(torch.empty(10)) is None
    finally:
        for arena in arenas:
            arena.release()


def test_locate_does_not_look_at_each_segment():
    arenas = [realize(hand_made({"x": 64}))]
    x = arenas[0].tensor("x")
    alone = lines_of(lambda: locate(x))
    arenas += [realize(hand_made({"x": 64})) for _ in range(50)]
    among = lines_of(lambda: locate(x))
    for arena in arenas:
        arena.release()
    assert 0 < among == alone


def test_handle_names_the_fault():
    with pytest.raises(SymmplanError, match="no live segment") as caught:
        handle(torch.ones(3))
    assert isinstance(caught.value, ValueError)


def group(size):
    return {"g": Group("g", "g", rank=0, size=size)}


def test_unknown_backends_list_the_known_ones():
    with pytest.raises(BackendError) as caught:
        resolve_backend("smh", CPU, group(1))
    for name in BACKENDS:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("memory", "device", "size"),
    [
        ("local", "cpu", 2),
        ("shm", "cuda", 1),
        ("nccl", "cpu", 1),
        ("cuda", "cpu", 2),
        ("nvshmem", "cpu", 2),
        ("auto", "meta", 1),
    ],
)
def test_backends_that_do_not_fit_say_what_would(memory, device, size):
    with pytest.raises(BackendError) as caught:
        resolve_backend(memory, torch.device(device), group(size))
    assert caught.value.memory == memory
    assert caught.value.fix
    assert caught.value.expected


@pytest.mark.parametrize(("size", "name"), [(1, "local"), (2, "shm")])
def test_auto_on_the_cpu(size, name):
    assert resolve_backend("auto", CPU, group(size)).name == name


def test_torch_s_backends_need_torch_distributed():
    with pytest.raises(BackendError, match="not initialized"):
        resolve_backend("cuda", torch.device("cuda"), group(1))


def test_segments_of_two_groups():
    with realize(two_segments(("g", "h"))) as arena:
        assert arena.rendezvous == 2
        arena.segments["s1"].barrier("h")
        with pytest.raises(RunError, match="not rendezvoused with group 'g'"):
            arena.segments["s1"].peers("g")


def test_segments_meet_all_groups_of_a_call_or_none(monkeypatch):
    """Else who could register one would not come when its peers, who could not, try again."""
    failing, meet = ["second"], LocalBackend.rendezvous

    def rendezvous(self, segment, group, exchange):
        if group.name in failing:
            raise BackendError("no window for it")
        meet(self, segment, group, exchange)

    with realize(hand_made({"a": 64}), memory="local") as arena:
        monkeypatch.setattr(LocalBackend, "rendezvous", rendezvous)
        (segment,), more = arena.segments.values(), {"s0": {"first": None, "second": None}}
        before = list(segment.rendezvous)
        with pytest.raises(BackendError, match="no window"):
            arena.join(more)
        assert list(segment.rendezvous) == before
        failing.clear()
        assert [arena.join(more), arena.join(more), arena.rendezvous] == [2, 0, 3]
        assert [*segment.rendezvous] == [*before, "first", "second"]


class _Owning(LocalBackend):
    """Knows only what it has allocated, as the windows of a pool do."""

    def __init__(self):
        super().__init__()
        self.mine = set()

    def allocate(self, *given):
        tensor, free = super().allocate(*given)
        self.mine.add(tensor.untyped_storage().data_ptr())
        return tensor, free

    def rendezvous(self, segment, group, exchange):
        assert segment.allocation.untyped_storage().data_ptr() in self.mine, "allocated elsewhere"
        super().rendezvous(segment, group, exchange)


@pytest.mark.parametrize("temporary", [False, True])
def test_a_segment_keeps_the_backend_that_made_its_memory(temporary, monkeypatch):
    """Also when it meets more groups later."""
    made = []

    def resolve(*_, **__):
        made.append(_Owning())
        return made[-1]

    monkeypatch.setattr("symmplan.memory.arena.resolve_backend", resolve)
    plan = hand_made({"a": 64})
    arena = realize(plan, temporary=temporary)
    assert arena.join({"s0": {"more": None}}) == 1
    assert arena.join({"s0": {"further": None}}) == 1
    assert len(made) == 1
    assert arena.frees
    arena.release()


def test_notes_of_calls_can_be_read():
    for op in OPS:
        text = note(op, "float32", out_offset=256, nbytes=64)
        assert f"symmplan::{op}" in describe(text)
        assert "256" in describe(text)
    assert note("barrier_", "a") != note("barrier_", "b")
    assert "another" in describe(b"\x7f" * 64)


def test_processes_are_recognised():
    me = this_process()
    assert not is_gone(me)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    import attrs

    from symmplan.coordination.groups import _state

    other = attrs.evolve(me, pid=child.pid, started=_state(child.pid)[1])
    assert not is_gone(other)
    assert is_gone(attrs.evolve(other, started=other.started + 1)), "a reused process id"
    assert not is_gone(attrs.evolve(other, namespace="elsewhere", started=1)), "cannot tell"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(other), "a zombie does nothing any more"
    child.communicate()
    assert is_gone(other)


def test_segments_may_come_and_go_in_threads():
    failures = []

    def churn():
        try:
            for _ in range(50):
                with realize(hand_made({"x": 64})) as arena:
                    x = arena.tensor("x")
                    found = locate(x)
                    assert found is not None
                    assert found[0] is arena.segments["s0"]
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
