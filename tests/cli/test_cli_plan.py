"""`symmplan plan` and `symmplan show`: what they read, write and refuse."""

from __future__ import annotations

import json
import os

import pytest

from symmplan import Plan, Problem
from symmplan.cli import main
from symmplan.errors import OptionError
from symmplan.planner.budget import bytes_of


def test_plan_prints_a_summary(csv, capsys):
    assert main(["plan", str(csv)]) == 0
    out, err = capsys.readouterr()
    assert "3 buffers in 1 segment" in out
    assert "lower bound" in out
    assert "planning 3 buffers" in err


def test_plan_writes_what_show_reads(csv, tmp_path, capsys):
    saved, page = tmp_path / "plan.json", tmp_path / "plan.html"
    assert main(["plan", str(csv), "-o", str(saved), "--html", str(page), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["written"] == {"plan": str(saved), "html": str(page)}
    assert made["verified"] is True
    assert made["unshared_bytes"] == 4096
    assert made["lower_bound_bytes"] <= made["peak_bytes"] <= 4096
    assert main(["show", str(saved), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    same = made.keys() - {"plan_s", "verify_s", "written"}
    assert {k: made[k] for k in same} == {k: shown[k] for k in same}
    assert page.read_text().startswith("<!doctype html>")
    assert main(["show", str(saved)]) == 0
    assert capsys.readouterr().out.strip() == Plan.from_json(saved.read_text()).summary()


def test_plan_reads_json_whatever_its_name(tmp_path, capsys):
    path = tmp_path / "problem.txt"
    path.write_text(Problem.from_intervals([("a", 0, 1, 64)]).to_json())
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["buffers"] == 1


def test_a_file_of_the_other_command_is_sent_there(csv, tmp_path, capsys):
    saved, problem = tmp_path / "plan.json", tmp_path / "problem.json"
    problem.write_text(Problem.from_csv(csv).to_json())
    assert main(["plan", str(csv), "-o", str(saved)]) == 0
    capsys.readouterr()
    for words, fix in (
        (["plan", saved], f"symmplan show {saved}"),
        (["show", csv], f"symmplan plan {csv}"),
        (["show", problem], f"symmplan plan {problem}"),
    ):
        assert main([*map(str, words), "--json"]) == 1
        out, err = capsys.readouterr()
        assert json.loads(out)["error"]["fix"] == fix
        assert "CommandError" in out or "PlanFormatError" in out
        assert err == ""
        assert main([*map(str, words)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert f"fix: {fix}\n" in err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("3145728", 3 << 20),
        ("3MiB", 3 << 20),
        ("3 mib", 3 << 20),
        ("10MB", 10**7),
        ("1.5k", 1500),
        ("3mb", 3 * 10**6),
    ],
)
def test_sizes(text, nbytes):
    assert bytes_of(text) == nbytes
    for bits in ("3Gb", "3 Mib", "10Kb"):
        with pytest.raises(OptionError, match="fix: write B for bytes: b means bits"):
            bytes_of(bits)
    for bad in (f"{text}x", f"-{text}", f"{text}{text}i"):
        with pytest.raises(OptionError, match="fix: pass a number of bytes, or such a text"):
            bytes_of(bad)


def test_a_capacity_is_met_or_an_error(csv, capsys):
    assert main(["plan", str(csv), "--capacity", "3KiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] <= 3 << 10
    assert main(["plan", str(csv), "--capacity", "2048"]) == 1
    assert "buffers do not fit into the capacity" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("id,lower,upper\na,0,1\n", "size"),
        ("id,lower,upper,size\na,0,x,1\n", "x"),
        ("id,lower,upper,size\na,2,1,1\n", "'a'"),
        ("", "id"),
        ("id,lower,upper,size\n", "has no buffers"),
        ("{", "not a symmplan plan"),
        ("[]", "not a symmplan plan"),
        ("{}", "not a symmplan plan"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "show"])
def test_bad_files_are_clear_errors(command, text, says, tmp_path, capsys):
    path = tmp_path / "bad"
    path.write_text(text)
    assert main([command, str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("symmplan: ")
    assert (says if command == "plan" else "not a symmplan plan") in err
    if "not a symmplan plan" in err:
        assert str(path) in err.splitlines()[0]


def test_bytes_that_are_no_text(tmp_path, capsys):
    path = tmp_path / "bad"
    path.write_bytes(b"\x80\x04\x95pickle")
    assert main(["show", str(path)]) == 1
    assert "byte 0x80 at offset 0" in capsys.readouterr().err


def test_show_refuses_a_plan_that_was_edited(csv, tmp_path, capsys):
    saved = tmp_path / "plan.json"
    main(["plan", str(csv), "-o", str(saved)])
    plan = json.loads(saved.read_text())
    plan["placements"]["b"] = plan["placements"]["a"]  # both live in [2, 4)
    saved.write_text(json.dumps(plan))
    capsys.readouterr()
    assert main(["show", str(saved)]) == 1
    assert capsys.readouterr().err.startswith("symmplan: plan is wrong: ")


@pytest.mark.parametrize("command", ["plan", "show"])
def test_files_that_cannot_be_read_or_written(command, csv, tmp_path, capsys):
    assert main([command, str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main([command, str(tmp_path)]) == 1
    assert "directory" in capsys.readouterr().err
    if command == "plan":
        assert main(["plan", str(csv), "-o", str(tmp_path / "none" / "x.json")]) == 1
        assert "No such file" in capsys.readouterr().err


def test_a_written_file_is_whole_and_ordinary(csv, tmp_path):
    saved = tmp_path / "out" / "plan.json"
    saved.parent.mkdir()
    main(["plan", str(csv), "-o", str(saved)])
    before = saved.read_text()
    main(["plan", str(csv), "-o", str(saved)])
    assert saved.read_text() == before
    assert [p.name for p in saved.parent.iterdir()] == ["plan.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert saved.stat().st_mode & 0o777 == 0o666 & ~umask
