"""The scripts in `benchmarks`: their options, their tables, and that ranks find what they run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import decode as bench_decode
import eager as bench_eager
import pytest
from paths import ROOT

from symmplan.bench import moe as bench_moe
from symmplan.cli.shell import parser_of, perform

SCRIPTS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()
)
NUMBERS = {
    "compile": ("--layers 0", "--dim 1.5", "--steps 0", "--compilations 0"),
    "concurrent_groups": ("--tokens 64 0", "--rounds 0"),
    "copies": ("--peers 0", "--weights 0"),
    "decode": ("--sequences 8 0", "--steps 0", "--one-shot-bytes 0"),
    "eager": ("--messages -5", "--messages 64,0", "--calls 0"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_help(name, capsys):
    assert perform("python x.py", importlib.import_module(name), ["--help"]) == 0
    assert "usage: python x.py [-h]" in capsys.readouterr().out


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_which_nothing_can_be_measured_are_refused_at_once(name, capsys):
    for words in NUMBERS[name]:
        assert perform("python x.py", importlib.import_module(name), words.split()) == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith(f"symmplan: wrong usage: argument {words.split()[0]}"), told


@pytest.mark.ranks
@pytest.mark.further
def test_a_script_starts_ranks_and_prints_the_command_that_does_the_same():
    words = ["benchmarks/eager.py", "--rounds", "1", "--calls", "20", "--messages", "64"]
    done = subprocess.run(
        [sys.executable, *words, "--json"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    result = json.loads(done.stdout)
    assert result["ok"]
    assert result["command"].startswith("python benchmarks/eager.py --device cpu")
    assert {row["op"] for row in result["host"]} == set(bench_eager._PROGRAMS)


@pytest.mark.ranks
@pytest.mark.further
def test_a_server_decodes_as_without_symmplan_and_its_segments_do_not_grow():
    args = parser_of("x", bench_decode).parse_args(["--sequences", "1", "8", "4", "--rounds", "2"])
    result = json.loads(json.dumps(bench_decode.run(args)))
    assert result["ok"]
    assert [row["sequences"] for row in result["results"]] == [8, 4, 1]
    assert all(row["equal"] and row["gain"] > 0 for row in result["results"])
    assert {*result["results"][0]["ms"]} == {"plain", "symmplan auto"}
    assert result["plans"]["symmplan auto"]["still"]
    assert result["plans"]["symmplan auto"]["bytes"] > 0
    assert bench_decode.render(result).endswith("results agree")


def test_tables_fit_on_eighty_columns():
    times = {"plain_us": 30123.45, "session_us": 30123.45}
    host = {f"{c}_us": 30123.45 for c in ("placed", "overhead", "copies")} | times
    machine = {"cpu": "cpu", "device": "CPU", "cores": 16, "torch": "2.13.0+cpu", "nccl": None}
    about = {"ranks": 2, "machine": machine, "layers": 1, "width": 512}
    graphs = dict.fromkeys(("plain_graph_us", "session_graph_us"))
    graphs |= {f"{side}_us": 30123.45 for side in bench_eager._GATHERS}
    message = {"nbytes": 8 << 20, **times, **graphs}
    moe = {
        "what": "dispatch",
        "tokens": 65536,
        "nbytes": 512 << 20,
        "ms": dict.fromkeys(("plain", "known", "push", "symmplan", "graph"), 123.456),
        "host_ms": dict.fromkeys(("plain", "known", "push", "symmplan", "graph"), 1234.567),
        "speedup": 12.34,
        "segment_bytes": 3 << 19,
        "equal": True,
    }
    sides = ("plain", "one-shot", "symmplan auto", "symmplan cuda")
    decode = {"sequences": 512, "ms": dict.fromkeys(sides, 30123.45), "gain": 1.12, "equal": True}
    plans = {"symmplan auto": {"bytes": 3 << 19, "still": False, "choices": []}}
    decode = {"steps": 20, "dim": 8192, "results": [decode], "plans": plans}
    large = {"what": "dispatch", "tokens": 65536, "needs": 123 << 30, "free": 79 << 30}
    eager = {"host": [{"op": op, **host} for op in bench_eager._PROGRAMS], "messages": [message]}
    for text in (
        bench_eager.render({**about, **eager}),
        bench_decode.render({**about, **decode}),
        bench_moe.render({**about, "results": [moe], "left_out": [large]}),
    ):
        assert max(map(len, text.splitlines())) <= 80, text
