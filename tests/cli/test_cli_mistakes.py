"""What the command says to who mistypes, and on machines that lack something."""

from __future__ import annotations

import errno
import io
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from symmplan.cli import doctor, files, main, shell
from symmplan.cli import plan as cli_plan


def _told(words, capsys) -> dict:
    assert main([*map(str, words), "--json"]) in (1, 2)
    return json.loads(capsys.readouterr().out)["error"]


# ---- words -----------------------------------------------------------------------------------


def test_a_command_that_is_not_there(capsys):
    for words, names in ((["paln", "a.csv"], shell.COMMANDS), (["bench", "fdsp"], shell.BENCHES)):
        told = _told(words, capsys)
        assert f"invalid choice: '{words[-1] if 'bench' in words else words[0]}'" in told["what"]
        assert all(name in told["what"] for name in names)
        assert told["fix"].startswith("usage: symmplan")


def test_a_size_in_bits_is_refused(csv, capsys):
    assert main(["plan", str(csv), "--capacity", "3Gb"]) == 2
    assert "write B for bytes: b means bits" in capsys.readouterr().err


NUMBERS = {
    "demo": ("--steps 0", "--timeout 0", "--timeout -1", "--timeout long"),
    "bench comm": ("--ranks 0", "--repetitions -1", "--timeout inf", "--sizes 0"),
    "bench fsdp": (
        "--steps 0",
        "--accumulate 0",
        "--tokens 64 -1",
        "--unsharded-modules 0",
        "--room 2 0",
    ),
    "bench moe": ("--capacity 0", "--capacity nan", "--width two"),
}


@pytest.mark.parametrize("command", NUMBERS)
def test_numbers_of_which_nothing_can_be_measured_are_refused_at_once(command, capsys):
    for words in NUMBERS[command]:
        option, *_, value = words.split()
        assert main([*command.split(), *words.split()]) == 2, words
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith(f"symmplan: wrong usage: argument {option}"), told
        assert any(word in told for word in ("of 1 or more", "above 0", "is no size")), told
        assert value.rpartition(",")[2] in told


# ---- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "show"])
def test_missing_files_have_a_fix(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = _told([command, "none.csv"], capsys)
    assert told["what"] == "cannot use none.csv: No such file or directory"
    assert told["fix"] == f"check the path: {tmp_path} has no such file"
    assert told["kind"] == "CommandError"
    told = _told([command, "/nonexistent/none.csv"], capsys)
    assert told["fix"] == "check the path: there is no folder /nonexistent"
    told = _told([command, tmp_path], capsys)
    assert told["fix"] == f"name a file in {tmp_path}"


@pytest.mark.parametrize("folder", ["none", "plan.csv"])
def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(folder, tmp_path, capsys):
    csv = tmp_path / "plan.csv"
    csv.write_text("id,lower,upper,size\na,0,1,64\n")
    path = tmp_path / folder / "p.json"
    told = _told(["plan", csv, "-o", path], capsys)
    assert told["what"].startswith(f"cannot use {path}: ")
    assert told["fix"]


@pytest.mark.parametrize("option", ["-o", "--html"])
def test_files_that_cannot_be_written_are_refused_before_any_work(option, csv, tmp_path, capsys):
    for path, lack in (
        (tmp_path / "none" / "x", f"there is no folder {tmp_path}/none"),
        (tmp_path, "name a file in"),
        (csv / "x", "see who may use it"),
    ):
        assert main(["plan", str(csv), option, str(path)]) == 1
        told = capsys.readouterr().err
        assert "planning" not in told
        assert f"cannot use {path}: " in told
        assert lack in told


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("b,0", "the line has 2 values"),
        ("a,1,2,8", "buffer 'a' was listed before, in line 2"),
        (" a ,1,2,8", "buffer 'a' was listed before, in line 2"),
        ("b,5,2,8", "buffer 'b' lives in [5, 2), which is empty"),
        ("b,2,2,8", "buffer 'b' lives in [2, 2), which is empty"),
        ("b,0,2,1e29", "the size 1e29 is too large"),
        (f"b,0,2,{10**29}", f"the size {10**29} is too large"),
        (f"b,0,2,{'9' * 5000}", f"the size {'9' * 5000} is too large"),
        ("b,0,2,1e3", "size is '1e3'"),
        ("b,1e29,2,8", "lower is '1e29'"),
        ("b,0,2,nan", "size is 'nan'"),
        ("b,0,2,-1", "size is -1"),
    ],
)
def test_a_wrong_row_is_named_by_its_file_and_line(row, says, tmp_path, capsys):
    csv = tmp_path / "own.csv"
    csv.write_text(f"id,lower,upper,size\na,0,1,64\n{row}\nc,0,1,64\n")
    told = _told(["plan", csv], capsys)
    assert told["what"] == f"{csv}, line 3: {says}"
    assert told["expected"]
    assert told["fix"]


def test_broken_json_says_where(tmp_path, capsys):
    file = tmp_path / "own.json"
    file.write_text('{"format": "symmplan.problem",\n "version": 1,\n "buffers": [,]}')
    assert "at line 3, column 14" in _told(["plan", file], capsys)["what"]


def test_a_file_that_no_one_can_read_or_write_has_its_true_cause(csv, capsys):
    told = _told(["plan", csv, "-o", "/proc/own.json"], capsys)
    assert told["what"] == "cannot use /proc/own.json: its folder takes no files"
    assert told["fix"] == "name a file elsewhere: no file can be made in /proc"
    for words in (["plan", csv, "-o", "/proc/self/stat"], ["plan", "/proc/self/mem"]):
        told = _told(words, capsys)
        assert told["what"].startswith(f"cannot use {words[-1]}: ")
        assert words[-1] in told["fix"]


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, "see who may use it: ls -ld {folder}"),
        (errno.EROFS, "name a file elsewhere: no file can be made in {folder}"),
        (errno.ENOSPC, "make room there: df -h {folder}"),
    ],
)
def test_a_folder_in_which_nothing_can_be_written(number, fix, csv, monkeypatch, capsys):
    path = csv.parent / "p.json"

    def refuse(self, mode="r"):
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    monkeypatch.setattr(files, "read_text", lambda _: "id,lower,upper,size\na,0,1,64\n")
    told = _told(["plan", csv, "-o", path], capsys)
    assert told["what"] == f"cannot use {path}: {os.strerror(number)}"
    assert told["fix"] == fix.format(folder=csv.parent)


def test_simulate_and_benchmarks_look_for_their_output_first(tmp_path, capsys):
    path = tmp_path / "none" / "x.json"
    for words in (["simulate", "nothing:there", "--ranks", 2], ["bench", "comm"]):
        told = _told([*words, "-o", path], capsys)
        assert told["what"] == f"cannot use {path}: No such file or directory"


def test_plan_and_show_read_standard_input(csv, monkeypatch, capsys):
    made = []
    for words, text in (
        (["plan", csv], ""),
        (["plan", "-"], csv.read_text()),
        (["plan", "-"], "\ufeff" + csv.read_text()),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main([*map(str, words), "--json"]) == 0
        made.append(json.loads(capsys.readouterr().out)["fingerprint"])
    assert len(set(made)) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("id,lower,upper,size\na,0,x,1\n"))
    assert "line 2" in _told(["plan", "-"], capsys)["what"]


def test_a_csv_in_a_pipe_is_read_once(csv):
    done = subprocess.run(
        [sys.executable, "-m", "symmplan", "plan", "/dev/stdin", "--json"],
        input=csv.read_bytes(),
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["buffers"] == 3


# ---- programs and machines -------------------------------------------------------------------


def test_simulate_names_functions_that_it_can_call(tmp_path, capsys):
    file = tmp_path / "own_programs.py"
    file.write_text(
        "from math import sqrt\n"
        "def train(): ...\n"
        "def evaluate(steps=3): ...\n"
        "def rank(rank, port): ...\n"
        "def _hidden(): ...\n"
    )
    there = f"name one that is there: {file}:train, {file}:evaluate"
    told = _told(["simulate", f"{file}:nope", "--ranks", 2], capsys)
    assert told["fix"] == there
    told = _told(["simulate", f"{file}:rank", "--ranks", 2], capsys)
    assert (told["got"], told["fix"]) == ("rank(rank, port)", there)
    file.write_text("def rank(rank, port): ...\n")
    told = _told(["simulate", f"{file}:rank", "--ranks", 2], capsys)
    assert told["fix"] == f"write a function in {file} that takes no arguments and trains"


PROGRAM = """\
import torch
import symmplan

def raises():
    raise ValueError("three")

def multiplies():
    return torch.ones(2, 3) @ torch.ones(2, 3)

def plans():
    symmplan.plan(3)
"""


@pytest.mark.further
def test_what_a_program_raises_has_no_traceback_of_ours(tmp_path, capsys):
    file = tmp_path / "failing_program.py"
    file.write_text(PROGRAM)
    for function, what, line in (
        ("raises", "the program raised ValueError: three", 5),
        ("multiplies", "the program raised RuntimeError: ", 8),
    ):
        words = ["simulate", f"{file}:{function}", "--ranks", "2"]
        assert main(words) == 1
        shown = capsys.readouterr().err
        assert what in shown
        assert f"{file}:{line} in {function}" in shown.replace("\n  ", " ")
        # Torch may log its own, of the op that failed.
        ours = [line for line in shown.splitlines() if "fake_tensor.py:" not in line]
        assert "Traceback" not in "\n".join(ours)
        told = _told(words, capsys)
        assert told["what"].startswith(what)
        assert "--debug" in told["fix"]
        with pytest.raises((ValueError, RuntimeError)):
            main([*words, "--debug"])
    assert _told(["simulate", f"{file}:plans", "--ranks", 2], capsys)["kind"] == "CaptureError"


@pytest.mark.parametrize("command", ["simulate", "ops"])
def test_a_module_that_is_no_python(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = f"no_python_for_{command}"
    (tmp_path / f"{name}.py").write_text("one two three\n")
    words = {"simulate": [f"{name}.py:x", "--ranks", 2], "ops": ["--import", name]}
    told = _told([command, *words[command]], capsys)
    assert "invalid syntax" in told["what"] + (told["got"] or "")
    assert told["fix"]


def test_errors_of_symmplan_itself_keep_their_traceback(csv, monkeypatch):
    monkeypatch.setattr(cli_plan, "problem_from_csv", None)
    with pytest.raises(TypeError, match="not callable"):
        main(["plan", str(csv)])


@pytest.mark.parametrize(
    ("devices", "ranks", "fix"),
    [(0, 2, "--device cpu"), (1, 2, "--device cpu"), (2, 4, "--ranks 2")],
)
def test_a_benchmark_on_devices_that_are_not_there(devices, ranks, fix, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    told = _told(["bench", "fsdp", "--device", "cuda", "--ranks", ranks], capsys)
    assert told["what"] == f"--device cuda needs a GPU for each of {ranks} ranks"
    assert (told["got"], told["fix"]) == (str(devices), fix)


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("2.13.0+cpu", "ok", "symmplan is tested with this version"),
        (
            "2.14.1",
            "ok",
            "should work; symmplan is written for torch 2.11 to 2.15, and tested with",
        ),
        ("2.16.0a0+git1", "ok", "newer than symmplan knows"),
        ("2.9.1", "fix", "too old"),
    ],
)
def test_doctor_says_which_versions_of_torch_are_tested(version, status, said):
    check = doctor._version(version, "install another")
    assert (check["status"], check["fix"]) == (status, "install another" if status == "fix" else "")
    assert check["detail"].startswith(f"{version}: ")
    assert said in check["detail"]
