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
from paths import HELPERS, ROOT

TRAINERS = ROOT / "examples" / "trainers"
NAMES = sorted(path.stem for path in TRAINERS.glob("*.py"))
#: What a program needs beside torch.
NEEDS = {name: name.removeprefix("with_") for name in NAMES if name.startswith("with_")}


def said(text):
    """What a program says that it prints: the indented lines of its docstring."""
    lines = ast.get_docstring(ast.parse(text)).splitlines()
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))


def run(program, ranks, folder, *options, **environ):
    """What the program prints on ranks of the CPU: see `trainers.py`."""
    start = [*pages.TORCHRUN.split(), "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *start, HELPERS / "trainers.py", program, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if options else subprocess.PIPE,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


def check(name, folder, *, exact=True, **environ):
    """The program has equal losses; on CPU ranks it prints just what it says."""
    path = TRAINERS / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    printed = run(path, pages.ranks(text), folder, **environ)
    if exact:
        shown = f"{name} prints\n{printed}\nand not\n{said(text)}"
        assert pages.alike(said(text), printed), shown
    lines = re.findall(r"^(alone|symmplan) +([\d. ]+)$", printed, re.MULTILINE)
    losses = {name: [float(loss) for loss in line.split()] for name, line in lines}
    assert losses["symmplan"] == pytest.approx(losses["alone"], abs=0 if exact else 0.02)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.ranks
def test_a_trainer_prints_what_it_says(name, tmp_path):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}: python -m pip install '.[trainers]'")
    # Without the compiler, which takes long.
    check(name, tmp_path, TORCHDYNAMO_DISABLE=str(int(name == "fsdp2")))


@pytest.mark.ranks
@pytest.mark.further
def test_the_trainer_of_compiled_blocks_prints_the_same_compiled(tmp_path):
    check("fsdp2", tmp_path)


#: What torchtitan trains here: its debug model on short sequences.
TITAN = """
--model.name llama3 --model.flavor debugmodel --model.hf_assets_path assets --debug.seed 0
--training.dataset c4_test --training.dataset_path assets/texts --training.steps 4
--training.seq_len 128 --training.local_batch_size 2 --metrics.log_freq 1
--metrics.disable_color_printing
"""


@pytest.mark.ranks
@pytest.mark.further
def test_torchtitan_has_the_same_losses(tmp_path):
    titan_trains_alike(tmp_path)


def titan_trains_alike(folder, *, exact=True):
    """torchtitan prints the same losses with symmplan, and the plan."""
    for name in ("torchtitan", "triton"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: python -m pip install 'torchtitan<0.3' {name}")
    examples = TRAINERS.parent / "torchtitan"
    make = [sys.executable, examples / "assets.py", "assets"]
    subprocess.run(make, check=True, cwd=folder, capture_output=True)
    losses = []
    for program in ("torchtitan.train", examples / "train.py"):
        printed = run(program, 2, folder, *TITAN.split())
        found = set(re.findall(r"step: +(\d+) +loss: +([\d.]+)", printed))
        losses.append({int(step): float(loss) for step, loss in found})
    assert set(losses[0]) == {1, 2, 3, 4}
    assert losses[1] == pytest.approx(losses[0], rel=0 if exact else 0.01, abs=0)
    assert re.search(r"plan [0-9a-f]{12}: \d+ buffers in 1 segment", printed)


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_is_short(name):
    assert len((TRAINERS / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60
