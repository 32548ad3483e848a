"""`symmplan.launcher.ranks`: values, errors, deaths and stacks of real processes; nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks as helpers
import torch
import torch.distributed as dist

from symmplan.errors import PeerLostError, RanksFailedError
from symmplan.launcher import ranks
from symmplan.launcher.ranks import RankError, RankOutcome, RankPool, mark, run_ranks

pytestmark = [pytest.mark.ranks]

METHODS = ["forkserver", "spawn", "fork"]


def total(rank, world, base):
    mark("add")
    part = torch.tensor([float(base + rank)])
    dist.all_reduce(part)
    return part.item(), os.environ["MINE"], torch.get_num_threads()


@pytest.mark.parametrize("method", METHODS)
def test_ranks_meet_and_return_their_values(method):
    found = run_ranks(total, 2, 5, method=method, threads=2, env={"MINE": "yes"}, timeout=120.0)
    assert found == [(11.0, "yes", 2)] * 2


def test_forked_ranks_know_functions_without_a_name():
    assert run_ranks(lambda rank, world: rank * world, 3, method="fork", init=None) == [0, 3, 6]


def fails(rank, world, kind):
    mark("the middle")
    if rank == 0:
        dist.barrier()  # the other never comes
    try:
        raise kind("this rank has had enough", expected="more", fix="rest")
    except PeerLostError as error:
        raise RuntimeError("wrapped") from error


def test_a_failure_is_named_with_its_cause_and_nothing_hangs():
    with pytest.raises(RanksFailedError, match=r"rank 1 .* failed at: the middle") as caught:
        run_ranks(fails, 2, PeerLostError, timeout=100.0, grace=0.5)
    error = caught.value
    assert error.failed_rank == 1
    assert "this rank has had enough" in error.what  # not that it was wrapped
    assert (error.expected, error.fix) == ("more", "rest")
    assert "RuntimeError: wrapped" in error.traceback
    assert "rank 0 " in error.others[0]


def stuck(rank, world, late):
    mark("here")
    while rank == late:
        time.sleep(0.1)
    return rank


@pytest.mark.further
def test_the_stacks_of_a_rank_that_is_late_are_told():
    with RankPool(2, timeout=2.0) as pool:
        done, late = pool.outcomes(stuck, 1)
    assert done.value == 0
    assert not late.ok
    assert "in stuck" in late.hung
    assert late.at == "here"
    with pytest.raises(RanksFailedError, match="did not finish within 7 s") as caught:
        ranks.raise_if_failed([done, late], 7.0)
    assert caught.value.got == "rank 1 at: here"


@pytest.mark.further
def test_limits_of_tests_grow_with_what_starting_took_and_are_told_apart():
    with helpers.RankPool(2, timeout=1.0) as pool:
        assert pool.seconds_to_start > 0
        pool.seconds_to_start = 100.0  # a machine ten times as busy
        assert pool.run(sleeps, 2.0) == [0, 1]
        pool.seconds_to_start = 0.0
        with pytest.raises(helpers.HarnessTimeout, match="did not finish in time"):
            pool.run(stuck, 1)
    with helpers.RankPool(2, init=None) as pool, pytest.raises(helpers.RanksFailed) as caught:
        pool.run(dies, signal.SIGKILL)
    assert caught.type is helpers.RanksFailed


def sleeps(rank, world, seconds):
    time.sleep(seconds)
    return rank


def dies(rank, world, how):
    print("last words", flush=True)
    if rank == 1:
        os.kill(os.getpid(), how)
    return rank


@pytest.mark.all_cases
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_is_told_with_its_signal_and_what_the_rank_said_last(how):
    with RankPool(2, init=None, quiet=True) as pool:
        kept, gone = pool.outcomes(dies, how)
        assert (kept.value, gone.exitcode) == (0, -how)
        assert pool.outcomes(stuck, None)[0].value == 0  # who lives goes on
    assert "last words" in gone.stack
    assert ("in dies" in gone.stack) == (how == signal.SIGSEGV)
    with pytest.raises(RanksFailedError, match=how.name) as caught:
        ranks.raise_if_failed([kept, gone], 1.0)
    assert caught.value.exit_codes == (None, -how)


def starts_more(rank, world):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def test_what_a_rank_started_ends_with_it():
    with RankPool(1, init=None) as pool:
        child = pool.outcomes(starts_more)[0].value
        os.kill(child, 0)
        pids = pool.pids
    deadline = time.monotonic() + 30
    for pid in (child, *pids):
        while _runs(pid):
            assert time.monotonic() < deadline, pid
            time.sleep(0.05)


def _runs(pid):
    try:
        with Path(f"/proc/{pid}/stat").open() as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_function_that_ranks_cannot_import_is_an_error_of_the_rank():
    with pytest.raises(RanksFailedError, match="NoSuchThing"):
        run_ranks(Unpicklable(), 1, init=None)


class Unpicklable:
    def __reduce__(self):
        return (_fail, ())


def _fail():
    raise ImportError("NoSuchThing")


def test_a_death_is_told_before_what_others_saw_and_a_cause_before_its_consequences():
    def rank(number, text="", kinds=(), when=0.0):
        error = RankError(kinds, text, {}, "", "", when) if kinds else None
        return RankOutcome(number, error=error, exitcode=None if error else -9)

    lost = rank(0, "a peer is gone", ("PeerLostError",), 1.0)
    cause = rank(1, "no room", ("OutOfSharedMemoryError",), 2.0)
    gloo = rank(2, "Connection closed", ("RuntimeError",), 0.0)
    dead = rank(3)
    hung = RankOutcome(4, hung="")
    order = sorted([hung, lost, cause, gloo, dead], key=ranks.cause_first)
    assert order == [dead, cause, gloo, lost, hung]
