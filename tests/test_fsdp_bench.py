"""`symmplan bench fsdp`: it runs, compares, and says what is wrong."""

from __future__ import annotations

import argparse
import json

import pytest

from symmplan.cli import bench_fsdp
from symmplan.errors import RunError


def options(*words):
    parser = argparse.ArgumentParser()
    bench_fsdp.add_arguments(parser)
    return parser.parse_args(list(words))


@pytest.mark.ranks
def test_a_small_benchmark_runs_and_compares():
    args = options("--layers", "2", "--dim", "16", "--steps", "2", "--tokens", "4")
    result = json.loads(json.dumps(bench_fsdp.run(args)))
    assert result["ok"]
    assert result["equal"]
    stats = result["stats"]
    # The first of five steps is recorded; two layers gather twice and reduce once.
    assert stats["placed"] + stats["plain"] == 4 * 2 * 3
    assert stats["staged"] == 0
    assert result["collectives_speedup"] > 0
    assert set(result["results"]) == {"plain", "symmplan"}
    text = bench_fsdp.render(result)
    assert "the same bits" in text
    assert "speedup" in text


def test_one_rank_is_refused():
    with pytest.raises(RunError, match="needs peers"):
        bench_fsdp.run(options("--ranks", "1"))


@pytest.mark.ranks
def test_a_benchmark_that_takes_too_long_says_so():
    with pytest.raises(RunError, match="did not finish"):
        bench_fsdp.run(options("--timeout", "0.2"))
