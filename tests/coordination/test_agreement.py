"""All ranks agree on the plan, or all of them raise; nobody hangs, nobody trusts what peers say."""

# Test code: plainness first.
# ruff: noqa: PTH114, PTH115, PTH208

from __future__ import annotations

import json
import os
import time

import pytest
import torch.distributed as dist
from memory_plans import hand_made, two_segments
from ranks import RankPool, pool_of

from symmplan.coordination.agreement import first_difference

pytestmark = pytest.mark.ranks

TIMEOUT = 3.0

pool = pool_of(3)


# Rank side.


def agree_on(rank, world, sizes, names=("x", "y")):
    from symmplan.memory import agree

    dist.barrier()
    agree(hand_made({names[0]: 64, names[1]: sizes[rank]}, op="lib::gather"), timeout=TIMEOUT)
    return rank


def realize_on(rank, world, sizes, memory=None):
    from symmplan.memory import realize

    dist.barrier()
    chosen = "auto" if memory is None else memory[rank]
    with realize(hand_made({"x": sizes[rank]}), memory=chosen, timeout=TIMEOUT) as arena:
        return arena.rendezvous, arena.segment_bytes


def only_some(rank, world, absent, late):
    from symmplan.memory import realize

    if rank in absent:
        if not late:
            return "absent"
        time.sleep(TIMEOUT + 1)
    realize(hand_made({"x": 64}), timeout=TIMEOUT)
    return None


_LAST: dict = {}


def fail_in_allocate(rank, world, error):
    from symmplan.errors import OutOfSharedMemoryError
    from symmplan.memory import realize
    from symmplan.memory.backends import shm

    def broken(nbytes):
        if error == "known":
            raise OutOfSharedMemoryError("no room", fix="make room", free_bytes=5)
        raise ZeroDivisionError("by accident")

    if rank == 1:
        real, shm.create = shm.create, broken
        try:
            realize(hand_made({"x": 64}), memory="shm", timeout=TIMEOUT)
        finally:
            shm.create = real
    realize(hand_made({"x": 64}), memory="shm", timeout=TIMEOUT)


def posts_garbage(rank, world, garbage):
    """Rank 1 is somebody else's program: it writes into the store what it likes."""
    from symmplan.memory import agree
    from symmplan.torch_private import c10d

    if rank == 1:
        store = c10d.group_store(dist.group.WORLD)
        prefix = f"symmplan/{store.add('symmplan/calls/1', 1)}"
        store.set(f"{prefix}/hello/1", garbage)
        if store.add(f"{prefix}/hello/count", 1) == world:
            store.set(f"{prefix}/hello/full", b"1")
        return
    agree(hand_made({"x": 64}), timeout=TIMEOUT)


def mesh(rank, world, odd):
    """2 x 2: rows and columns have other names on every rank; one rank's plan differs."""
    from symmplan.memory import realize

    if "mesh" not in _LAST:
        groups = {tuple(r): dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])}
        row = next(g for r, g in groups.items() if rank in r and r[1] - r[0] == 1)
        column = next(g for r, g in groups.items() if rank in r and r[1] - r[0] == 2)
        _LAST["mesh"] = (row.group_name, column.group_name)
    dist.barrier()
    plan = two_segments(_LAST["mesh"], nbytes=8192 if rank == odd else 4096)
    with realize(plan, timeout=TIMEOUT) as arena:
        for name in _LAST["mesh"]:
            segment = next(s for s in arena.segments.values() if name in s.spec.groups)
            segment.barrier(name)
            segment.barrier()
        return arena.rendezvous


def keys_in_store(pool):
    return pool._store.num_keys()


# Parent side.


def test_equal_plans_agree_and_leave_nothing_in_the_store(pool):
    assert pool.run(agree_on, [64, 64, 64]) == [0, 1, 2]
    pool.run(realize_on, [64, 64, 64])
    before = keys_in_store(pool)
    for _ in range(5):
        pool.run(agree_on, [64, 64, 64])
        assert pool.run(realize_on, [64, 64, 64]) == [(1, 256)] * 3
    assert keys_in_store(pool) - before <= 10, "dist.barrier leaves some; each call would leave 9"


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_mismatch_raises_on_every_rank(pool, odd):
    sizes = [64, 64, 64]
    sizes[odd] = 128
    pair = (0, odd) if odd else (0, 1)
    for outcome in pool.outcomes(agree_on, sizes):
        error = outcome.error
        assert error.kind == "AgreementError"
        assert error.text.startswith(f"[group default, rank {outcome.rank}] ranks disagree")
        assert error.fields["ranks"] == pair
        assert error.fields["op"] == "lib::gather"
        assert error.fields["buffer"] == "y"
        assert error.fields["path"] == "problem.buffers[y].nbytes"
        assert error.fields["values"] == (sizes[0], sizes[pair[1]])
        for word in ("ranks 0 and", "lib::gather", "'y'", "64", "128"):
            assert word in error.text
    assert pool.run(agree_on, [64, 64, 64]) == [0, 1, 2], "the group is as good as before"


def test_a_mismatch_allocates_nothing(pool):
    for outcome in pool.outcomes(realize_on, [64, 64, 128]):
        assert outcome.error.kind == "AgreementError"
    assert pool.run(open_segments) == [0, 0, 0]


def open_segments(rank, world):
    from symmplan.process import PROCESS

    files = sum("/dev/shm" in os.readlink(f"/proc/self/fd/{fd}") for fd in _fds())
    return len(PROCESS.segments) + files


def _fds():
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def test_different_backends_are_named(pool):
    outcomes = pool.outcomes(realize_on, [64] * 3, ["shm", "shm", "cuda"])
    # Rank 2 has no CUDA device and says so; the others hear it from there.
    assert [o.error.kind for o in outcomes] == ["BackendError"] * 3
    assert "rank 2 failed" in outcomes[0].error.text
    assert outcomes[0].error.fields["failed_rank"] == 2


@pytest.mark.further
@pytest.mark.parametrize("late", [False, True])
def test_a_missing_rank_is_named(pool, late):
    outcomes = pool.outcomes(only_some, [1], late, timeout=30)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert error.kind == "PeerTimeoutError"
        assert error.fields["missing"] == (1,)
    if late:
        error = outcomes[1].error
        assert error.kind == "PeerTimeoutError"
        assert error.fields["missing"] == (1,), "whoever comes late must not wait itself"
    else:
        # Rank 1 has made one call less. Its next one is that call, and ends at once.
        pool.start(only_some, [], False, ranks=[1])
        assert pool.collect()[0].error.kind == "PeerTimeoutError"
    assert pool.run(agree_on, [64] * 3) == [0, 1, 2]


@pytest.mark.parametrize("error", ["known", "unknown"])
def test_a_failing_rank_tells_the_others(pool, error):
    outcomes = pool.outcomes(fail_in_allocate, error)
    for rank in (0, 2):
        told = outcomes[rank].error
        assert told.kind == ("OutOfSharedMemoryError" if error == "known" else "RunError")
        assert "rank 1 failed" in told.text
        assert told.fields["failed_rank"] == 1
        assert ("no room" if error == "known" else "by accident") in told.text
    assert outcomes[0].error.fields.get("free_bytes") == (5 if error == "known" else None)
    assert pool.run(open_segments) == [0, 0, 0]
    assert pool.run(realize_on, [64] * 3) == [(1, 256)] * 3


@pytest.mark.parametrize(
    "garbage", [b"\x80\x04\x95.", b"{}", b'{"fingerprint": 1}', b"[]", b"null", b"\xff"]
)
def test_garbage_from_a_peer_is_refused(pool, garbage):
    outcomes = pool.outcomes(posts_garbage, garbage)
    for rank in (0, 2):
        assert outcomes[rank].error.kind == "AgreementError"
        assert "rank 1" in outcomes[rank].error.text


def test_a_mesh_agrees_although_its_groups_have_different_names():
    with RankPool(4) as pool:
        assert pool.run(mesh, None) == [2] * 4
        for odd in (0, 3):
            outcomes = pool.outcomes(mesh, odd)
            # Rank 3 - odd shares no group with the odd one: it hears it from its neighbours.
            assert [o.error.kind for o in outcomes] == ["AgreementError"] * 4
            assert all("ranks 0 and 1" in o.error.text for o in outcomes)
        assert pool.run(mesh, None) == [2] * 4


def kill_before_hello(rank, world):
    from symmplan.memory import realize

    if rank == world - 1:
        os.kill(os.getpid(), 9)
    realize(hand_made({"x": 64}), timeout=TIMEOUT)


@pytest.mark.parametrize("rank0_store", [False, True])
def test_a_rank_that_never_comes(rank0_store):
    with RankPool(2, rank0_store=rank0_store) as pool:
        outcomes = pool.outcomes(kill_before_hello)
        assert outcomes[1].exitcode == -9
        assert outcomes[0].error.kind == "PeerTimeoutError"


def kill_the_store(rank, world):
    from symmplan.memory import agree

    if rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    agree(hand_made({"x": 64}), timeout=TIMEOUT)


def test_the_store_s_host_ends():
    with RankPool(2, rank0_store=True) as pool:
        outcomes = pool.outcomes(kill_the_store, timeout=20)
        assert outcomes[1].error.kind == "PeerLostError"
        assert "store" in outcomes[1].error.text


def difference(left, right):
    return first_difference(json.loads(left.to_json()), json.loads(right.to_json()))


def test_the_first_difference_is_the_cause():
    one = hand_made({"x": 64, "y": 64})
    assert difference(one, hand_made({"x": 64, "y": 4096})).path == "problem.buffers[y].nbytes"
    extra = difference(one, hand_made({"x": 64, "y": 64, "z": 64}))
    assert (extra.buffer, extra.op, extra.values[0]) == ("z", "test::op", "nothing")
    gone = difference(hand_made({"x": 64, "y": 64, "z": 64}), one)
    assert (gone.buffer, gone.op, gone.values[1]) == ("z", "test::op", "nothing")
    moved = difference(one, hand_made({"y": 64, "x": 64}))
    assert moved.buffer == "x"
    assert moved.path.startswith("placements")


@pytest.mark.parametrize("name", ["[x]", "a.b", "[0]", "placements"])
@pytest.mark.all_cases
def test_a_buffer_may_have_any_name(name):
    larger = difference(hand_made({name: 64, "y": 64}), hand_made({name: 4096, "y": 64}))
    assert larger.path == f"problem.buffers[{name}].nbytes"
    assert (larger.buffer, larger.op) == (name, "test::op")
    moved = difference(hand_made({name: 64, "y": 64}), hand_made({"y": 64, name: 64}))
    assert (moved.buffer, moved.op) == (name, "test::op")


def test_names_of_groups_are_no_difference():
    left, right = two_segments(("3", "9")), two_segments(("10", "2"))
    assert left.fingerprint == right.fingerprint
    assert "equal" in difference(left, right).where
    swapped = difference(left, two_segments(("3", "3")))
    assert "group" in swapped.path


@pytest.mark.parametrize("text", [None, 5, [], "x"])
def test_an_unreadable_plan_is_no_crash(text):
    assert "cannot be read" in first_difference({"a": 1}, text).where
