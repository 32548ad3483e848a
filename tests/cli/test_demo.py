"""`symmplan demo`: it holds, and whatever happens to its processes, it ends with a clear error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from symmplan import Plan
from symmplan.cli import main

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_memory_is_left_clean")]

#: Seconds for a demo of a few steps on a busy machine.
PATIENCE = 240


class Demo:
    """A running demo; its progress is read as it comes."""

    def __init__(self, out: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "symmplan", "demo", "--out", str(out), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.pids: list[int] = []

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def wait_for(self, mark: str) -> None:
        for line in self.process.stderr:
            self.lines.append(line)
            if mark in line:
                self.pids = _ranks_of(self.process.pid)
                return
        pytest.fail(f"no {mark!r} in:\n{''.join(self.lines)}")

    def finish(self, timeout: float = PATIENCE) -> tuple[int, str]:
        """Exit code and the error; everything that belonged to it must be gone."""
        _, rest = self.process.communicate(timeout=timeout)
        wait_until_gone(self.pids)
        return self.process.returncode, "".join(self.lines) + rest


def _ranks_of(demo: int) -> list[int]:
    """The processes of a demo's ranks, in the order in which they were started."""
    children = Path(f"/proc/{demo}/task/{demo}/children").read_text().split()
    commands = {int(c): Path(f"/proc/{c}/cmdline").read_text() for c in children}
    return [child for child, command in commands.items() if "spawn_main" in command]


def _sessions() -> dict[int, str]:
    """``{session: command}`` of the processes that run, zombies not counted."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        state, _, _, session = text.rpartition(")")[2].split()[:4]
        if state not in "ZX":
            found[int(session)] = text
    return found


def wait_until_gone(pids: list[int], seconds: float = 60.0) -> None:
    """Each rank leads a session, so what it started is found, too."""
    deadline = time.monotonic() + seconds
    while left := {pid: text for pid, text in _sessions().items() if pid in pids}:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


# ---- it holds --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    """One whole demo, as a user runs it."""
    out = tmp_path_factory.mktemp("demo")
    with Demo(out, "--json") as demo:
        demo.wait_for("start 2 ranks")
        text, rest = demo.process.communicate(timeout=PATIENCE)
        wait_until_gone(demo.pids)
    assert text, rest
    return {**json.loads(text), "code": demo.process.returncode, "out": out, "stderr": rest}


@pytest.mark.further
def test_both_models_learn_the_same(result):
    assert result["parity"] is True, {k: v for k, v in result.items() if "difference" in k}
    assert result["loss_difference"] <= 1e-6
    assert result["tensor_difference"] <= 1e-6
    losses = result["losses"]
    assert losses["symmplan"] == pytest.approx(losses["plain"], rel=1e-6)
    assert len(losses["plain"]) == 8
    assert losses["plain"][-1] < losses["plain"][0] - 1
    assert result["compared"] > result["parameters"] * result["ranks"] * 8
    assert result["same_plan_on_all_ranks"] is True
    assert (result["ok"], result["code"]) == (True, 0)


@pytest.mark.further
def test_bytes_are_shared_down_to_the_proven_minimum(result):
    assert result["peak_bytes"] == result["segment_bytes"] == result["lower_bound_bytes"]
    assert result["unshared_bytes"] > 3 * result["peak_bytes"]


@pytest.mark.further
def test_each_segment_met_once(result):
    assert result["rendezvous"] == result["segments"] >= 1


@pytest.mark.further
def test_every_declared_tensor_is_placed_or_explained(result):
    assert result["placed"] == result["bound"] + result["staged"] > 0
    assert len(result["staged_because"]) == result["staged"]
    assert all(entry["reason"] for entry in result["staged_because"])
    assert all(entry["reason"] for entry in result["unplanned"])


@pytest.mark.further
def test_the_declared_op_is_placed(result):
    plan = Plan.from_json((result["out"] / "plan.json").read_text())
    assert "symmplan_demo::peer_max.default" in {b.op for b in plan.problem.buffers}


@pytest.mark.further
def test_collectives_are_timed(result):
    calls = {call["kind"]: call for call in result["collectives"]}
    assert {"all_gather", "reduce_scatter"} <= set(calls)
    assert calls["all_gather"]["difference"] == 0
    assert all(call["difference"] <= 1e-6 for call in calls.values())
    times = result["collectives_s"]
    assert result["collective_speedup_vs_gloo"] == pytest.approx(times["gloo"] / times["symmplan"])


@pytest.mark.further
def test_the_plan_is_written_and_is_the_one_that_ran(result):
    plan = Plan.from_json((result["out"] / "plan.json").read_text())
    assert plan.fingerprint == result["fingerprint"]
    assert plan.peak_bytes == result["peak_bytes"]
    page = (result["out"] / "plan.html").read_text()
    assert plan.fingerprint[:12] in page
    assert sorted(path.name for path in result["out"].iterdir()) == ["plan.html", "plan.json"]


@pytest.mark.further
def test_the_report_tells_it_all(result):
    from symmplan.cli.demo import render

    text = render(result)
    assert f"done in {result['seconds']:.0f} s" in text
    slow = {**result["collectives"][0], "symmplan_s": 3.0, "gloo_s": 1.0}
    assert "  3.0 x slower" in render({**result, "collectives": [slow]})
    for word in ("parity holds", "placed", "left out", "rendezvous: 1", "lower bound", "gloo"):
        assert word in text
    for path in result["written"].values():
        assert path in text
    assert "DOES NOT HOLD" in render({**result, "parity": False})


@pytest.mark.further
def test_progress_says_what_is_done(result):
    for mark in ("step 1 of 8", "compile with", "time the collectives"):
        assert mark in result["stderr"]


@pytest.mark.further
def test_without_a_compiler_the_demo_runs_op_by_op_and_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main(["demo", "--steps", "1", "--out", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    assert "inner='eager' (for Inductor: see symmplan doctor)" in shown
    assert "parity holds" in shown


# ---- parity can fail -------------------------------------------------------------------------


def test_a_difference_is_seen():
    import torch

    from symmplan.cli.demo.train import LargestDifference, relative

    same = {"w": torch.tensor([1.0, 2.0])}
    difference = LargestDifference()
    assert not difference.within(sums=1e-6)  # nothing was compared
    difference.losses(1.0, 1.0)
    difference.tensors(same, {"w": torch.tensor([1.0, 2.0])})
    assert difference.within(sums=1e-6)
    assert difference.bitwise
    difference.tensors(same, {"w": torch.tensor([1.0, 2.0000005])})
    assert difference.within(sums=1e-6)
    assert not difference.bitwise
    for wrong in (
        {"w": torch.tensor([1.0, 2.001])},
        {"w": torch.tensor([1.0, float("nan")])},
        {"w": torch.tensor([1.0])},
        {},
    ):
        other = LargestDifference()
        other.tensors(same, wrong)
        assert not other.within(sums=1e-6)
    other = LargestDifference()
    other.losses(1.0, float("nan"))
    assert not other.within(sums=1e-6)
    assert relative(torch.zeros(0), torch.zeros(0)) == 0


# ---- it ends ---------------------------------------------------------------------------------

SLOW = pytest.mark.slow
MARKS = [
    pytest.param("start 2 ranks", 0, marks=SLOW),
    pytest.param("meet the other ranks", 1, marks=pytest.mark.further),
    pytest.param("step 1 of 3 without symmplan", 1, marks=SLOW),
    ("step 1 of 3 with symmplan", 0),
    pytest.param("step 3 of 3 with symmplan", 1, marks=SLOW),
    pytest.param("time the collectives", 0, marks=SLOW),
    pytest.param("verify the plan", 1, marks=SLOW),
    pytest.param("write the plan", 0, marks=SLOW),
]


@pytest.mark.parametrize(("mark", "victim"), MARKS)
def test_killing_a_rank_ends_the_demo(mark, victim, tmp_path):
    with Demo(tmp_path, "--inner", "eager", "--steps", "3", "--timeout", "120") as demo:
        demo.wait_for(mark)
        if mark != "write the plan":
            time.sleep(0.05)  # well into it
        pid = demo.pids[victim]
        os.kill(pid, signal.SIGKILL)
        code, told = demo.finish()
    if mark == "write the plan" and code == 0:
        return  # it had already handed in its result
    assert code == 1, told
    assert (
        f"symmplan: local ranks failed: rank {victim} (pid {pid}) was killed by SIGKILL at: "
        in told
    )
    assert "fix: " in told
    assert "Traceback" not in told


@pytest.mark.further
def test_a_rank_that_fails_is_told_with_its_reason(tmp_path):
    (tmp_path / "plan.json" / "in the way").mkdir(parents=True)
    with Demo(tmp_path, "--inner", "eager", "--steps", "1") as demo:
        demo.wait_for("start 2 ranks")
        code, told = demo.finish()
    assert code == 1
    assert "local ranks failed: rank 0 " in told
    assert "failed at: write the plan: " in told
    assert "plan.json" in told


@pytest.mark.further
def test_the_timeout_ends_the_demo(tmp_path):
    words = ["--inner", "eager", "--steps", "9999", "--timeout", "0.5"]
    with Demo(tmp_path, *words) as demo:
        demo.wait_for("start 2 ranks")
        code, told = demo.finish(timeout=30)
    assert code == 1
    assert "local ranks failed: they did not finish within 0.5 s" in told
    assert "rank 0 at: " in told


@pytest.mark.slow
def test_a_rank_that_stops_does_not_hang_the_demo(tmp_path):
    with Demo(tmp_path, "--inner", "eager", "--timeout", "25") as demo:
        demo.wait_for("step 1 of")
        os.kill(demo.pids[1], signal.SIGSTOP)
        code, told = demo.finish()
    assert code == 1
    assert "local ranks failed: " in told


@pytest.mark.further
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_signals_to_the_demo_end_its_ranks(number, code, tmp_path):
    with Demo(tmp_path, "--inner", "eager", "--steps", "9999") as demo:
        demo.wait_for("meet the other ranks")
        demo.process.send_signal(number)
        found, told = demo.finish()
    assert found == code, told
    assert "Traceback" not in told


@pytest.mark.further
def test_ranks_die_with_the_demo(tmp_path):
    with Demo(tmp_path, "--inner", "eager", "--steps", "9999") as demo:
        demo.wait_for("step 1 of")
        os.kill(demo.pids[1], signal.SIGSTOP)  # it cannot find out by itself
        demo.process.kill()
        demo.process.wait()
        wait_until_gone(demo.pids)


def test_out_must_be_a_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 1
    assert "File exists" in capsys.readouterr().err


# ---- whose error is told ---------------------------------------------------------------------


def test_what_is_left_is_estimated_from_what_was_done(monkeypatch, capsys):
    from symmplan.report import progress as module

    progress, now = module.ProgressLine(), time.monotonic()
    for later, what, part in (
        (5.0, "start 2 ranks", 0.0),
        (10.0, "first", 0.2),  # what came before says nothing of what is to come
        (16.0, "third", 0.4),
        (22.0, "fourth", 0.7),
        (23.0, "write", 0.0),
    ):
        monkeypatch.setattr(module.time, "monotonic", lambda later=later: now + later)
        progress.mark(what, part)
    assert [line.partition("s  ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "start 2 ranks",
        "first (20% done)",
        "third (40% done, about 18 s left)",
        "fourth (70% done, about 7 s left)",
        "write",
    ]


def test_a_long_wait_is_no_silence(monkeypatch, capsys):
    from symmplan.report import progress as module

    progress, now = module.ProgressLine(), time.monotonic()
    progress.mark("compile")
    for later in (1.0, 9.0, 11.0, 12.0, 22.0):
        monkeypatch.setattr(module.time, "monotonic", lambda later=later: now + later)
        progress.beat()
    said = capsys.readouterr().err
    assert [line.partition("s  ")[2] for line in said.splitlines()] == [
        "compile",
        "compile (11 s so far)",
        "compile (22 s so far)",
    ]
    assert "pid" not in said
