"""The programs of `examples/trainers`: each prints what its first lines say, on CPU ranks."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import textwrap

import pages
import pytest
import torch
from paths import ROOT
from torch.distributed.fsdp._fully_shard import _fsdp_param
from trainer_runs import check_engaged, run

TRAINERS = ROOT / "examples" / "trainers"
NAMES = sorted(path.stem for path in TRAINERS.glob("*.py"))
#: What a program needs beside torch, which the extra `trainers` installs.
NEEDS = {name: [name.removeprefix("with_")] for name in NAMES if name.startswith("with_")}
NEEDS["with_trl"] += ["peft"]


def said(text):
    """What a program says that it prints: the indented lines of its docstring."""
    lines = ast.get_docstring(ast.parse(text)).splitlines()
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))


def check(name, folder, *, exact=True, **environ):
    """The program has equal losses; on CPU ranks it prints just what it says. What it prints."""
    path = TRAINERS / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    printed = run(path, pages.ranks(text), folder, **environ)
    if exact:
        shown = f"{name} prints\n{printed}\nand not\n{said(text)}"
        assert pages.alike(said(text), printed), shown
    alone, trained = None, re.findall(LOSSES, printed, re.MULTILINE)
    for which, *numbers in trained:
        found = [[float(loss) for loss in line.split()] for line in numbers]
        alone = found if which == "alone" else alone
        for losses, wanted in zip(found, alone, strict=True):
            last = wanted[-len(losses) :] if which == "resumed" else wanted
            assert losses == pytest.approx(last, abs=0 if exact else 0.02)
    if name in NEEDS:
        # All of them evaluate, and go on from what was saved.
        assert {which for which, _, evaluated in trained if evaluated} == WHICH
        found = re.findall(r"^\{'symmplan/.*\}$", printed, re.MULTILINE)
        engaged = [ast.literal_eval(numbers) for numbers in found]
        assert len(engaged) == sum(which != "alone" for which, *_ in trained)
        if exact:  # devices measure, and what is no faster in symmetric memory is plain there
            for numbers in engaged:
                check_engaged(numbers)
        # The first step was recorded and no other: as many in six steps as in the last two.
        recorded = [numbers["symmplan/recorded"] for numbers in engaged]
        assert recorded[::2] == recorded[1::2]
    return printed


#: The trainings of a program.
WHICH = {"alone", "symmplan", "resumed"}
#: What a program prints of each training: its losses, and those of its evaluations.
LOSSES = r"^(alone|symmplan|resumed) +([\d. ]+)(?:\| evaluated ([\d. ]+))?$"


@pytest.mark.further
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.ranks
def test_a_trainer_prints_what_it_says(name, tmp_path):
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: python -m pip install '.[trainers]'")
    # Without the compiler, which takes long.
    check(name, tmp_path, TORCHDYNAMO_DISABLE=str(int(name == "fsdp2")))


@pytest.mark.ranks
@pytest.mark.further
def test_the_trainer_of_compiled_blocks_prints_the_same_compiled(tmp_path):
    check("fsdp2", tmp_path)


@pytest.mark.ranks
@pytest.mark.further
def test_torchtitan_has_the_same_losses(tmp_path):
    titan_trains_alike(tmp_path)


def titan_trains_alike(folder, *options, exact=True):
    """torchtitan has the same losses with symmplan, goes on from what it saved, and is engaged."""
    for name in ("torchtitan", "triton"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: python -m pip install '.[torchtitan]'")
    examples = TRAINERS.parent / "torchtitan"
    make = [sys.executable, examples / "assets.py", "assets"]
    subprocess.run(make, check=True, cwd=folder, capture_output=True)
    paths = f"{examples}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    if not hasattr(_fsdp_param.FSDPParam, "_restore_spmd_types"):  # which its default needs
        options = (*options, "--parallelism.spmd_backend", "partial_dtensor")
    losses = []
    for asked in ("plain", "with_symmplan", "with_symmplan --checkpoint.load_step 4"):
        start = ["--module", "registry", "--config", *asked.split(), *TITAN, *options]
        printed = run("torchtitan.train", 2, folder, *start, PYTHONPATH=paths)
        logged = re.findall(r"(\w+ )?step: +(\d+) +loss: +([\d.]+)", printed)
        losses.append({(what, int(step)): float(loss) for what, step, loss in logged})
        if asked != "plain":
            plan = re.search(r"plan [0-9a-f]{12}: \d+ buffers in 1 segment", printed)
            # Before the second forward pass, which torchtitan captures on devices.
            assert plan.start() < printed.index(" loss: ")
            ended = re.findall(r"step 6: (symmplan/.*)$", printed, re.MULTILINE)
            assert len(ended) == 2
            if exact:
                for numbers in ended:
                    found = re.findall(r"(symmplan/.*?) (\d+)", numbers)
                    check_engaged({name: int(value) for name, value in found})
    plain, planned, resumed = losses
    trained = {("", step) for step in range(1, 7)}
    assert set(plain) == trained | {("validate ", step) for step in (1, 2, 4, 6)}
    assert planned == pytest.approx(plain, rel=0 if exact else 0.01, abs=0)
    later = {which: loss for which, loss in planned.items() if which[1] > 4}
    assert resumed == pytest.approx(later, rel=0 if exact else 0.01, abs=0)
    return printed


#: Its log without colours.
TITAN = ["--metrics.disable_color_printing"]


def test_muon_is_what_one_process_computes():
    """Of whole matrices, and of the batches of both ranks."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(5)]
    model = torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.GELU())))
    batch, momenta = torch.randn(2, 16, 64), [torch.zeros(64, 64) for _ in layers]
    losses = []
    for _ in range(3):
        each = [(model(x) - 1).square().mean() for x in batch]
        losses.append(each[0].item())
        (sum(each) / 2).backward()
        with torch.no_grad():
            for layer, momentum in zip(layers, momenta, strict=True):
                x = momentum.mul_(0.95).add_(layer.weight.grad)
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                layer.weight.sub_(x, alpha=0.02)
        model.zero_grad()
    said_ = said((TRAINERS / "muon.py").read_text(encoding="utf-8")).split()[::3]
    assert [float(loss) for loss in said_] == pytest.approx(losses, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_is_short(name):
    assert len((TRAINERS / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60
