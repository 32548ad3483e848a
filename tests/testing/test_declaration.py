"""`symmplan.testing.check_declaration`: what ops do, against what is declared of them."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import declared_ops
import pytest
import race_programs
import torch
from paths import ROOT
from torch.distributed import TCPStore

from symmplan.errors import DeclarationError, PeerTimeoutError, RunError
from symmplan.testing import check_declaration

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks

X = torch.ones(4, 8)


def _leave_garbage():
    """A server that nobody holds and that is not collected soon: ranks that are forked have it."""
    server = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    server.append(server)
    gc.collect()  # now it is old


@pytest.mark.parametrize("kind", race_programs.KINDS)
@pytest.mark.parametrize("name", ["push", "read"])
def test_truthful_declarations_hold(name, kind):
    race_programs.load()
    _leave_garbage()
    report = check_declaration(f"symmplan_races::{name}_{kind}", (X,), rounds=1)
    assert report.holds, str(report)
    assert report.accesses
    # What is not declared is not so, either, but for what follows from what is.
    assert report.fact("handshake").holds == (kind[0] == "1")
    assert report.fact("release").holds == (kind[1] == "1")
    assert report.fact("synchronizes").holds == (kind != "00")


@pytest.mark.further
@pytest.mark.parametrize(
    ("op", "false", "write"),
    [
        (declared_ops.no_release, {"release", "releases"}, False),
        pytest.param(
            declared_ops.no_handshake, {"handshake", "enters"}, False, marks=pytest.mark.slow
        ),
        (declared_ops.own_too_early, {"handshake"}, False),
        pytest.param(declared_ops.writes_input, {"writes"}, True, marks=pytest.mark.slow),
        (declared_ops.reaches_further, {"reads"}, False),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "_name", None),
)
def test_a_false_declaration_is_found(op, false, write):
    inputs = (X, X) if op is declared_ops.reaches_further else (X,)
    report = check_declaration(op, inputs, setup="declared_ops")
    assert not report.holds
    assert {fact.name for fact in report.facts if fact.declared and not fact.holds} == false
    for name in false:
        found = report.fact(name).contradiction
        assert found.write == write
        assert found.low == 0
        assert found.high == X.numel() * 4
        assert found.tensor == ("y" if op is declared_ops.reaches_further else "x")
        assert found.line.rpartition(":")[0].endswith("declared_ops.py")
        assert found.text in str(report)
        if name != "writes" and op is not declared_ops.own_too_early:
            assert found.rank != found.peer
    if op is declared_ops.own_too_early:
        assert "its own" in report.fact("handshake").contradiction.text


@pytest.mark.further
def test_arguments_by_name_and_made_in_the_ranks():
    def make(rank, ranks, call):
        return {"x": torch.full((4, 8), float(rank + ranks * call))}

    race_programs.load()
    for inputs in ({"x": X}, make):
        report = check_declaration("symmplan_races::read_11", inputs, ranks=2, rounds=1)
        assert report.holds
        assert report.ranks == 2


_AMONG_RANKS = """
import race_programs, torch, torch.distributed as dist
from symmplan.testing import check_declaration
race_programs.load()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
report = check_declaration("symmplan_races::read_10", (torch.ones(4, 8),), rounds=1)
dist.all_reduce(torch.ones(3))
print(report.holds)
"""


def _python(*args: object, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.further
def test_a_rank_of_a_process_group_may_ask(tmp_path):
    assert _python("-c", _AMONG_RANKS, cwd=tmp_path) == "True\n"


def test_an_op_that_raises_is_named():
    with pytest.raises(RunError, match="rank 1 could not run") as caught:
        check_declaration(declared_ops.raises, (X,))
    assert "this rank has had enough" in str(caught.value)
    assert caught.value.failed_rank == 1


@pytest.mark.further
def test_an_op_that_never_ends_is_given_up():
    with pytest.raises(PeerTimeoutError) as caught:
        check_declaration(declared_ops.waits_alone, (X,), timeout=15.0)
    assert 0 in caught.value.missing


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(DeclarationError, match="not declared"):
        check_declaration(declared_ops.undeclared, (X,))
    with pytest.raises(DeclarationError, match="several ranks"):
        check_declaration(declared_ops.no_release, (X,), ranks=1)


def _alike(text: str) -> list[str]:
    """Lines without what differs from run to run: who was it, when, and with which access."""
    text = re.sub(r"of its own|of rank \d+'s", "of somebody's", text)
    text = re.sub(r"in aten::\w+", "in an op", text)
    text = re.sub(r"at \S*?([\w.-]+\.py)", r"at \1", text)
    return re.sub(r"\d+", "N", text).splitlines()


@pytest.mark.further
def test_the_code_of_the_page_runs_and_prints_what_it_says(tmp_path):
    page = (ROOT / "docs" / "how-to" / "declaring-an-op.md").read_text(encoding="utf-8")
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    (said,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert _alike(_python(script, cwd=tmp_path)) == _alike(said)
