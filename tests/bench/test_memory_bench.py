"""`symmplan bench comm`: it runs, compares, and notices wrong results and dead ranks."""

from __future__ import annotations

import json

import pytest

from symmplan.bench import comm as bench_comm
from symmplan.cli.shell import parser_of
from symmplan.errors import CommandError, UsageError

pytestmark = pytest.mark.ranks


def options(*words):
    return parser_of("symmplan bench comm", bench_comm).parse_args(words)


@pytest.mark.further
def test_it_measures_and_compares():
    args = options("--sizes", "64K,1M", "--repetitions", "5")
    result = json.loads(json.dumps(bench_comm.run(args)))
    assert result["ok"] is True
    assert len(result["results"]) == 6
    for row in result["results"]:
        assert row["equal"] is True
        assert row["gloo_us"] > 0
        assert row["shm_us"] > 0
    text = bench_comm.render(result)
    assert "all_gather" in text
    assert result["machine"]["cpu"] in text


@pytest.mark.parametrize("text", ["", "x", "1X", "-1", "1,", "1.5M"])
def test_wrong_sizes_are_usage_errors(text):
    with pytest.raises(UsageError, match="no size"):
        options(f"--sizes={text}")


def test_sizes_have_units():
    assert options("--sizes", "1,4096,64k,16M").sizes == (64, 4096, 1 << 16, 1 << 24)


def test_one_rank_is_refused():
    with pytest.raises(CommandError, match="peers"):
        bench_comm.run(options("--ranks", "1"))


def test_a_deadline_ends_it():
    with pytest.raises(CommandError, match="did not finish") as caught:
        bench_comm.run(options("--timeout", "0.2"))
    assert caught.value.exit_codes
