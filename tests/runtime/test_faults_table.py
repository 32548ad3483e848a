"""A table of faults: whatever differs or dies, whenever, all living ranks end in a named error.

Or they go on with right numbers, where a program goes on without symmetric memory as well.
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from pathlib import Path

import fault_programs
import pytest
from paths import ROOT
from ranks import RankPool

#: What becomes of the ranks, and behind a stroke of the one at fault if it is something else.
TABLE = """
what        moment    compile     eager       FSDP2       experts
----------  --------  ----------  ----------  ----------  ----------
option      before    agree       agree       agree       agree
size        before    agree       agree       right       agree
size        planned   agree       run         right       run
size        end       agree       run         right       run
more        before    agree       agree       torch       run
more        planned   run         run         run         run
more        end       run         run         run         run
order       before    agree       agree       agree       agree
order       planned   run         run         run         run
order       end       run         run         run         run
raises      before    gone/own    run/own     torch/own   gone/own
raises      agreeing  run/own     run/own     run/own     run/own
raises      planned   lost/own    run/own     lost/own    lost/own
raises      end       right/own   run/own     right/own   right/own
killed      before    gone/dead   gone/dead   torch/dead  gone/dead
killed      agreeing  gone/dead   gone/dead   gone/dead   gone/dead
killed      planned   lost/dead   lost/dead   lost/dead   lost/dead
killed      end       right/dead  lost/dead   right/dead  right/dead
stopped     before    gone        gone        torch       gone
stopped     agreeing  gone        gone        gone        gone
stopped     planned   gone        gone        gone        gone
stopped     end       right       gone        right       right
no memory   agreeing  less        less        less        less
no memory   planned   less        less        less        less
no backend  agreeing  less        less        less        less
no backend  planned   less        less        less        less
"""

#: The errors that each word of the table stands for. Before there is a plan the program's
#: collectives are torch's own, and so is what it raises.
ERRORS = {
    "agree": {"AgreementError"},
    "run": {"RunError"},
    "lost": {"PeerLostError"},
    "gone": {"PeerLostError", "PeerTimeoutError"},
    "own": {"FailedError"},
    "torch": {"RuntimeError"},
}
#: Rows of the default run: each fault and each integration, and little to wait for.
FEW = {
    ("option", "before", "compile"),
    ("option", "before", "experts"),
    ("size", "planned", "compile"),
    ("more", "planned", "eager"),
    ("order", "planned", "FSDP2"),
    ("raises", "agreeing", "experts"),
    ("killed", "planned", "FSDP2"),
    ("no memory", "agreeing", "FSDP2"),
    ("no backend", "planned", "eager"),
}

#: What the page says for the words of the table.
WORDS = {
    "agree": "`AgreementError`",
    "run": "`RunError`",
    "lost": "`PeerLostError`",
    "gone": "`PeerTimeoutError`",
    "torch": "torch's own",
    "right": "goes on",
    "less": "without",
}
PAGE = ROOT / "docs/support/faults.md"


def _cells():
    """``(what, moment, integration, what becomes of the ranks)`` of each cell."""
    head, _, *lines = (re.split(r"\s{2,}", line) for line in TABLE.strip().splitlines())
    for what, moment, *cells in lines:
        for integration, cell in zip(head[2:], cells, strict=True):
            yield what, moment, integration, cell


def _cases():
    for ranks, (what, moment, integration, cell) in itertools.product((2, 3, 4), _cells()):
        few = ranks == 2 and (what, moment, integration) in FEW
        marks = pytest.mark.all_cases if few else pytest.mark.further
        name = f"{what}-{moment}-{integration}-{ranks}"
        yield pytest.param(what, moment, integration, ranks, cell, marks=marks, id=name)


@pytest.mark.ranks
@pytest.mark.parametrize(("what", "moment", "integration", "ranks", "cell"), [*_cases()])
def test_a_fault_ends_as_the_table_says(
    what, moment, integration, ranks, cell, shared_memory_is_left_clean
):
    others, _, victim = cell.partition("/")
    # Who waits for a rank in vain, or in torch's own collective, does so until its time is over.
    timeout = 6.0 if what == "stopped" or {others} & {"gone", "torch"} else 40.0
    with RankPool(ranks, timeout=55.0) as pool:
        pool.start(fault_programs.run, integration, what, moment, timeout)
        last = ranks - 1
        found = pool.collect(ranks=range(last))
        if what == "stopped":
            _wait_until_stopped(pool.pids[last])
            pool.kill(last, signal.SIGCONT)
        outcomes = [*found, *pool.collect(ranks=[last])][:ranks]
    for outcome in outcomes[:-1]:
        _judge(outcome, others, moment)
        if others in ("agree", "run", "lost", "gone"):
            said = outcome.error.text.splitlines()[0].partition("]")[2]
            assert re.search(rf"ranks? (\d+ and )?{last}\b", said), outcome.error.text
    _judge(outcomes[-1], victim or others, moment)
    if others == "less":
        assert outcomes[-1].value[-1], "nothing failed"


def _judge(outcome, word, moment):
    if word == "dead":
        assert outcome.exitcode == -signal.SIGKILL, outcome.describe()
    elif word in ERRORS:
        assert outcome.error is not None, outcome.describe()
        assert outcome.error.kind in ERRORS[word], outcome.describe()
    else:
        assert outcome.ok, outcome.describe()
        placed, plain, _ = outcome.value
        assert bool(placed) == (word == "right" or moment == "planned"), outcome
        assert plain or word == "right", outcome


def page_table():
    """The rows as `docs/support/faults.md` shows them."""
    head, _, *lines = (re.split(r"\s{2,}", line) for line in TABLE.strip().splitlines())
    rows = [["on one rank", "when", *head[2:]], ["---"] * len(head)]
    for what, moment, *cells in lines:
        rows.append([what, moment, *(WORDS[cell.partition("/")[0]] for cell in cells)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_page_shows_this_table():
    assert page_table() in PAGE.read_text(encoding="utf-8"), page_table()


def _wait_until_stopped(pid):
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
