"""Trainers on ranks of the CPU, and what their numbers must say."""

from __future__ import annotations

import os
import subprocess
import sys

import pages
from paths import HELPERS


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


def check_engaged(numbers):
    """Nothing is flat, and what was not recorded ran as planned."""
    assert numbers["symmplan/plain"] == numbers["symmplan/flat"] == 0
    assert numbers["symmplan/recorded"] > 0
    assert numbers["symmplan/served"] > 0
    assert sum(n for name, n in numbers.items() if "/algorithms/" in name) > 0
