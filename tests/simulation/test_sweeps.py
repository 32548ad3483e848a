"""Simulations of several worlds, and how far one is."""

from __future__ import annotations

import json

import pytest
import torch

import symmplan
from symmplan.cli.shell import main
from symmplan.simulation import simulate
from symmplan.simulation.run import _left


def _trained():
    """FSDP2 over all ranks of the world."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    symmplan.fsdp.apply(model)
    model(torch.ones(64, 1024)).sum().backward()


def _command(*words):
    return main(["simulate", f"{__file__}:_trained", *words])


@pytest.mark.further
def test_a_sweep_prints_how_bytes_grow(capsys):
    words = "--sweep", "ranks=4,16", "--ranks-per-host", "4", "--memory", "shm"
    assert _command(*words) == 0
    out, err = capsys.readouterr()
    head, small, large, _ = (line.split("  ") for line in out.splitlines())
    assert [w.strip() for w in head if w] == ["ranks", "symmetric", "ordinary", "device"]
    assert (small[-1], large[-1]) != ("", "")
    assert "16 ranks, world 2 of 2" in err
    assert _command(*words, "--json") == 0
    worlds = json.loads(capsys.readouterr().out)["worlds"]
    assert [w["ranks"] for w in worlds] == [4, 16]
    assert worlds[0]["ordinary_bytes"]["parameters"] > worlds[1]["ordinary_bytes"]["parameters"]


@pytest.mark.parametrize("sweep", ["64,512", "ranks=", "ranks=a", "hosts=3"])
def test_a_sweep_that_is_none_is_wrong_usage(capsys, sweep):
    assert _command("--sweep", sweep) == 2
    assert "say ranks=64,512,4096" in capsys.readouterr().err


def test_a_sweep_writes_no_files(capsys, tmp_path):
    assert _command("--sweep", "ranks=4", "-o", str(tmp_path / "out.json")) == 2
    assert "--sweep writes no files" in capsys.readouterr().err


def test_what_is_left_of_a_step_is_by_its_gradients():
    assert _left(0, 0.0) == ""
    assert _left(0.25, 5.0) == "; about 15 s left of this step"
    assert _left(0.75, 15.0) == "; about 5 s left of this step"
    assert _left(1, 20.0) == ""


def test_a_simulation_says_what_is_left(monkeypatch):
    from symmplan.simulation import run

    monkeypatch.setattr(run, "_TELL", 0.0)
    said = []

    def program():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(40)))
        for block in model:
            fully_shard(block, mesh=init_device_mesh("cpu", (4,)))
        symmplan.fsdp.apply(model)
        model(torch.ones(4, 8)).sum().backward()

    simulate(program, ranks=4, memory="shm", progress=said.append)
    assert any("left of this step" in line for line in said)
    assert "left" not in said[0]
