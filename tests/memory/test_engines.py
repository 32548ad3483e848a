"""Communicators for copy engines, without any: in which order segments are registered with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from symmplan.model import SegmentSpec
from symmplan.runtime.engines import register
from symmplan.runtime.tenants import Suballocation


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


def test_parts_of_one_segment_join_the_communicators_of_each_other():
    """A tenant whose segments have groups of their own may get all of its parts in one segment."""
    joined = []
    host = SimpleNamespace(tenants=[], join=joined.append)
    hosts = {"tensor": "s0", "context": "s0", "expert": "s1"}
    parts = {
        name: SimpleNamespace(host=SimpleNamespace(spec=SimpleNamespace(name=there)))
        for name, there in hosts.items()
    }
    mine = Suballocation(host, parts, "graphs")
    mine.join({name: {f"{name} gather": name} for name in hosts})
    tensor, context, expert = ({f"{name} gather": name} for name in hosts)
    assert joined == [{"s0": {**tensor, **context}, "s1": expert}]
