"""Sessions in FSDP2's segments: its bytes and no others, the same bits, and both take turns."""

from __future__ import annotations

import contextlib
import gc
import time
from unittest import mock

import pytest
import torch
from doubles import installed, on_devices, state
from doubles.streams import capture
from fsdp_machine import compared as of_programs
from fsdp_machine import verdict
from fsdp_models import Net, batch, shard
from fsdp_programs import drawn
from gathering_optimizers import ACTS, STYLES, Gathering, compared, in_session, program
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool, pool_of

import symmplan
from examples import examples
from symmplan.errors import RunError
from symmplan.memory.segment import locate
from symmplan.runtime.leases import StorageLease

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

two = pool_of(2, timeout=120.0)

FURTHER = pytest.mark.further


def _compared(rank, world, style, acts, memory="shm"):
    gc.collect()
    given = rank, world, style, acts
    if memory == "shm":
        return compared(*given, choose="placed")
    with installed(races=True):
        found = compared(*given, choose="placed", memory=memory)
        assert state().races == []
    return found


@pytest.mark.parametrize("style", STYLES)
def test_a_session_takes_nothing_beside_fsdp2(two, style):
    for found in two.run(_compared, style, ["train"] * 5):
        assert found["differences"] == []
        assert found["rests"]
        assert found["alone"] > 0
        if style != "unequal":  # which are planned one iteration later
            assert found["bytes"][0] >= found["alone"]
        assert found["bytes"][1:] == [found["fsdp"]] * 4
        assert found["copies"] == 0
        assert found["replans"] == [0] * 5
        assert found["rendezvous"] == [int(style != "unequal")] * 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("style", "memory"),
    [
        ("asynchronous", "nccl"),
        ("asynchronous", "cuda"),
        pytest.param("unequal", "nccl", marks=FURTHER),
        pytest.param("unequal", "cuda", marks=FURTHER),
    ],
)
def test_on_devices_neither(two, style, memory):
    for found in two.run(_compared, style, ["train"] * 4, memory):
        assert found["differences"] == []
        assert found["rests"]
        assert found["bytes"][1:] == [found["fsdp"]] * 3


@pytest.mark.long
@pytest.mark.parametrize("style", ["asynchronous", pytest.param("unequal", marks=FURTHER)])
def test_a_recording_keeps_no_bytes_of_fsdp2(two, style):
    """Of the iteration in which FSDP2 gets its segments, too."""
    for found in two.run(_compared, style, ["replan", "train", "train", "sleep", "train"]):
        assert found["differences"] == []
        assert found["bytes"] == [0, *[found["fsdp"]] * 2, 0, found["fsdp"]]


@pytest.mark.further
@pytest.mark.parametrize("act", ACTS[1:])
def test_after_each_act_the_bits_are_the_same(two, act):
    style = STYLES[ACTS.index(act) % len(STYLES)]
    for found in two.run(_compared, style, program(style, ["train", act, "train", act, act])):
        assert found["differences"] == []
        assert found["rests"]


@pytest.mark.further
@examples(24)
@given(
    style=st.sampled_from(STYLES),
    acts=st.lists(st.sampled_from(ACTS), min_size=3, max_size=7),
    memory=st.sampled_from(["shm", "shm", "nccl", "cuda"]),
)
def test_whatever_is_done_between_has_the_same_bits(two, style, acts, memory):
    for found in two.run(_compared, style, program(style, acts), memory):
        assert found["differences"] == []


def _program(rank, world, program):
    return in_session(rank, world, program, of_programs)


@pytest.mark.further
@pytest.mark.parametrize("seed", [1, 2, 4, 5, 6, 7, 9, 10, 11, 13, 14, 16])
def test_random_programs_have_the_same_bits(two, seed):
    """Of those that train more than twice, and whose norm a session does not see now and then."""
    results = two.run(_program, drawn(seed, ranks=2))
    assert not verdict(results)
    assert all(found["turns"] for found in results)


def _made():
    """A model under FSDP2, its handle, and an optimizer that gathers."""
    gc.collect()  # what other programs have left in cycles
    torch.manual_seed(0)
    model = shard(Net(blocks=2))
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=30.0)
    return model, handle, Gathering(model.parameters(), "in place", torch.distributed.group.WORLD)


def _iterate(rank, steps, model, optimizer, session, last=lambda: None):
    """Steps of a program; ``last`` is called between the optimizer's calls of the last one."""
    for step in steps:
        model(batch(step, rank)).sum().backward()
        optimizer.between = last if step == steps[-1] else lambda: None
        optimizer.step()
        session.step()


def _session(rank, world, *, between):
    """What a session has that is entered behind FSDP2's plan, or runs around its collectives."""
    model, handle, optimizer = _made()

    @torch.enable_grad()
    def train(step):
        model(batch(step, rank)).sum().backward()

    for step in range(3):
        train(step)
    assert handle.planned
    with symmplan.eager(choose="placed", timeout=30.0) as session:
        for step in range(3):
            train(step)
            if between:
                optimizer.between = lambda step=step: train(10 + step)
            optimizer.step()
            session.step()
        found = [session.stats.segment_bytes, session.plan.peak_bytes, handle.stats.replans]
        found.append([s.users for s in symmplan.segments()])
    handle.remove()
    return found


def test_who_comes_behind_fsdp2s_plan_makes_no_other(two):
    for own, needed, replans, users in two.run(_session_behind):
        assert (own, replans, users) == (0, 0, [("FSDP2", "eager session")])
        assert needed > 0


def _session_behind(rank, world):
    return _session(rank, world, between=False)


def test_who_runs_while_fsdp2_does_has_bytes_of_its_own(two):
    for own, needed, _, users in two.run(_session_around):
        assert own == needed > 0
        assert sorted(users) == [("FSDP2",), ("eager session",)]


def _session_around(rank, world):
    return _session(rank, world, between=True)


def _captured(rank, world):
    """What a capture of a session's iteration raises while it lies in FSDP2's segments."""
    on_devices(rank, world, _capturing)


def _capturing(rank, world):
    model, handle, optimizer = _made()
    with symmplan.eager(choose="placed", timeout=30.0, device="cpu") as session:
        _iterate(rank, range(3), model, optimizer, session)
        with capture(), pytest.raises(RunError, match="lies in FSDP2's segments"):
            optimizer.step()
        session.release()
    handle.remove()


@pytest.mark.further
def test_a_session_that_takes_turns_is_not_captured_alone():
    """In ranks of its own: what failed on a device keeps its memory there."""
    with RankPool(2, timeout=120.0) as pool:
        pool.run(_captured)


def _asleep(rank, world):
    """`handle.sleep` in the midst of a session's iteration."""
    model, handle, optimizer = _made()

    def sleep():
        with pytest.raises(RunError, match="in an iteration of a session"):
            handle.sleep()

    with symmplan.eager(choose="placed", timeout=30.0) as session:
        _iterate(rank, range(4), model, optimizer, session, sleep)
        handle.sleep()
        assert session.asleep
        assert symmplan.segments() == ()
    handle.remove()


def test_fsdp2_sleeps_between_the_sessions_iterations(two):
    two.run(_asleep)


class _Stopped(Exception):  # noqa: N818
    """What a program raises, and catches."""


def _left(rank, world, *, inside):
    """A session that is left by an exception, in its iteration or not; FSDP2 goes on if not."""
    model, handle, optimizer = _made()

    def stop():
        raise _Stopped

    with contextlib.suppress(_Stopped), symmplan.eager(choose="placed", timeout=30.0) as session:
        _iterate(rank, range(4), model, optimizer, session, stop if inside else lambda: None)
        model(batch(4, rank)).sum().backward()
        stop()
    if inside:
        with pytest.raises(RunError, match="unusable since a call failed"):
            model(batch(5, rank))
        return None
    losses = [model(batch(step, rank)).sum().item() for step in range(3)]
    plain = handle.stats.plain
    handle.remove()
    assert losses == [model(batch(step, rank)).sum().item() for step in range(3)]
    return plain


def _left_between(rank, world):
    return _left(rank, world, inside=False)


def _left_inside(rank, world):
    return _left(rank, world, inside=True)


def test_fsdp2_goes_on_when_a_session_is_left_by_an_exception(two):
    assert two.run(_left_between) == [0, 0]


def test_fsdp2_says_so_if_that_was_in_the_sessions_iteration():
    with RankPool(2, timeout=60.0) as pool:
        pool.run(_left_inside)


def _whole_step(rank, world):
    """FSDP2's step and the session's iteration in one CUDA graph."""
    on_devices(rank, world, _capturing_all)


def _capturing_all(rank, world):
    model, handle, optimizer = _made()
    with symmplan.eager(choose="placed", timeout=30.0, device="cpu") as session:
        _iterate(rank, range(3), model, optimizer, session)
        with capture():
            _iterate(rank, range(3, 4), model, optimizer, session)
        assert session.stats.segment_bytes == 0
    handle.remove()


def test_a_whole_step_is_captured(two):
    two.run(_whole_step)


def _planned_anew(rank, world):
    """FSDP2 has another segment before the session has had a turn in the first one."""
    model, handle, optimizer = _made()
    model(batch(0, rank)).sum().backward()
    handle.freeze()
    with symmplan.eager(choose="placed", timeout=30.0) as session:
        optimizer.step()
        session.step()
        handle.sleep()  # between its plan and its first turn
        assert symmplan.segments() == ()
        _iterate(rank, range(1, 3), model, optimizer, session)
        found = [s.users for s in symmplan.segments()], session.stats.segment_bytes
    handle.remove()
    return found


def test_a_session_moves_before_its_first_turn_too(two):
    assert two.run(_planned_anew) == [([("FSDP2", "eager session")], 0)] * 2


def _follows(rank, world, captured):
    """A session has memory of its own, of which a graph of one rank may have addresses."""
    model, handle, optimizer = _made()
    model(batch(0, rank)).sum().backward()
    with symmplan.eager(choose="placed", timeout=30.0) as session:
        for step in range(3):
            optimizer.step()
            session.step()
            if step == 1:
                assert session.stats.segment_bytes > 0
                session._frozen.in_graph = captured and rank == 1
                handle.freeze()
        found = session.stats.segment_bytes > 0
    handle.remove()
    return found


@pytest.mark.parametrize("captured", [False, True])
def test_a_session_follows_fsdp2_unless_a_cuda_graph_has_its_addresses(two, captured):
    assert two.run(_follows, captured) == [captured] * 2


def _interrupted(rank, world):
    """What FSDP2 finds in its segments if it runs in the midst of a session's iteration."""
    model, handle, optimizer = _made()
    found = []

    def evaluate():
        kept, before = optimizer.kept, optimizer.kept.clone()
        found.append(locate(kept) is not None)
        model(batch(9, rank))
        found.append(locate(kept) is not None)
        assert torch.equal(kept, before)

    with symmplan.eager(choose="placed", timeout=30.0) as session:
        _iterate(rank, range(4), model, optimizer, session, evaluate)
    handle.remove()
    return found


def test_what_the_program_holds_moves_when_fsdp2_runs(two):
    assert two.run(_interrupted) == [[True, False]] * 2


def _pushed_into(rank, world):
    """FSDP2 interrupts a session by a push, which meets nobody, while a rank still copies."""
    torch.manual_seed(0)
    # Four reductions, so that the first one does not meet in the slot of the last one.
    model = shard(Net(blocks=3), reshard_after_forward=False)
    handle = symmplan.fsdp.apply(model, choose="push", timeout=30.0)
    aside, graph, same = StorageLease.copy_aside, None, False
    for step in range(3):
        model(batch(step, rank)).sum().backward()
    own = handle.plan.peak_bytes // 4 // world  # all of the segment, also where gradients come

    def late(lease):
        time.sleep(0.3 * (rank == 0))
        aside(lease)

    with symmplan.eager(choose="placed", timeout=30.0) as session:
        for step in range(5):
            model(batch(step, rank)).sum().backward()
            if step == 4:
                graph = model(batch(step, rank)).sum()  # what it has gathered stays
            whole = symmplan.placed.empty(world * own)
            torch.distributed.all_gather_into_tensor(whole, torch.arange(1.0 * own) + rank + step)
            if graph is not None:
                before = whole.clone()
                with mock.patch.object(StorageLease, "copy_aside", late):
                    graph.backward()
                same = torch.equal(whole, before)
            del whole
            session.step()
        rests = session.stats.segment_bytes == 0
    handle.remove()
    return same, rests


def test_peers_push_when_all_have_copied(two):
    assert two.run(_pushed_into) == [(True, True)] * 2
