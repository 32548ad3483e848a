"""What goes wrong in shared memory: crashes at any moment, no room, foreign files, late use."""

# Test code: plainness first.
# ruff: noqa: PTH115, PTH123, PTH208, BLE001, PERF203, PLW0108, SIM105

from __future__ import annotations

import os
import random
import resource
import time

import pytest
from memory_plans import hand_made
from ranks import RankPool, pool_of

from symmplan.errors import BackendError
from symmplan.memory.backends import shm_file

pytestmark = pytest.mark.ranks

TIMEOUT = 5.0
SHM = "/dev/shm"


def named():
    return sorted(n for n in os.listdir(SHM) if n.startswith("symmplan"))


@pytest.fixture(autouse=True)
def nothing_named_left():
    before = named()
    yield
    assert named() == before


# Rank side.


def warm_up(rank, world):
    from symmplan.memory import realize

    realize(hand_made({"x": 64}), memory="shm", timeout=TIMEOUT).release()


def churn(rank, world, by_name):
    """Realize, communicate, release, again and again until something breaks."""
    import torch

    from symmplan.memory import realize

    if by_name:
        refuse_descriptors()
    while True:
        with realize(hand_made({"x": 3 << 18}), memory="shm", timeout=TIMEOUT) as arena:
            out = arena.tensor("x", torch.float32)
            for _ in range(20):
                mine = torch.full((out.numel() // world,), float(rank))
                torch.ops.symmplan.all_gather_out(mine, world, "default", out=out)
                torch.ops.symmplan.all_reduce_out(out, "max", "default", out=out)


def refuse_descriptors(reused=False):
    """Pretend that peers may not open each other's descriptors, or find other files there."""
    from symmplan.memory.backends import shm

    def open_peer(file):
        if not file.name and reused:
            raise BackendError("the number is another file's")
        if not file.name:
            raise PermissionError(13, "refused for the test")
        return shm_file.open_peer(file)

    shm.open_peer = open_peer


def by_name(rank, world, reused):
    import torch

    from symmplan.memory import realize
    from symmplan.memory.backends import shm

    refuse_descriptors(reused)
    try:
        with realize(hand_made({"x": 4096}), memory="shm", timeout=TIMEOUT) as arena:
            x = arena.tensor("x", torch.int64)
            torch.ops.symmplan.all_gather_out(
                torch.full((512 // world,), rank), world, "default", out=x[: 512 // world * world]
            )
            return int(x[0]), int(x[512 // world * world - 1]), named()
    finally:
        shm.open_peer = shm_file.open_peer


def inside_a_collective(rank, world, victim):
    """One rank is killed between handshake and release; the others wait in the release."""
    import torch

    from symmplan.memory import realize
    from symmplan.memory.ops import one_sided as ops

    with realize(hand_made({"x": 4096}), memory="shm", timeout=TIMEOUT) as arena:
        x = arena.tensor("x", torch.int64)
        if rank == victim:
            ops.copy_bytes = lambda *_: os.kill(os.getpid(), 9)
        try:
            torch.ops.symmplan.all_gather_out(
                torch.ones(512 // world, dtype=torch.int64),
                world,
                "default",
                out=x[: 512 // world * world],
            )
        except Exception as error:
            try:
                arena.segments["s0"].barrier()
            except Exception as second:
                return type(error).__name__, str(error), str(second)
        return None


def forever(rank, world):
    """Never arrives."""
    from symmplan.memory import realize

    with realize(hand_made({"x": 64}), memory="shm", timeout=1.0) as arena:
        if rank == 1:
            time.sleep(2.5)
        else:
            arena.segments["s0"].barrier(timeout=1.0)


def gives_up_first(rank, world):
    """Rank 0 gives up after a second; rank 1, which would wait long, hears of it at once."""
    from symmplan.memory import realize

    with realize(hand_made({"x": 64}), memory="shm", timeout=20.0) as arena:
        segment = arena.segments["s0"]
        if rank == 2:
            time.sleep(2.0)
        segment.barrier(timeout=0.5 if rank == 0 else 20.0)


def released_first(rank, world):
    from symmplan.memory import realize

    with realize(hand_made({"x": 64}), memory="shm", timeout=20.0) as arena:
        if rank:
            arena.segments["s0"].barrier()


def after_release(rank, world):
    import torch

    from symmplan.memory import realize
    from symmplan.placed import handle

    arena = realize(hand_made({"x": 64}), memory="shm", timeout=TIMEOUT)
    x = arena.tensor("x", torch.int32)
    placed = handle(x)
    segment = arena.segments["s0"]
    arena.release()
    arena.release()
    x.fill_(5)  # the view keeps the bytes
    kinds = []
    for use in (
        lambda: arena.tensor("x"),
        lambda: segment.tensor,
        lambda: segment.peers(),
        lambda: segment.barrier(),
        lambda: placed.peer(0),
        lambda: placed.barrier(),
        lambda: torch.ops.symmplan.all_reduce_out(x, "sum", "default", out=x),
    ):
        try:
            use()
            kinds.append(None)
        except Exception as error:
            kinds.append(type(error).__name__)
    return kinds, int(x.sum()), shared_mappings()


def shared_mappings():
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm" in line or "memfd:symmplan" in line for line in maps)


def leaks(rank, world):
    """Descriptors and mappings after many arenas, with and without failures."""
    import torch

    from symmplan.memory import realize

    def once():
        with realize(hand_made({"x": 4096}), memory="shm", timeout=TIMEOUT) as arena:
            x = arena.tensor("x", torch.int64)
            torch.ops.symmplan.all_reduce_out(x, "sum", "default", out=x)

    once()
    before = len(os.listdir("/proc/self/fd")), shared_mappings()
    for _ in range(10):
        once()
        try:
            realize(hand_made({"x": 64 + 64 * rank}), memory="shm", timeout=TIMEOUT)
        except Exception:
            pass
    return before, (len(os.listdir("/proc/self/fd")), shared_mappings())


def private(rank, world):
    """Mode and links of the file behind a live segment."""
    from symmplan.memory import realize

    with realize(hand_made({"x": 64}), memory="shm", timeout=TIMEOUT):
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                path = os.readlink(f"/proc/self/fd/{fd}")
                if path.startswith(SHM):
                    info = os.fstat(int(fd))
                    found.add((oct(info.st_mode & 0o7777), info.st_nlink))
            except OSError:
                continue
        return sorted(found), named()


def too_large(rank, world, who):
    from symmplan.memory import realize

    size = 1 << 20
    if who == "all":
        size = 1 << 46
    elif rank == who:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        realize(hand_made({"x": size}), memory="shm", timeout=TIMEOUT).release()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def elsewhere(rank, world, what):
    """Rank 1 seems to run on another host, or in another pid namespace."""
    import attrs

    from symmplan.coordination import agreement, groups
    from symmplan.memory import realize
    from symmplan.memory.backends import shm

    real = groups.this_process

    def other():
        return attrs.evolve(real(), **{what: "another"})

    if rank == 1:
        shm.this_process = agreement.this_process = other
    try:
        with realize(hand_made({"x": 64}), memory="shm", timeout=TIMEOUT) as arena:
            arena.segments["s0"].barrier()
        return "met"
    finally:
        shm.this_process = agreement.this_process = real


# Parent side.


@pytest.mark.parametrize("named_files", [False, True])
def test_killed_at_random_moments(named_files):
    moments = random.Random(7)
    for _ in range(6):
        with RankPool(3, timeout=30) as pool:
            pool.run(warm_up)  # imports and the first agreement
            pool.start(churn, named_files)
            time.sleep(moments.uniform(0, 0.15))
            victim = moments.randrange(3)
            pool.kill(victim)
            outcomes = pool.collect(timeout=TIMEOUT + 10)
            assert outcomes[victim].exitcode == -9
            for outcome in outcomes:
                if outcome.rank != victim:
                    assert outcome.error is not None, outcome.describe()
                    assert outcome.error.kind == "PeerLostError", outcome.describe()
                    assert f"rank {victim}" in outcome.error.text or "gave up" in outcome.error.text
        assert named() == []


def test_killed_inside_a_collective():
    with RankPool(3) as pool:
        outcomes = pool.outcomes(inside_a_collective, 1, timeout=20)
        assert outcomes[1].exitcode == -9
        for rank in (0, 2):
            kind, text, again = outcomes[rank].value
            assert kind == "PeerLostError", "a dead peer must be noticed, not waited for"
            assert "rank 1" in text or "gave up" in text
            assert f"[group default, rank {rank}]" in text
            assert "unusable" in again


pool = pool_of(2)


@pytest.mark.parametrize("reused", [False, True])
def test_peers_that_cannot_open_descriptors_use_names_for_a_moment(pool, reused):
    assert pool.run(by_name, reused) == [(0, 1, []), (0, 1, [])]


def test_a_rank_that_does_not_arrive(pool):
    outcomes = pool.outcomes(forever)
    error = outcomes[0].error
    assert error.kind == "PeerTimeoutError"
    assert error.fields["missing"] == (1,)
    assert error.fields["segment"] == "s0"
    assert error.fields["timeout"] == 1.0


@pytest.mark.further
def test_who_gives_up_tells_the_others():
    with RankPool(3) as pool:
        outcomes = pool.outcomes(gives_up_first)
        assert outcomes[0].error.kind == "PeerTimeoutError"
        assert outcomes[1].error.kind == "PeerLostError"
        assert "gave up" in outcomes[1].error.text or "released" in outcomes[1].error.text


def test_a_released_peer_is_not_waited_for(pool):
    outcomes = pool.outcomes(released_first)
    assert outcomes[0].ok
    assert outcomes[1].error.kind == "PeerLostError"
    assert "released" in outcomes[1].error.text


def test_use_after_release(pool):
    for kinds, total, mapped in pool.run(after_release):
        assert kinds == ["ReleasedError"] * 6 + ["NotSymmetricError"]
        assert total == 5 * 16
        assert mapped == 1, "only the view's own mapping may be left"


def test_nothing_leaks(pool):
    for before, after in pool.run(leaks):
        assert before == after


def test_files_are_private_and_nameless(pool):
    assert pool.run(private) == [([("0o600", 0)], [])] * 2


def test_no_room(pool):
    for outcome in pool.outcomes(too_large, "all"):
        error = outcome.error
        assert error.kind == "OutOfSharedMemoryError"
        assert error.fields["nbytes"] > 1 << 46
        assert 0 < error.fields["free_bytes"] < 1 << 46
        assert "fix:" in error.text


def test_no_room_on_one_rank(pool):
    outcomes = pool.outcomes(too_large, 1)
    assert [o.error.kind for o in outcomes] == ["OutOfSharedMemoryError"] * 2
    assert "rank 1 failed" in outcomes[0].error.text


def test_another_host_is_refused(pool):
    outcomes = pool.outcomes(elsewhere, "host")
    assert [o.error.kind for o in outcomes] == ["BackendError"] * 2
    assert "different hosts" in outcomes[0].error.text


def test_another_pid_namespace_uses_names(pool):
    assert pool.run(elsewhere, "namespace") == ["met", "met"]
