"""`benchmarks/compile.py`: it runs, compares, and says what is wrong."""

from __future__ import annotations

import json

import compile as bench_compile
import pytest

from symmplan.cli.shell import parser_of
from symmplan.errors import CommandError


def options(*words):
    return parser_of("python benchmarks/compile.py", bench_compile).parse_args(words)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_small_benchmark_runs_and_compares():
    args = options(
        *("--cases", "overlap", "--gather-bytes", "1024", "--width", "16"),
        *("--steps", "2", "--compilations", "1"),
        *("--inductor", "reorder_for_compute_comm_overlap=true"),
    )
    result = json.loads(json.dumps(bench_compile.run(args)))
    assert result["ok"]
    row = result["results"]["overlap"]
    assert row["equal"]
    assert row["rendezvous_after_first_step"] == 0
    assert row["stats"]["bound"] == 8
    assert row["stats"]["segment_bytes"] == row["stats"]["lower_bound_bytes"]
    assert 0 < row["own_compile_s"] < row["sides"]["symmplan"]["compile_s"]
    assert set(row["sides"]) == {"plain", "symmplan"}
    text = bench_compile.render(result)
    assert "losses equal" in text
    assert "8 bound, 0 staged (0 copied out)" in text


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--ranks", "1"), "needs peers"),
        (("--cases", "x"), "unknown case"),
        (("--inductor", "reorder=true"), "no setting 'reorder'"),
        (("--inductor", "cpp_wrapper=yes"), "'cpp_wrapper' is not JSON"),
    ],
)
def test_wrong_options_are_refused(words, match):
    with pytest.raises(CommandError, match=match):
        bench_compile.run(options(*words))


@pytest.mark.ranks
def test_a_benchmark_that_takes_too_long_says_so():
    with pytest.raises(CommandError, match="did not finish"):
        bench_compile.run(options("--timeout", "0.2"))
