"""What the command shows where somebody looks, and where nobody does."""

from __future__ import annotations

import re
import sys

import pytest

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
