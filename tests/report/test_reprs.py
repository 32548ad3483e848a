"""Everything that a user can print says in one short line what it is."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

import attrs

import symmplan
from symmplan.model import Unplanned
from symmplan.place.expected import Expected
from symmplan.runtime.observe import Checked, Seen
from symmplan.simulation.report import Ordinary, SimulationReport

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
CLASSES = sorted(
    name
    for page in REFERENCE.glob("*.md")
    for within in [re.search(r"currentmodule:: (\S+)", page.read_text())]
    for name in (
        target if target.startswith("symmplan.") else f"{within[1]}.{target}"
        for target in re.findall(r"autoclass:: (\S+)", page.read_text())
    )
)


def many(buffers=1000):
    some = symmplan.Problem.from_intervals([(f"b{i}", i, i + 2, 1 << 20) for i in range(buffers)])
    left = Unplanned("x", "mylib::op", "input", "its size is not known")
    return attrs.evolve(some, unplanned=(left, left))


def test_the_reference_names_classes():
    assert "symmplan.fsdp.Handle" in CLASSES
    assert "symmplan.memory.Segment" in CLASSES


def test_no_public_class_prints_as_an_address():
    for name in CLASSES:
        found = pkgutil.resolve_name(name)
        protocol = name == "symmplan.memory.Backend" and found._is_protocol
        assert protocol or has_repr(found), name


def has_repr(found):
    return found.__repr__ is not object.__repr__


def test_a_problem():
    assert repr(many()) == "<Problem: 1,000 buffers of 1000 MiB, 1,001 operations, 2 left out>"
    assert "left out" not in repr(attrs.evolve(many(), unplanned=()))


def test_a_backend():
    made = symmplan.backend(memory="local")
    assert repr(made) == "<symmplan.backend: memory='local', 0 graphs, 0 plans>"


def test_a_checked_step():
    call = Expected(
        name="gather",
        op="_c10d_functional::all_gather_into_tensor",
        group="0",
        memory="shm",
        nbytes=16,
        dtype="float32",
        algorithm="symmetric",
    )
    checked = Checked((Seen(call, "symmetric"), Seen(call, "ordinary", reason="it was late")))
    assert repr(checked) == "<Checked: 2 collectives, 1 not as planned>"
    assert str(checked).startswith("calls  collective")  # print() still shows the table


def test_a_simulation():
    plan = symmplan.plan(many(100))
    report = SimulationReport(
        ranks=4096,
        rank=7,
        memory="nccl",
        plans=(plan,),
        peak_bytes=plan.peak_bytes,
        lower_bound_bytes=plan.lower_bound_bytes,
        ordinary_bytes=Ordinary(1 << 20, 0, 0, 0),
        cached_bytes=0,
        beyond_bytes=0,
        asleep_bytes=0,
        device_bytes_without=2 << 20,
        collectives=(),
    )
    assert repr(report) == (
        "<SimulationReport: rank 7 of 4,096, 2 MiB symmetric and 1 MiB ordinary memory, 1 plan>"
    )


def test_what_holds_a_problem_is_short_too():
    plan = symmplan.plan(many(200))
    for advice in plan.advice():
        assert not inspect.getattr_static(advice, "problem") or len(repr(advice.problem)) < 120
