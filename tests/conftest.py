"""What every test runs under: Hypothesis without deadlines, since the machine may be busy."""

from __future__ import annotations

import gc
import os
import random
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# The same examples each time: a change is judged by itself, not by luck.
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
# That something is wrong is all that `mutants.py` asks.
settings.register_profile(
    "mutants", parent=settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


_SEEN = set()


def pytest_itemcollected(item):
    """Of a test that starts processes the first case runs; the others are `further` ones.

    Decided while tests are collected, before anything selects or shuffles them.
    """
    function = getattr(item, "function", None)
    if item.get_closest_marker("ranks") and not item.get_closest_marker("slow"):
        if function in _SEEN and not item.get_closest_marker("all_cases"):
            item.add_marker("further")
        _SEEN.add(function)


def pytest_addoption(parser):
    text = "of the selected tests run one in N, at random; --randomly-seed repeats the choice"
    parser.addoption("--one-in", type=int, default=1, metavar="N", help=text)


@pytest.hookimpl(trylast=True)  # behind what selects by marks
def pytest_collection_modifyitems(config, items):
    """Leave out what ``--one-in`` leaves out. The order in which tests run stays."""
    share = config.getoption("one_in")
    names = sorted(item.nodeid for item in items)
    random.Random(config.getoption("randomly_seed", 0)).shuffle(names)
    chosen = set(names[::share])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_collection_finish():
    """What was imported stays: tests that collect garbage need not look at it."""
    gc.collect()
    gc.freeze()


# How wide a terminal is, as pytest-xdist tells its workers: the command's texts would be wrapped.
os.environ.pop("COLUMNS", None)

# A shell that starts the tests in the background has it ignored, and what they start inherits that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def csv(tmp_path):
    """A problem of three buffers in a file."""
    path = tmp_path / "problem.csv"
    path.write_text("id,lower,upper,size\na,0,4,1024\nb,2,6,2048\nc,4,8,1024\n")
    return path


@pytest.fixture
def shared_memory_is_left_clean():
    """Fail if files of ours appear in /dev/shm during the test."""
    before = _ours()
    yield
    assert _ours() <= before, "files were left in /dev/shm"


def _ours() -> set[str]:
    """Without semaphores: those are multiprocessing's, which a process of it removes."""
    folder = Path("/dev/shm")
    names = folder.iterdir() if folder.is_dir() else ()
    return {path.name for path in names if not path.name.startswith("sem.mp-") and _is_ours(path)}


def _is_ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:  # somebody else's, and gone again
        return False
