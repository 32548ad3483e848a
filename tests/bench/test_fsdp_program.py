"""`symmplan bench fsdp`: whole steps, and a user's own model."""

from __future__ import annotations

import json

import pytest
import torch

from symmplan.bench import fsdp as bench_fsdp
from symmplan.bench.parts import fsdp_ranks
from symmplan.bench.parts.fsdp_sides import Side
from symmplan.bench.parts.programs import check_program, program_of
from symmplan.cli import main
from symmplan.cli.shell import parser_of
from symmplan.errors import CommandError, RanksFailedError

MODEL = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

def build():
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    numbers = torch.Generator().manual_seed(dist.get_rank())

    def step():
        loss = model(torch.randn(4, 8, generator=numbers)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, step

def silent():
    model, step = build()
    def quiet():
        step()
    return model, quiet

def unsharded():
    return nn.Linear(2, 2), print

def applied():
    import symmplan
    model, step = build()
    symmplan.fsdp.apply(model)
    return model, step

def nothing():
    pass

def only_model():
    return nn.Linear(2, 2), 7

def late():
    raise ValueError("no such data")

def greedy():
    model, step = build()
    def some():
        if not model[0]._get_fsdp_state()._fsdp_param_groups[0]._reshard_after_forward:
            raise MemoryError("too little for kept")
        return step()
    return model, some

def wants(size):
    return size
"""


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


def options(*words):
    return parser_of("symmplan bench fsdp", bench_fsdp).parse_args([*map(str, words)])


# Whole steps.


@pytest.mark.further
@pytest.mark.ranks
def test_whole_steps_of_all_sides_go_on_from_the_same_parameters():
    words = ("--layers", 2, "--dim", 16, "--steps", 3, "--tokens", 4, "--checkpoint")
    args = options(*words, "--optimizer", "adamw", "--accumulate", 4, "--reduce", "float32")
    result = json.loads(json.dumps(bench_fsdp.run(args)))
    assert result["ok"]
    (run,) = result["runs"]
    assert set(run["sides"]) == {"plain", "kept", "symmplan", "unsharded"}
    for side in ("kept", "symmplan"):
        assert run["sides"][side]["difference"] == 0.0
        assert run["sides"][side]["losses_equal"]
    # Two layers gather twice and reduce once, or gather once, in each of four passes.
    assert run["sides"]["symmplan"]["collectives"] == 4 * 2 * 3
    assert run["sides"]["kept"]["collectives"] == 4 * 2 * 2
    assert result["skipped"]["kept, pool"] == "torch has no symmetric memory on the CPU"
    text = bench_fsdp.render(result)
    assert "checkpoint, adamw, 4 passes in a step, float32" in text
    assert "4 samples, symmplan against kept: " in text
    assert "bytes of the device: not counted" in text


@pytest.mark.further
@pytest.mark.ranks
def test_compiled_layers_compute_the_same():
    words = ("--layers", 2, "--dim", 16, "--steps", 1, "--tokens", 4, "--compile")
    result = bench_fsdp.run(options(*words, "--checkpoint", "--sides", "plain", "symmplan"))
    assert result["ok"]
    assert result["runs"][0]["sides"]["symmplan"]["difference"] == 0.0


def alone(optimizer=None, passes=1):
    """A side without ranks."""
    said = {**bench_fsdp._DEFAULTS["mlp"], "model": "mlp", "layers": 1, "dim": 2}
    said |= {"device": "cpu", "ranks": 1, "cuda_graph": False, "accumulate": passes}
    said |= {"compile": False, "checkpoint": False, "optimizer": optimizer}
    return Side("unsharded", 0, said)


def values(side):
    return [p.detach().clone() for p in side.model.parameters()]


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_an_optimizer_is_part_of_the_time_only_if_it_is_asked_for(optimizer):
    side = alone(optimizer, passes=3)
    before = values(side)
    each = [float(side._loss(batch).detach()) for batch in side._batches(0, 4)]
    assert float(side._stepped(side._batches(0, 4))) == pytest.approx(sum(each) / 3)
    changed = any(not torch.equal(a, b) for a, b in zip(before, values(side), strict=True))
    assert changed == (optimizer is not None)


def test_a_side_goes_on_from_anothers_parameters():
    first, second = alone("sgd"), alone("adamw")
    second._stepped(second._batches(0, 4))
    assert not torch.equal(values(first)[0], values(second)[0])
    sides = {"plain": first, "kept": second}
    fsdp_ranks._rejoin(sides, first)
    assert all(torch.equal(a, b) for a, b in zip(values(first), values(second), strict=True))


# A user's own model.


@pytest.mark.further
@pytest.mark.ranks
def test_a_program_is_measured_before_a_line_of_it_changes(train, capsys):
    # Where the machine is busy, nothing may be clearly faster than what there is.
    args = ["bench", "fsdp", f"{train}:build", "--steps", "2", "--choose", "placed"]
    assert main([*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["program"] == f"{train}:build"
    assert result["command"].startswith(f"symmplan bench fsdp {train}:build --device cpu ")
    (run,) = result["runs"]
    assert set(run["sides"]) == {"plain", "kept", "symmplan"}
    assert run["step_speedup"] == pytest.approx(
        run["sides"]["plain"]["step_ms"] / run["sides"]["symmplan"]["step_ms"], abs=1e-2
    )
    for side in ("kept", "symmplan"):
        assert run["sides"][side]["losses_equal"]
        assert run["sides"][side]["difference"] == 0.0
    assert result["stats"]["served"] > 0
    assert result["memory"]["symmplan"]["symmetric"] == result["stats"]["segment_bytes"] > 0
    assert result["skipped"]["unsharded"] == "the program shards its model itself"
    text = bench_fsdp.render(result)
    assert "symmplan against plain: " in text
    assert "symmplan: losses of all steps are equal" in text


@pytest.mark.further
@pytest.mark.ranks
def test_a_program_that_tells_no_loss_is_timed_all_the_same(train):
    result = bench_fsdp.run(options(f"{train}:silent", "--steps", 1, "--sides", "plain", "kept"))
    row = result["runs"][0]["sides"]["kept"]
    assert row["loss"] is row["difference"] is row["losses_equal"] is None
    assert row["step_ms"] > 0
    assert "losses" not in bench_fsdp.render(result)


@pytest.mark.further
@pytest.mark.ranks
def test_a_side_that_fails_is_told_and_the_others_stay(train):
    result = bench_fsdp.run(options(f"{train}:greedy", "--steps", 1))
    assert result["ok"]
    assert set(result["runs"][0]["sides"]) == {"plain", "symmplan"}
    assert "MemoryError: too little for kept" in result["failed"]["kept"]
    assert "kept: failed, " in bench_fsdp.render(result)


@pytest.mark.parametrize(
    ("program", "says", "fix"),
    [
        ("nowhere.py:build", "there is no program 'nowhere.py:build'", "check the name"),
        ("no_such_module:build", "no module named 'no_such_module'", "check the name"),
        ("{train}", "names no function", "{train}:FUNCTION"),
        ("{train}:", "names no function", "{train}:FUNCTION"),
        ("{train}:biuld", "has no function 'biuld'", "{train}:build"),
        ("{broken}:build", "there is no program", "check the name"),
    ],
)
def test_a_program_that_is_not_there_is_named_before_ranks_start(
    program, says, fix, train, tmp_path, monkeypatch, capsys
):
    broken = tmp_path / "broken.py"
    broken.write_text("def build(:", encoding="utf-8")
    monkeypatch.setattr(bench_fsdp.command, "measured", None)
    names = {"train": train, "broken": broken}
    assert main(["bench", "fsdp", program.format(**names)]) == 1
    told = capsys.readouterr().err
    assert says in told
    assert fix.format(**names) in told
    assert "Traceback" not in told


def test_a_program_decides_what_is_trained(train, capsys):
    assert main(["bench", "fsdp", f"{train}:build", "--dim", "8", "--compile"]) == 1
    assert "leave out --dim, --compile" in capsys.readouterr().err


@pytest.mark.parametrize(
    "source",
    ["from x import build", "if 1:\n    build = 3", "try:\n    import build\nexcept A: pass",
     "from x import *", "class build: pass", "def __getattr__(name): return print"],
)  # fmt: skip
def test_a_name_may_be_bound_in_many_ways(source, tmp_path):
    path = tmp_path / "m.py"
    path.write_text(source, encoding="utf-8")
    check_program(f"{path}:build")
    path.write_text("def other():\n    build = 3", encoding="utf-8")
    with pytest.raises(CommandError, match="has no function 'build'"):
        check_program(f"{path}:build")


def test_looking_for_a_program_runs_none_of_it(tmp_path):
    path = tmp_path / "m.py"
    path.write_text("raise SystemExit\ndef build(): pass", encoding="utf-8")
    check_program(f"{path}:build")


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("unsharded", "is not sharded"),
        pytest.param("applied", "remove symmplan.fsdp.apply", marks=pytest.mark.further),
        pytest.param("nothing", "does not return a model and its step", marks=pytest.mark.further),
        pytest.param("only_model", "does not return", marks=pytest.mark.further),
        pytest.param("late", "ValueError: no such data", marks=pytest.mark.further),
    ],
)
def test_what_build_returns_is_looked_at(name, says, train, capsys):
    assert main(["bench", "fsdp", f"{train}:{name}", "--steps", "1"]) == 1
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told


def test_a_function_that_needs_arguments_is_no_program(train):
    with pytest.raises(CommandError, match="needs arguments") as error:
        program_of(f"{train}:wants", "builds")
    assert f"{train}:build" in error.value.fix
    assert not isinstance(error.value, RanksFailedError)
