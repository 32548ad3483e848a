"""The pages: their code runs and prints what they say, what they name is there."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import subprocess
import sys

import pages
import pytest
from paths import HELPERS, ROOT

from symmplan import errors

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
#: Pages whose commands are those of the project's own work.
OTHERS = [ROOT / name for name in ("CONTRIBUTING.md", "ARCHITECTURE.md", "tests/README.md")]
_ALL = re.MULTILINE | re.DOTALL
#: Run by another test.
ELSEWHERE = {"declaring-an-op.md"}


def _code(path):
    return any(pages.is_run(mark, code) for mark, _, code in pages.blocks(path.read_text()))


def _name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.further  # CI runs all of them, beside the rest
@pytest.mark.parametrize(
    "path", [p for p in PAGES if _code(p) and p.name not in ELSEWHERE], ids=_name
)
@pytest.mark.ranks
def test_the_code_of_a_page_runs_and_prints_what_it_says(path, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    count = pages.ranks(path.read_text(encoding="utf-8"))
    start = [*pages.TORCHRUN.split(), "--nproc-per-node", str(count)] if count > 1 else []
    done = subprocess.run(
        [sys.executable, *start, HELPERS / "pages.py", path],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "blocks" in done.stdout


def test_a_page_that_prints_something_else_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\nprint(2)\n```\nprints\n```text\n1\n...\n```\n")
    assert pages.run(page) == 1
    page.write_text("```python\nprint(1)\n```\nprints\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match="line 2, prints\n1"):
        pages.run(page)


def test_what_pages_link_to_is_there():
    for path in (*PAGES, *OTHERS):
        text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=_ALL)
        targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
        targets += re.findall(r'(?:src|srcset)="([^"]+)"', text)
        assert [t for t in targets if not (path.parent / t).exists()] == [], path
        parts = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text)
        there = {p: _headings(path.parent / p if p else path) for p, _ in parts}
        assert [p for p in parts if p[1] not in there[p[0]]] == [], path


def _headings(page):
    """The parts of a page to which a link may go, as GitHub and Sphinx call them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in found}


def _texts():
    """Every text in the package's code, with a NUL where something is put in."""
    for file in (ROOT / "symmplan").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _unknown(messages):
    """Those that no text of the code is: "..." stands for what is put in."""
    texts = "\n".join({text for text in _texts() if "\n" not in text})

    def pattern(message):
        parts = re.split(r" ?\.\.\. ?|'shm'|'nccl'", message)
        return "[^\n]*".join(re.escape(part) for part in parts if part)

    return [message for message in messages if not re.search(pattern(message), texts)]


def test_messages_of_the_page_are_those_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 50
    assert _unknown(messages) == []
    assert _unknown(["ranks ... and ... made the same plans"]) != []


def test_every_error_is_on_the_page_under_its_rule():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^### (.*?)\n+`(\w+)`", page, re.MULTILINE))
    kinds = [getattr(errors, name) for name in errors.__all__]
    expected = {
        kind.rule: kind.__name__
        for kind in kinds
        if issubclass(kind, Exception) and kind is not errors.SymmplanError
    }
    assert parts == expected


@pytest.mark.parametrize(
    "module",
    [
        "symmplan",
        *(f"symmplan.{name}" for name in ("fsdp", "memory", "placed", "registry", "testing")),
        "symmplan.trainers",
    ],
)
def test_what_is_public_is_in_the_reference(module):
    folder = ROOT / "docs" / "reference"
    text = "\n".join(page.read_text(encoding="utf-8") for page in folder.glob("*.md"))
    whole = re.findall(r"automodule:: (\S+)", text)
    directive = r"(?:auto\w+|data|class):: (?:[\w.]+\.)?(\w+)(?:\(.*\))?$"
    named = set(re.findall(directive, text, re.MULTILINE))
    public = set(importlib.import_module(module).__all__) - {
        "__version__",
        "errors",
        "fsdp",
        "placed",
        "trainers",
    }
    assert module in whole or public <= named


def test_the_pictures_are_those_that_the_script_draws(tmp_path):
    script = runpy.run_path(str(ROOT / "docs" / "drawings.py"))
    script["main"].__globals__["HERE"] = tmp_path
    script["main"]()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in (ROOT / "docs").glob("*.svg")}


def test_the_workflow_runs_what_the_page_of_versions_calls_tested():
    page = (ROOT / "docs" / "support" / "versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (2\.\d+) ((?:\| \w+ )+)\|", page, re.MULTILINE)
    pythons = ("3.10", "3.11", "3.12", "3.13")
    said = {
        (torch, python)
        for torch, cells in rows
        for python, cell in zip(pythons, cells.replace("|", " ").split(), strict=False)
        if cell == "tested"
    }
    from symmplan.cli.doctor import _TESTED

    assert {torch for torch, _ in said} == {f"{a}.{b}" for a, b in _TESTED}
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert "run: .ci/run\n" in workflow
    ran = re.findall(r'python: "([\d.]+)", torch: "(2\.\d+)\.\d+"', workflow)
    assert said <= {(torch, python) for python, torch in ran}
