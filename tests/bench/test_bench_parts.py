"""What the benchmarks share: options and their defaults, commands, sides in turn, rows of ranks."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
from paths import ROOT

from symmplan.bench.parts import command, reductions, timing
from symmplan.bench.parts.command import Option
from symmplan.cli import shell

PAGE = ROOT / "docs" / "benchmarks.md"
COMMAS = {"type": lambda text: tuple(map(int, text.split(",")))}
OPTIONS = (
    Option("sizes", "bytes", (64, 128), more=COMMAS),
    Option("tokens", "rows", [8], [4096, 2048], {"nargs": "+"}),
    Option("bind", "keep", cpu=False),
)


def parsed(*words):
    parser = argparse.ArgumentParser("symmplan bench x")
    command.add_options(parser, OPTIONS, timeout=7.0)
    parser.set_defaults(parser=parser)
    return parser, parser.parse_args(words)


def test_defaults_are_those_of_the_device():
    _, args = parsed()
    found = command.settings_of(args, OPTIONS)
    assert found.pop("threads") >= 1
    assert found == {
        "device": "cpu",
        "ranks": 2,
        "sizes": (64, 128),
        "tokens": [8],
        "bind": False,
    }
    parser, args = parsed("--device", "cuda", "--bind", "--sizes", "1,2")
    found = command.settings_of(args, OPTIONS)
    assert (found["tokens"], found["bind"]) == ([4096, 2048], True)
    assert found["sizes"] == (1, 2)
    assert "rows (default 8, on cuda 4096 2048)" in " ".join(parser.format_help().split())


def test_the_command_of_a_result_does_the_same():
    words = ("--tokens", "3", "4", "--sizes", "1,2", "--bind", "--ranks", "3")
    parser, args = parsed(*words)
    again = shlex.split(command.words_of(args))
    assert again[:3] == ["symmplan", "bench", "x"]
    assert vars(parser.parse_args(again[3:])) == vars(args)


def documented():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    found = re.findall(r"`((?:symmplan bench|python benchmarks/)[^`]*)`", text)
    assert len(found) >= 10
    return sorted({c for c in found if "..." not in c})


@pytest.mark.parametrize("line", documented())
def test_documented_commands_are_understood(line):
    first, name, *words = shlex.split(line)
    if first == "symmplan":
        module = shell.load("symmplan bench", words.pop(0))
    else:
        module = importlib.import_module(Path(name).stem)
    shell.parser_of("x", module).parse_args(words)


def test_sides_take_turns_and_warm_up_untimed(monkeypatch):
    monkeypatch.setattr(timing.time, "perf_counter", iter(range(100)).__next__)
    log, judged, told = [], [], []
    monkeypatch.setattr(timing, "mark", told.append)
    sides = {name: lambda turn, name=name: log.append((name, turn)) or name * turn for name in "ab"}
    seconds = timing.alternate(
        sides,
        2,
        torch.device("cpu"),
        warm_up=1,
        before=lambda: log.append("meet"),
        judge=judged.append,
    )
    runs = [entry for entry in log if entry != "meet"]
    assert log[::2] == ["meet"] * 6
    assert runs == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert seconds == {"a": [1, 1], "b": [1, 1]}
    assert judged == [{"a": "", "b": ""}, {"a": "a", "b": "b"}, {"a": "aa", "b": "bb"}]
    assert told == ["measured on this rank: a 1000.0 ms, b 1000.0 ms"]


def test_a_round_takes_as_long_as_its_slowest_rank_and_all_must_agree():
    def rank(times, equal):
        return {"rows": [{"what": 1, "seconds": {"a": times}, "equal": equal}]}

    about = {"ok": True, "ranks": 2}
    both = [rank([1.0, 5.0, 3.0], True), rank([2.0, 1.0, 1.0], True)]
    result = command.compared(about, both, lambda rounds: {"rounds": rounds["a"]})
    (row,) = result["results"]
    assert row == {"what": 1, "equal": True, "ms": {"a": 3000.0}, "rounds": [2.0, 5.0, 3.0]}
    assert result["ok"]
    both[1] = rank([1.0, 1.0, 1.0], False)
    assert not command.compared(about, both, lambda _: {})["ok"]


def test_an_all_reduce_takes_as_long_as_its_slowest_rank():
    ranks = [
        {
            "bytes": 64,
            "seconds": {"nccl": [3e-6, 9e-6, 3e-6], "one_shot": [1e-6] * 3},
            "equal": True,
        },
        {
            "bytes": 64,
            "seconds": {"nccl": [2e-6, 2e-6, 5e-6], "one_shot": [4e-6] * 3},
            "equal": True,
        },
    ]
    row = reductions.as_row(ranks)
    assert (row["nccl_us"], row["one_shot_us"], row["fastest"]) == (5.0, 4.0, "one_shot")
    assert row["equal"]
    assert not reductions.as_row([ranks[0], {**ranks[1], "equal": False}])["equal"]
