"""Communicators for copy engines, without any: in which order segments are registered with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from attrs import evolve

import symmplan
from symmplan.memory import realize
from symmplan.model import Access, Buffer, Operation, Problem, SegmentSpec
from symmplan.runtime.engines import register
from symmplan.runtime.tenants import timed


def _arena(names, met):
    """One segment that met groups in the order ``met``; the plan has their names sorted."""
    joined = []
    segment = SimpleNamespace(
        spec=SegmentSpec("s0", tuple(sorted(names)), 512, 0),
        rendezvous={name: None for group in met for name in (group, f"torch's {group}")},
    )
    arena = SimpleNamespace(memory="nccl", segments={"s0": segment})
    arena.join = lambda more: joined.extend((s, list(groups)) for s, groups in more.items())
    return arena, joined


@pytest.mark.parametrize("names", [("row", "column"), ("a", "b"), ("b", "a")])
def test_segments_are_registered_in_the_order_in_which_they_met_their_groups(names):
    """On each rank of a mesh its row and its column have names of their own, in any alphabetical
    order; who registers first with its row waits for whoever registers first with its column."""
    row, column = names
    arena, joined = _arena(names, met=(row, column))
    engines = {
        name: SimpleNamespace(groups={f"{place} gather": None, f"{place} exchange": None})
        for name, place in ((column, "column"), (row, "row"))
    }
    register(arena, engines)
    wanted = ["row gather", "row exchange", "column gather", "column exchange"]
    assert joined == [("s0", wanted)]


def test_parts_of_one_segment_meet_each_in_its_own_groups():
    """A tenant whose segments have groups of their own may get all of its parts in one segment."""
    groups = ("tensor", "context", "expert")

    def made(*shared):
        problem = Problem(
            buffers=[Buffer(g, 64, g) for g in groups],
            operations=[Operation(g, group=g) for g in groups],
            accesses=[Access(g, g, write=True) for g in groups],
            shared_groups=shared,
        )
        return realize(symmplan.plan(problem), memory="local")

    own, host = made(), made(groups)
    ((name, whole),) = host.segments.items()
    segments = {s.spec.groups[0]: n for n, s in own.segments.items()}
    places = {segments[g]: evolve(p, segment=name) for g, p in host.plan.placements.items()}
    mine = timed(SimpleNamespace(arena=own), host, places)
    for group in groups:
        part = mine.segments[segments[group]]
        assert {*part.rendezvous} == {group}
        assert part.meeting() is whole.meeting(group)
        assert part.allocation is whole.tensor
        assert part.tensor.data_ptr() == whole.address + places[segments[group]].offset
    mine.give_back()
    assert whole.meeting("tensor").peers  # the host's stay
    assert mine.released
    host.give_back()
    own.give_back()
    assert host.released
