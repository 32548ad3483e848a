"""Streams and events of eager programs, on streams that are made up: the CPU has none."""

from __future__ import annotations

import contextlib

import pytest
import torch
from ranks import RankPool, pool_of

pytestmark = pytest.mark.ranks

pool = pool_of(2, timeout=120.0)


class Streams:
    """Streams that are only numbers; work runs at once, in the order of the program."""

    def __init__(self):
        self.stack = [0]
        self.timeline = None
        self.joins = []

    # What the session asks for.

    def number(self):
        return self.stack[-1]

    current = number

    def wait(self, stream, other):
        self.joins.append((stream, other))

    @contextlib.contextmanager
    def on(self, stream):
        self.stack.append(stream)
        yield
        self.stack.pop()

    @contextlib.contextmanager
    def watching(self, timeline):
        self.timeline = timeline
        yield
        self.timeline = None

    # What the program does.

    def wait_stream(self, stream, other):
        """As ``stream.wait_stream(other)``."""
        if self.timeline is not None:
            self.timeline.wait(self.timeline.record(other), stream)

    def synchronize(self):
        """As ``torch.cuda.synchronize()``."""
        if self.timeline is not None:
            self.timeline.device_waits()


def _session(streams, **more):
    from symmplan.integrate.eager import session as eager_session

    eager_session.streams_of = lambda _: streams
    import symmplan

    return symmplan.eager(timeout=20.0, memory="shm", **more)


def _reduced(x, factor):
    import torch.distributed as dist

    import symmplan

    y = symmplan.placed.out(torch.mul, x, factor)
    dist.all_reduce(y)
    return y


def _two_streams(rank, world_size, there, back, sync, fresh):
    """A reduction on a side stream between two on the main one."""
    from symmplan.integrate.eager import build as eager_build

    streams, overwriting = Streams(), []
    act = eager_build._overwrite
    eager_build._overwrite = lambda *given: (
        overwriting.append(streams.number()),
        act(*given),
    )
    x = torch.ones(64)
    with _session(streams, debug=True) as session:
        for turn in range(4):
            side = 7 + turn if fresh else 7
            a = _reduced(x, 1.0)
            first = a + 0
            del a
            if there:
                streams.wait_stream(side, 0)
            with streams.on(side):
                b = _reduced(x, 2.0)
                second = b + 0
                del b
            if back:
                streams.wait_stream(0, side)
            if sync:
                streams.synchronize()
            c = _reduced(x, 3.0)
            third = c + 0
            del c
            session.step()
            for got, want in ((first, 2), (second, 4), (third, 6)):
                assert bool((got == want).all()), (turn, got)
        plan = session.plan
    plan.verify()
    names = [b.name for b in plan.problem.buffers]
    on = {o.name: o.stream for o in plan.problem.operations}
    places = [plan.placements[n].offset for n in names]
    shared = {(i, j) for i in range(3) for j in range(i) if places[i] == places[j]}
    eager_build._overwrite = act
    on = [on[n] for n in names]
    return sorted(shared), on, streams.joins, overwriting[-3:], plan.fingerprint


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("there", "back", "sync"),
    [
        (True, True, False),
        (True, False, False),
        (False, True, False),
        (False, False, False),
        (False, False, True),
    ],
)
def test_only_what_is_ordered_shares_bytes(pool, there, back, sync, fresh):
    first, second = pool.run(_two_streams, there, back, sync, fresh)
    assert first == second
    sharing, on, joins, overwriting, _ = first
    # A dead placement is overwritten on a stream that comes after its last use.
    side = (10 if fresh else 7) if there else 0
    assert overwriting == [side, 0, 0]
    assert on == ["main", "stream1", "main"]
    if there and back:
        assert sharing == [(1, 0), (2, 0), (2, 1)]
    else:
        assert len(sharing) == 1  # two of the three are always in order
    if not there:
        assert (1, 0) not in sharing
    if not back and not sync:
        assert (2, 1) not in sharing
    # Three iterations were served, and each joined both ways.
    assert len(joins) == 6


def _crossing(rank, world_size, ordered, recorded):
    """A result of the main stream is read on another."""
    streams = Streams()
    x = torch.ones(64)
    with _session(streams) as session:
        for _ in range(3):
            a = _reduced(x, 1.0)
            if ordered:
                streams.wait_stream(7, 0)
            with streams.on(7):
                b = _reduced(a, 1.0)
            if ordered and not recorded:
                streams.wait_stream(0, 7)
            if recorded and streams.timeline is not None:
                recorder = session._recording._recorder
                stream = type("", (), {"cuda_stream": 7})()
                recorder._used_until_released(a, stream)
            del a
            c = _reduced(x, 5.0)
            assert bool((c == 10).all())
            del c
            with streams.on(7):
                assert bool((b == 4).all())
                del b
            session.step()
        plan = session.plan
    accesses = {(a.operation, a.buffer) for a in plan.problem.accesses if "drop" in a.operation}
    return [u.reason for u in plan.unplanned], sorted(plan.placements), sorted(accesses)


def test_accesses_in_no_order_are_left_out(pool):
    (reasons, placed, _), _ = pool.run(_crossing, False, False)
    assert reasons
    assert all("orders" in reason for reason in reasons)
    assert "mul" not in placed  # written on the main stream, read on the other


def test_accesses_that_events_order_are_placed(pool):
    (reasons, placed, _), _ = pool.run(_crossing, True, False)
    assert reasons == []
    assert len(placed) == 3


def test_record_stream_holds_until_the_release(pool):
    (reasons, placed, drops), _ = pool.run(_crossing, True, True)
    assert reasons == []
    assert len(placed) == 3
    assert ("mul:drop1", "mul") in drops


def _wrong_stream(rank, world_size):
    streams = Streams()
    x = torch.ones(64)
    with _session(streams) as session:
        for turn in range(3):
            with streams.on(7):
                _reduced(x, 1.0)
            with streams.on(7 if turn == 2 and rank == 1 else 0):
                _reduced(x, 1.0)
            session.step()


def test_a_call_on_another_stream_is_a_divergence(pool):
    with RankPool(2, timeout=60.0) as pool:
        for outcome in pool.outcomes(_wrong_stream):
            assert outcome.error is not None
            assert "rank 1" in outcome.error.text
            assert "another stream than planned" in outcome.error.text
            assert outcome.error.fields["op"]
            assert outcome.error.fields["buffer"]


def _unwaited(rank, world_size, again):
    """Work on a stream of no declared call that nothing waits for before the iteration ends."""
    streams = Streams()
    x = torch.ones(64)
    with _session(streams) as session:
        for _ in range(2):
            a = _reduced(x, 1.0)
            streams.wait_stream(9, 0)
            with streams.on(9):
                assert bool((a + 0 == 2).all())
            if again:
                streams.wait_stream(0, 9)
            del a
            session.step()
        return [u.reason for u in session.plan.unplanned]


@pytest.mark.parametrize("again", [False, True])
def test_an_iteration_must_be_over_before_the_next(pool, again):
    first, second = pool.run(_unwaited, again)
    assert first == second
    assert bool(first) != again
    assert all("before session.step()" in reason for reason in first)


def _barriers(rank, world_size):
    """Ops without handshake or release on two streams: barriers run where they order."""
    import custom_ops
    import torch.distributed as dist

    import symmplan

    custom_ops.load()
    name = dist.group.WORLD.group_name
    streams = Streams()
    x = torch.full((16, 8), float(rank))
    with _session(streams) as session:
        for turn in range(4):
            a = symmplan.placed.out(torch.add, x, 1.0)
            streams.wait_stream(7, 0)
            with streams.on(7):
                b = torch.ops.symmplan_test.push_next(a, name)
                c = torch.ops.symmplan_test.peer_mean(b, name)
                got = c + 0
                del a, b, c
            streams.wait_stream(0, 7)
            d = symmplan.placed.out(torch.add, x, 10.0)
            e = torch.ops.symmplan_test.peer_mean(d, name) + 0
            del d
            session.step()
            assert bool((got == 1.5).all()), (turn, got)
            assert bool((e == 10.5).all()), (turn, e)
        return len(session.plan.barriers), session.stats.placed


def test_barriers_on_two_streams(pool):
    first, second = pool.run(_barriers)
    assert first == second
    assert first[0] > 0
