"""The command: what each subcommand prints, writes and returns, and how it fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from paths import ROOT

from symmplan import __version__
from symmplan.cli import main, shell
from symmplan.errors import SymmplanError


def _process(*words, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "symmplan", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **more,
    )


# ---- the shell -------------------------------------------------------------------------------


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("demo", "plan", "show", "ops", "doctor", "bench"):
        assert f"\n    {name} " in shown
    assert "exit codes" in shown


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"symmplan {__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["plan"],
        ["plan", "--capacity", "x", "f"],
        ["plan", "--capacity", "1KX", "f"],
        ["bench"],
        ["bench", "nonsense"],
        ["demo", "--steps", "0"],
        ["show", "a", "b"],
        ["show", "a", "--beside", "b"],
    ],
)
def test_wrong_usage_is_2(words, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: symmplan" in err
    assert " _" not in err, "a private name"
    assert main([*words, "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["ok"], err) == (False, "")
    assert told["error"]["fix"].startswith("usage: symmplan")


def test_the_usage_is_that_of_the_command(capsys):
    assert main(["plan", "--nope", "f"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: symmplan plan ")
    assert "wrong usage: unrecognized arguments: --nope" in err
    assert main(["--nope", "plan", "f"]) == 2


@pytest.mark.parametrize("name", sorted(shell.COMMANDS))
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert f"usage: symmplan {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(shell.BENCHES))
def test_every_benchmark_has_help(name, capsys):
    assert main(["bench", name, "--help"]) == 0
    assert f"usage: symmplan bench {name}" in capsys.readouterr().out


def test_every_module_of_a_command_is_listed():
    folder = ROOT / "symmplan"
    commands = {p.stem for p in (folder / "cli").glob("*.py") if "\ndef run(" in p.read_text()}
    assert commands | {"demo", "bench"} == set(shell.COMMANDS)
    assert {p.stem for p in (folder / "bench").glob("[!_]*.py")} == set(shell.BENCHES)


def _command(monkeypatch, name="plan", **parts) -> None:
    module = types.ModuleType(f"symmplan.cli.{name}")
    module.add_arguments = lambda parser: None
    for part, value in parts.items():
        setattr(module, part, value)
    monkeypatch.setattr(shell, "load", lambda prog, command: module)


@pytest.mark.parametrize(("result", "code"), [({"ok": True}, 0), ({"ok": False}, 1), ({}, 0)])
def test_a_check_that_failed_is_1(result, code, monkeypatch, capsys):
    _command(monkeypatch, run=lambda args: result)
    assert main(["plan"]) == code
    assert main(["plan", "--json"]) == code
    assert json.loads(capsys.readouterr().out.splitlines()[-1] if not result else "{}") == {}


def test_without_render_the_result_is_listed(monkeypatch, capsys):
    _command(monkeypatch, run=lambda args: {"a": 1, "b": [2]})
    main(["plan"])
    assert capsys.readouterr().out == "a: 1\nb: [2]\n"


def test_an_error_of_ours_is_its_message_and_1(monkeypatch, capsys):
    def run(args):
        raise SymmplanError("it broke", fix="mend it")

    _command(monkeypatch, run=run)
    assert main(["plan"]) == 1
    assert capsys.readouterr() == ("", "symmplan: symmplan error: it broke\n  fix: mend it\n")
    with pytest.raises(SymmplanError):
        main(["plan", "--debug"])


def test_a_bug_shows_its_traceback(monkeypatch):
    def run(args):
        raise ZeroDivisionError

    _command(monkeypatch, run=run)
    with pytest.raises(ZeroDivisionError):
        main(["plan"])


def test_ctrl_c_is_130(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    _command(monkeypatch, run=run)
    assert main(["plan"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_missing_module_does_not_break_the_others(monkeypatch, capsys, csv):
    monkeypatch.setitem(sys.modules, "symmplan.cli.ops", None)
    assert main(["ops"]) == 1
    assert "symmplan ops needs something that cannot be imported" in capsys.readouterr().err
    assert main(["plan", str(csv)]) == 0
    assert main(["--help"]) == 0


def test_a_module_that_cannot_be_imported_says_why(monkeypatch, capsys):
    def fail(name):
        raise ImportError("No module named 'omnimalloc'")

    monkeypatch.setattr(shell.importlib, "import_module", fail)
    assert main(["doctor"]) == 1
    assert "No module named 'omnimalloc'" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_fine(csv):
    command = f"{sys.executable} -m symmplan plan {csv} --json | head -c 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_an_op_that_is_not_there(capsys):
    assert main(["ops", "symm_mem::nothing"]) == 1
    assert capsys.readouterr().err.startswith("symmplan: no such op: ")
    assert main(["ops", "--import", "symmtest_none"]) == 1
    assert capsys.readouterr().err.startswith("symmplan: command cannot run: ")


# ---- as processes ----------------------------------------------------------------------------


def test_the_plan_can_go_to_stdout(csv):
    done = _process("plan", csv, "-o", "/dev/stdout", "--json")
    assert done.returncode == 0, done.stderr
    assert '"placements"' in done.stdout


def test_results_are_on_stdout_and_progress_on_stderr(csv):
    done = _process("plan", csv, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] is True
    assert "planning" in done.stderr


def test_the_command_does_not_import_torch_for_a_plan(csv):
    code = (
        "import sys; from symmplan.cli import main; code = main(['plan', sys.argv[1]]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, csv], capture_output=True, check=False)
    assert done.returncode == 0


def test_the_console_script_is_installed():
    script = Path(sys.executable).parent / "symmplan"
    assert script.exists(), "install the package: python -m pip install -e ."
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"symmplan {__version__}\n"


def test_the_page_of_collectives_is_what_the_command_says(capsys):
    from symmplan.place.collectives import NCCL
    from symmplan.registry.rows import COLLECTIVES, SYMM_MEM

    assert main(["ops", "--by-collective"]) == 0
    shown = capsys.readouterr().out
    page = (ROOT / "docs/support/collectives.md").read_text(encoding="utf-8")
    # After a change: symmplan ops --by-collective, below what comes before the first collective.
    assert page[page.index("\n## ") + 1 :] == shown
    assert main(["ops", "--by-collective", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["collectives"]
    assert {c["collective"] for c in found} >= set(NCCL)
    ops = [op["op"] for c in found for op in c["ops"]]
    assert sorted(ops) == sorted(row.op for row in (*COLLECTIVES, *SYMM_MEM))


# ---- doctor ----------------------------------------------------------------------------------


def test_doctor_looks_at_everything(capsys):
    code = main(["doctor", "--json"])
    result = json.loads(capsys.readouterr().out)
    names = {check["name"] for check in result["checks"]}
    assert {"/dev/shm", "O_TMPFILE", "C++ compiler", "torch", "gloo", "NCCL", "cores"} <= names
    assert {check["status"] for check in result["checks"]} <= {"ok", "missing", "fix"}
    assert code == (0 if result["ok"] else 1)
    assert result["ok"] == all(check["status"] != "fix" for check in result["checks"])
    assert main(["doctor"]) == code
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_doctor_says_what_to_fix(monkeypatch, capsys, tmp_path):
    from symmplan.cli import doctor

    monkeypatch.setattr(doctor, "_SHM", tmp_path / "none")
    monkeypatch.setattr(doctor, "cxx_compiler", lambda: None)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "does not exist" in shown
    assert "fix: install g++" in shown


def test_doctor_finds_too_little_shared_memory(monkeypatch):
    from symmplan.cli import doctor

    stat = types.SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=16384)  # Docker's 64 MiB
    monkeypatch.setattr(doctor.os, "statvfs", lambda path: stat)
    check = doctor._shared_memory()[0]
    assert (check["status"], check["detail"]) == (
        "fix",
        "64 MiB free of 64 MiB: too little for a model's segments",
    )


def test_sigint_reaches_a_running_command(csv):
    """A real Ctrl-C while a command works: 130 and one line, no traceback."""
    code = (
        "import sys, time, types; from symmplan.cli import main, shell; "
        "m = types.ModuleType('m'); m.add_arguments = lambda p: None; "
        "m.run = lambda a: (print('up', flush=True), time.sleep(60)); "
        "shell.load = lambda *c: m; sys.exit(main(['plan']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "symmplan: interrupted\n"
