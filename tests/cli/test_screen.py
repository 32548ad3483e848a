"""What the command shows where somebody looks, and where nobody does."""

from __future__ import annotations

import re
import sys

import pytest

from symmplan.bench import eager as bench_eager
from symmplan.bench import moe as bench_moe
from symmplan.cli import screen


def test_a_terminal_shows_colours_where_rich_is_installed(capsys, monkeypatch):
    text = "segments:\n  segment0  3 MiB, 2.7 x faster\n" + "word " * 40
    screen.write(text)
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "rich.console", None)
        screen.write(text)
    assert capsys.readouterr().out == text + "\n"
    pytest.importorskip("rich", reason="needs rich: python -m pip install '.[rich]'")
    screen.write(text)
    shown = capsys.readouterr().out
    assert "\x1b[1msegments:\x1b[0m" in shown
    assert "\x1b[32mfaster\x1b[0m" in shown
    assert re.sub(r"\x1b\[\d*m", "", shown) == text + "\n"


def test_tables_of_benchmarks_fit_on_eighty_columns():
    times = {"plain_us": 30123.45, "session_us": 30123.45}
    host = {f"{c}_us": 30123.45 for c in ("placed", "overhead", "copies")} | times
    machine = {"cpu": "cpu", "device": "CPU", "cores": 16, "torch": "2.13.0+cpu", "nccl": None}
    about = {"ranks": 2, "machine": machine, "layers": 1, "width": 512}
    graphs = {"plain_graph_us": None, "session_graph_us": None}
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
    eager = {"host": [{"op": op, **host} for op in bench_eager._PROGRAMS], "messages": [message]}
    for text in (
        bench_eager.render({**about, **eager}),
        bench_moe.render({**about, "results": [moe]}),
    ):
        assert max(map(len, text.splitlines())) <= 80, text
