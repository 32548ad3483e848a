"""The mixture of experts of `examples/simulate_moe.py`, simulated."""

from __future__ import annotations

import pytest
from paths import ROOT

import symmplan
from symmplan.bench.parts.programs import program_of


@pytest.mark.further
def test_experts_without_values_get_the_worst_case():
    train = program_of(f"{ROOT / 'examples' / 'simulate_moe.py'}:train", "trains")
    report = symmplan.simulate(train, ranks=16, memory="shm")
    experts, fsdp = report.plans
    rows = int(1.25 * 512 * 2)
    assert rows * 256 * 2 <= experts.peak_bytes < 1.01 * rows * 256 * 2  # in bfloat16, and signals
    assert report.peak_bytes == experts.peak_bytes + fsdp.peak_bytes
    assert {c.ranks for c in report.collectives} == {2, 8, 16}
    gathers = [b for b in fsdp.problem.buffers if "forward" in b.name]
    assert fsdp.peak_bytes < sum(b.nbytes for b in gathers)  # layers share their bytes


@pytest.mark.further
def test_layers_that_are_recomputed_keep_no_rows(monkeypatch):
    train = program_of(f"{ROOT / 'examples' / 'simulate_moe.py'}:train", "trains")
    report = symmplan.simulate(train, ranks=16, memory="shm")
    monkeypatch.setitem(train.__globals__, "checkpoint_wrapper", lambda layer: layer)
    keeping = symmplan.simulate(train, ranks=16, memory="shm")
    rows = int(1.25 * 512 * 2) * 256 * 2  # bytes of the worst case
    layers = 4
    kept = keeping.ordinary_bytes.activations - report.ordinary_bytes.activations
    assert kept >= (layers - 1) * 2 * rows  # what experts got, and what they gave back
    assert report.peak_bytes <= keeping.peak_bytes
