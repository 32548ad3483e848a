"""A wait of symmplan that is left out is seen over the doubles: results are wrong, or it is listed.

Side streams of the doubles run when something waits for them, and not before. What is queued on the
default stream runs at once, so a side stream that does not wait for that stream is not seen.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from unittest import mock

import pytest
from doubles import on_devices, state
from doubles.streams import Stream
from fsdp_models import Net, batch, both, shard
from fsdp_models import mesh as mesh_of
from ranks import RankPool, pool_of

import symmplan

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=100.0)

PACKAGE = pathlib.Path(symmplan.__file__).parent
#: They wait for whoever calls them.
PASSED = (PACKAGE / "device", PACKAGE / "memory" / "streams.py")
#: Of each algorithm what lets one late stream wait for another.
SEEN = {
    "shared push": {"zero_copy._fill", "zero_copy._receive", "push._aside", "leases.wait"},
    "push": {"zero_copy._fill", "zero_copy._receive", "push._aside"},
    "placed": {"zero_copy._fill", "zero_copy._receive"},
}
#: What lets a side stream wait for the default one alone.
UNSEEN = {
    "shared push": {"push.send"},
    "push": {"push.send", "leases.wait"},
    "placed": {"leases.wait"},
}


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
    """Who waits how often, and how many results differ if one of them does not."""
    waits, wait_event = collections.Counter(), Stream.wait_event

    def wait(stream, event):
        who = _waiting()
        waits.update([who] if who is not None else [])
        if who is None or who != left_out:
            wait_event(stream, event)

    def build():
        return shard(Net(3), mesh=mesh_of(world))

    with mock.patch.object(Stream, "wait_event", wait):
        found = both(build, _train, rank, memory="nccl", choose=choose)
    assert found["stats"]["placed"]
    assert state().refused == []
    return {*waits}, len(found["differences"])


@pytest.mark.parametrize("choose", SEEN)
def test_waits_of_fsdp2s_collectives(two, choose):
    (waits, differ), _ = two.run(on_devices, _without, choose, None)
    assert differ == 0
    assert waits == SEEN[choose] | UNSEEN[choose]
    seen = set()
    for left_out in sorted(waits):
        with RankPool(2, timeout=100.0) as ranks:
            if any(differ for _, differ in ranks.run(on_devices, _without, choose, left_out)):
                seen.add(left_out)
    assert seen == SEEN[choose]
