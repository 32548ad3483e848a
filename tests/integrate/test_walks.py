"""The walks of ARCHITECTURE.md are those of a planned step and of a planned graph."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from paths import ROOT
from ranks import pool_of
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.fsdp import fully_shard

import symmplan
from symmplan.memory.meeting import control

pytestmark = [pytest.mark.ranks, pytest.mark.all_cases]

two = pool_of(2)


def _files_of(run):
    """The package's files of which a function is called in ``run``."""
    package, seen = Path(symmplan.__file__).parent, set()

    def note(frame, event, _):
        if event == "call":
            seen.add(frame.f_code.co_filename)

    before = sys.getprofile()
    with pytest.MonkeyPatch.context() as patched:
        # What a rank does that waits for long, and what is freed by chance, is no part of the run.
        patched.setattr(control, "_LIVENESS_PERIOD", float("inf"))
        gc.collect()
        gc.disable()
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(before)
            gc.enable()
    inside = (Path(file) for file in seen if file.startswith(f"{package}/"))
    return {str(path.relative_to(package)) for path in inside}


def fsdp2_step(rank, world):
    mesh = dist.init_device_mesh("cpu", (world,))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with symmplan.fsdp.apply(model, choose="placed") as handle:

        def step():
            model(torch.randn(2, 64)).sum().backward()

        for _ in range(3):
            step()
        plain = handle.stats.plain
        files = _files_of(step)
        assert handle.stats.plain == plain
    return files


def compiled_call(rank, world):
    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", bind=True)
    layer = nn.Linear(64, 64)

    @torch.compile(backend=backend)
    def program(x):
        gathered = funcol.all_gather_tensor(layer(x).tanh(), 0, dist.group.WORLD)
        return (gathered * 2).sum()

    def call():
        program(torch.randn(4, 64)).backward()

    for _ in range(3):
        call()
    files = _files_of(call)
    assert backend.stats.plain == 0
    backend.release()
    return files


@pytest.mark.parametrize(
    ("heading", "program"), [("One FSDP2 step", fsdp2_step), ("One compiled call", compiled_call)]
)
def test_a_walk_is_short_and_true(heading, program, two):
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    walk = re.findall(r"^\d\. `([\w/]+\.py)`:", section, re.MULTILINE)
    assert 4 < len(walk) <= 8
    named = [file for file in re.findall(r"`([\w/]+\.py)`", section) if file[:6] != "tests/"]
    assert sorted(named) == sorted(set(named))
    for files in two.run(program):
        assert sorted(files) == sorted(named)
