"""Races between streams are found over the doubles: planted ones, and no others.

Each planted race is in a program that gives the right numbers there, or none.
"""

from __future__ import annotations

import re

import pytest
import torch
from doubles import installed, state
from fsdp_models import Net, Trace, batch, shard, train
from fsdp_models import mesh as mesh_of
from ranks import RankPool, pool_of

import symmplan
from symmplan.device import device_of

CPU = torch.device("cpu")

two = pool_of(2, timeout=100.0)


@pytest.fixture
def device():
    with installed(races=True):
        yield device_of(CPU)


def found():
    """What each pair of accesses is, in the order in which they were given."""
    return list(dict.fromkeys((a.op, b.op) for a, b in state().races))


def asked(stream):
    event = stream.record_event()
    while not event.query():
        pass


def by_way_of_another(here, there):
    third = device_of(CPU).new_stream()
    third.wait_stream(here)
    there.wait_stream(third)


ORDERS = {
    "an event": lambda here, there: there.wait_event(here.record_event()),
    "a stream": lambda here, there: there.wait_stream(here),
    "the host that waits for the stream": lambda here, _: here.synchronize(),
    "the host that waits for the device": lambda *_: state().streams.synchronize(),
    "the host that waits for an event": lambda here, _: here.record_event().synchronize(),
    "the host that asks for an event until it is reached": lambda here, _: asked(here),
    "an event by way of a third stream": by_way_of_another,
}
NOT_ORDERS = {
    "nothing": lambda *_: None,
    "an event that is recorded and not waited for": lambda here, _: here.record_event(),
    "an event that is recorded too early": lambda _, there: there.wait_event(EARLY[-1]),
    "the other direction": lambda here, there: here.wait_stream(there),
}
EARLY = []


@pytest.mark.parametrize("first_writes", [True, False])
@pytest.mark.parametrize("side_first", [True, False])
@pytest.mark.parametrize("how", [*ORDERS, *NOT_ORDERS])
def test_two_accesses_of_a_segment(device, monkeypatch, how, side_first, first_writes):
    monkeypatch.setattr("symmplan.process.PROCESS.segments", [segment := Segment(64)])
    x = segment.tensor[8:24].view(torch.float32)
    side, main = device.new_stream(), device.current_stream()
    here, there = (side, main) if side_first else (main, side)
    EARLY[:] = [here.record_event()]

    def access(stream, writes):
        with device.on_stream(stream):
            if writes:
                x[1:].zero_()
            else:
                x[:2].sum()

    access(here, first_writes)
    {**ORDERS, **NOT_ORDERS}[how](here, there)
    access(there, not first_writes)
    ops = {True: "aten::zero_", False: "aten::sum"}
    assert found() == ([] if how in ORDERS else [(ops[first_writes], ops[not first_writes])])


class Segment:
    """As much of one as is asked for."""

    def __init__(self, nbytes):
        self.tensor, self.nbytes = torch.zeros(nbytes, dtype=torch.uint8), nbytes


def test_bytes_beside_each_other_and_two_that_read_are_no_race(device, monkeypatch):
    monkeypatch.setattr("symmplan.process.PROCESS.segments", [segment := Segment(64)])
    segment.tensor[:32].zero_()
    segment.tensor[40:].sum()
    with device.on_stream(device.new_stream()):
        segment.tensor[32:40].zero_()
        segment.tensor[40:].sum()
    assert found() == []


def test_a_tensor_that_is_read_before_the_stream_that_makes_it(device):
    side = device.new_stream()
    with device.on_stream(side):
        made = torch.ones(4) * 2
    made.sum()
    assert found() == [("aten::mul", "aten::sum")]
    device.current_stream().wait_stream(side)
    made.sum()
    assert len(found()) == 1


def _planned(rank, world, act):
    """Train with a plan; then ``act(layer, side)`` with a layer whose parameters are unsharded."""
    with installed(races=True):
        torch.manual_seed(7)
        model = shard(Net(3), mesh=mesh_of(world))
        handle = symmplan.fsdp.apply(model, memory="nccl", choose="push", timeout=30.0, debug=True)
        train(model, Trace(), rank, steps=3)
        assert handle.stats.placed
        assert state().races == []
        side = device_of(CPU).new_stream()
        kept = []
        layer = model.blocks[1].up
        hook = layer.register_forward_hook(lambda layer, *_: act(layer, side, kept))
        for step in range(3):
            model(batch(step, rank)).pow(2).mean().backward()
            model.zero_grad()
        hook.remove()
        races = {(a.op, b.op) for a, b in state().races}
        handle.remove()
    return races


def _reads(layer, side, _):
    with torch.cpu.stream(side):
        layer.weight.detach().sum()


def _reads_in_order(layer, side, _):
    side.wait_stream(torch.cpu.current_stream())
    _reads(layer, side, _)
    torch.cpu.current_stream().wait_stream(side)


def _reads_and_nobody_waits(layer, side, _):
    side.wait_stream(torch.cpu.current_stream())
    _reads(layer, side, _)


def _writes_after_reshard(layer, side, kept):
    """A view of what was unsharded in the pass before, whose bytes are others' by now."""
    if kept:
        with torch.cpu.stream(side), torch.no_grad():
            kept.pop().zero_()
    kept.append(layer.weight.data.view(-1))


@pytest.mark.ranks
@pytest.mark.parametrize("act", [_reads, _reads_and_nobody_waits])
def test_a_race_of_a_program_with_fsdp2s_placements(two, act):
    for races in two.run(_planned, act):
        assert any("aten::sum" in pair for pair in races)


@pytest.mark.further
@pytest.mark.ranks
def test_a_view_cannot_be_written_after_reshard():
    """Its storage has no bytes then, as FSDP2's own has none."""
    with RankPool(2, timeout=100.0) as ranks:
        outcomes = ranks.outcomes(_planned, _writes_after_reshard)
    for outcome in outcomes:
        assert re.search(r"that is invalid|was resharded", str(outcome.error)), outcome


@pytest.mark.further
@pytest.mark.ranks
def test_a_program_that_waits_has_none(two):
    assert two.run(_planned, _reads_in_order) == [set(), set()]
