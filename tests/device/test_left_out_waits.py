"""A wait of symmplan that is left out is seen over the doubles, as a race between streams.

Side streams of the doubles run when something waits for them, and not before, so most of these
races also make results wrong. What is queued on the default stream runs at once, so a side stream
that does not wait for that stream is a race with the right results.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from unittest import mock

import pytest
from doubles import installed, state
from doubles.streams import Stream
from fsdp_models import Net, batch, both, shard
from fsdp_models import mesh as mesh_of
from ranks import RankPool, pool_of

import symmplan
from symmplan.integrate.fsdp.program_usage import ProgramUsage

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=100.0)

PACKAGE = pathlib.Path(symmplan.__file__).parent
#: They wait for whoever calls them.
PASSED = (PACKAGE / "device", PACKAGE / "memory" / "streams.py")
#: Who lets a stream wait, for each algorithm.
WAITS = {
    "placed": {"zero_copy._fill", "zero_copy._receive", "leases.wait"},
    "push": {
        *("zero_copy._fill", "zero_copy._receive", "leases.wait"),
        *("push.send", "push._pushed"),
    },
}
WAITS["shared push"] = WAITS["push"]


def _waiting():
    """Which function of the package lets a stream wait; None if it is FSDP2."""
    frame = sys._getframe(2)
    while frame is not None:
        file = pathlib.Path(frame.f_code.co_filename)
        if "fsdp" in file.parts and "torch" in file.parts:
            return None
        passed = any(part == file or part in file.parents for part in PASSED)
        if PACKAGE in file.parents and not passed:
            return f"{file.stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return None


def _train(model, trace, rank):
    for step in range(4):
        model(batch(step, rank)).pow(2).mean().backward()
        trace.grads(model, step)
        model.zero_grad()


def _without(rank, world, choose, left_out):
    """Who waits, and whether results are right, and without races, if one of them does not."""
    waits, wait_event = collections.Counter(), Stream.wait_event

    def wait(stream, event):
        who = _waiting()
        waits.update([who] if who is not None else [])
        if who is None or who != left_out:
            wait_event(stream, event)

    def build():
        return shard(Net(3), mesh=mesh_of(world))

    move = mock.patch.object(ProgramUsage, "gradients_move", return_value=True)
    with installed(races=True), move, mock.patch.object(Stream, "wait_event", wait):
        found = both(build, _train, rank, memory="nccl", choose=choose)
        assert state().refused == []
        races = len(state().races)
    assert found["stats"]["placed"]
    return {*waits}, not found["differences"], not races


@pytest.mark.further
@pytest.mark.parametrize("choose", WAITS)
def test_waits_of_fsdp2s_collectives(two, choose):
    (waits, right, ordered), _ = two.run(_without, choose, None)
    assert waits == WAITS[choose]
    assert right
    assert ordered
    seen = {}
    for left_out in sorted(waits):
        with RankPool(2, timeout=100.0) as ranks:
            found = ranks.run(_without, choose, left_out)
            seen[left_out] = [not ordered for *_, ordered in found]
    assert seen == {who: [True, True] for who in waits}
