"""What `symmplan bench fsdp` says of sides that cannot be told apart."""

from __future__ import annotations

import pytest

from symmplan.bench.parts import fsdp_tables


def _side(median, low, high):
    return {"step_ms": median, "step_quartiles_ms": [low, high]}


@pytest.mark.parametrize(
    ("ours", "theirs", "more"),
    [
        (_side(24.3, 25.0, 25.5), _side(64.0, 32.0, 96.0), None),
        (_side(29.0, 25.0, 35.0), _side(64.0, 32.0, 96.0), 20),  # as many again at least
        (_side(10.0, 9.0, 11.0), _side(10.1, 9.0, 11.0), 3924),
        (_side(10.0, 9.0, 11.0), _side(10.0, 9.0, 11.0), 1_000_000 - 20),
    ],
)
def test_sides_whose_quartiles_overlap_are_not_told_apart(ours, theirs, more):
    found = fsdp_tables.more_steps(ours, theirs, 20)
    assert found == (more if more is None else pytest.approx(more, rel=0.01))
    run = {"tokens": 64, "sides": {"plain": theirs, "symmplan": ours}}
    (line,) = fsdp_tables._gain_lines(run, {"symmplan": {}}, "samples", 20)
    assert line.startswith("64 samples, symmplan against plain: ")
    assert ("not resolved (the quartiles overlap; about" in line) == (more is not None)
    assert (f"{theirs['step_ms'] / ours['step_ms']:.2f}x" in line) == (more is None)


def test_what_a_batch_is_counted_in():
    assert fsdp_tables.counted_in("mlp") == "samples"
    assert fsdp_tables.counted_in("llama") == "tokens"
