"""`mutants.py` makes each swap once and can tell; what it lists as equivalent is there."""

from __future__ import annotations

import ast

import mutants
import pytest
from mutants import MODULES, Copies, equivalents, main, mutants_of, source_of

SOURCE = """
if TYPE_CHECKING:
    later = 1 < 2

class Outer:
    def inner(self, a, b):
        return a < b <= 3 and [x for x in a if x is not None]

assert outside not in ("a", "b")
"""


def test_each_comparison_is_swapped_for_its_neighbours():
    found = list(mutants_of("planner/order", SOURCE))
    assert [(m.where, m.was, m.becomes) for m in found] == [
        ("Outer.inner", "a < b <= 3", "a <= b <= 3"),
        ("Outer.inner", "a < b <= 3", "a >= b <= 3"),
        ("Outer.inner", "a < b <= 3", "a < b < 3"),
        ("Outer.inner", "a < b <= 3", "a < b > 3"),
        ("Outer.inner", "x is not None", "x is None"),
        ("", "outside not in ('a', 'b')", "outside in ('a', 'b')"),
    ]
    original = ast.unparse(ast.parse(SOURCE))
    for mutant in found:
        assert mutant.text.replace(mutant.becomes, mutant.was, 1) == original
        assert mutant.text != original


def test_what_is_listed_as_equivalent_is_there():
    there = {m for module in MODULES for m in mutants_of(module, source_of(module))}
    listed = equivalents()
    assert not listed.keys() - there, "no such comparison, or no such swap of it"
    assert all(len(why) > 20 for why in listed.values())


def _mutant(module, was, becomes):
    (found,) = (
        m for m in mutants_of(module, source_of(module)) if (m.was, m.becomes) == (was, becomes)
    )
    return found


@pytest.mark.further
def test_a_test_that_notices_is_told_from_one_that_does_not(tmp_path, monkeypatch):
    compared = "ranges.last[a, c] > ranges.entry[b, c]"
    wrong = _mutant("planner/items", compared, compared.replace(">", "<="))
    endless = _mutant("planner/items", "at < count", "at <= count")
    notices = "tests/planner/test_planner_smoke.py"
    blind = f"{notices}::test_capacity_names_a_small_set"
    monkeypatch.setattr(mutants, "GRACE", 1)
    copies = Copies(tmp_path, jobs=1)
    copies.check(blind)
    copies.check(notices)
    assert copies.judge(wrong, [blind, notices]) == "killed"
    assert copies.judge(wrong, [blind]) == "survived"
    assert copies.judge(endless, [notices]) == "timeout"
    copies.check(notices)  # nothing is left of them
    with pytest.raises(RuntimeError, match="no tests"):
        copies.check(f"{notices}::test_nothing")


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_sample_of_mutants_is_killed(request):
    seed = str(request.config.getoption("randomly_seed", 0))
    assert main(["--sample", "12", "--seed", seed]) == 0
