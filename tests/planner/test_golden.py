"""What a program's plan is, by its fingerprint: it changes only where somebody means it to.

A change here is a new plan format: all ranks must run the same version then, and the CHANGELOG says
so under *Plan format*. ``PYTHONPATH=tests/helpers
python tests/planner/test_golden.py`` writes the fingerprints anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import custom_ops
import pytest
import torch.distributed as dist
from programs import Program, make_inputs, run
from torch.fx.experimental.proxy_tensor import make_fx

import symmplan
from symmplan.capture import capture_fx
from symmplan.capture.steps import plan_poison
from symmplan.place.algorithms import Lowerings

FILE = Path(__file__).with_name("golden.json")
ALGORITHMS = {
    "shm": (Lowerings("shm"), False),
    "process group": (Lowerings("nccl"), False),
    "overwritten when dead": (Lowerings("shm"), True),
}


def _groups() -> list[str]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    custom_ops.load()
    second = dist.new_group([0, 1])
    return [dist.group.WORLD.group_name, second.group_name]


@pytest.fixture(scope="module")
def groups():
    yield _groups()
    dist.destroy_process_group()


def _read() -> list[dict]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def _program(entry: dict) -> Program:
    steps = tuple(tuple(step) for step in entry["steps"])
    return Program(tuple(entry["inputs"]), steps, tuple(entry["outputs"]))


def _fingerprints(program: Program, groups: list[str]) -> dict[str, str]:
    graph = make_fx(lambda *x: run(program, groups, *x), tracing_mode="fake")
    module = graph(*make_inputs(program, 0))
    found = {}
    for name, (lowerings, poison) in ALGORITHMS.items():
        captured = capture_fx(
            module,
            as_run=lowerings.as_run,
            skip=lowerings.skip,
            producer=lambda node, low=lowerings: low.producer(node, lambda _: None),
        )
        captured = plan_poison(captured) if poison else captured
        found[name] = symmplan.plan(captured.problem).fingerprint
    return found


@pytest.mark.parametrize("entry", _read(), ids=lambda e: f"{len(e['steps'])}-steps")
def test_plans_are_what_they_were(groups, entry):
    assert _fingerprints(_program(entry), groups) == entry["fingerprints"]


def test_the_programs_say_something():
    """Plans differ from program to program, and by algorithm where collectives run."""
    found = [f for entry in _read() for f in entry["fingerprints"].values()]
    assert len(found) == 30
    assert len(set(found)) >= 25
    kinds = {step[0] for entry in _read() for step in entry["steps"]}
    assert kinds >= {"gather", "scatter", "reduce", "start", "gathers", "peers", "push", "bump"}


if __name__ == "__main__":
    there = _groups()
    entries = _read()
    for entry in entries:
        entry["fingerprints"] = _fingerprints(_program(entry), there)
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
