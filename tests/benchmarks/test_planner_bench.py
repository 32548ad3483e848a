"""`benchmarks/planner.py`: generated instances, CSV files, what the report must hold."""

from __future__ import annotations

import json

import planner as bench_planner
import pytest
from instances import (
    cut_rectangle,
    fsdp_program,
    loosened,
    moe_program,
    tensor_parallel_program,
)

from symmplan.cli.shell import parser_of
from symmplan.errors import ProblemError
from symmplan.model import Problem
from symmplan.planner import plan


def run(*words):
    parser = parser_of("python benchmarks/planner.py", bench_planner)
    return bench_planner.run(parser.parse_args(words))


@pytest.mark.further
def test_the_quick_run_reports_everything():
    result = run("--quick")
    json.dumps(result)
    assert result["command"].startswith("python benchmarks/planner.py")
    assert result["machine"]["versions"]["symmplan"]
    assert {p["ratio"] for p in result["programs"]} == {1.0}
    assert result["summary"]["symmplan"]["instances"] == 1
    assert len(result["scale"]["points"]) == 2
    assert "order" in bench_planner.render(result)


def test_csv_files_replace_the_generated_instances(tmp_path):
    path = tmp_path / "cut.csv"
    rows = cut_rectangle(60, seed=5)
    path.write_text("id,lower,upper,size\n" + "".join(f"{n},{a},{b},{s}\n" for n, a, b, s in rows))
    result = run("--csv", str(path))
    (row,) = result["instances"]
    assert (row["name"], row["buffers"], row["symmplan"]["ratio"]) == ("cut.csv", 60, 1.0)
    assert "programs" not in result
    with pytest.raises(ProblemError, match="cannot be read"):
        run("--csv", str(tmp_path / "absent.csv"))


@pytest.mark.parametrize("seed", range(6))
def test_perfect_packings_are_found(seed):
    rows = cut_rectangle(100 + 20 * seed, seed=seed, width=400)
    made = plan(Problem.from_intervals(rows))
    made.verify()
    assert made.peak_bytes == made.lower_bound_bytes == 1 << 20


@pytest.mark.further
def test_nearly_perfect_packings_stay_close_to_the_bound():
    gaps = []
    for seed in range(3):
        rows = loosened(cut_rectangle(120, seed=seed, width=120), seed=seed, per_mille=10)
        made = plan(Problem.from_intervals(rows))
        made.verify()
        gaps.append(made.gap)
    assert sum(gaps) / len(gaps) <= 1.07


@pytest.mark.parametrize("make", [fsdp_program, tensor_parallel_program, moe_program])
def test_programs_are_packed_without_a_gap(make):
    made = plan(make(32, steps=2))
    made.verify()
    assert made.optimal
    assert made.peak_bytes < made.unshared_bytes / 10
