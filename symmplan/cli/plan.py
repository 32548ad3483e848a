"""Plan a problem from a file, verify the plan and say what it needs.

FILE is a CSV with the columns id,lower,upper,size (half-open, bytes; the format of the public
static-allocation benchmarks) or the JSON that Problem.to_json writes. The plan is always verified
by code that did not make it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symmplan.cli.files import add_output_arguments, read_problem, write_reports
from symmplan.report import plan_facts, plan_summary

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "render", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan plan``."""
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument(
        "--effort",
        choices=("fast", "optimal"),
        default="fast",
        help="how hard to search for fewer bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--capacity",
        metavar="BYTES",
        type=_bytes,
        help="fail if a segment needs more; a suffix KiB, MiB or GiB may be given",
    )
    add_output_arguments(parser)


def _bytes(text: str) -> int:
    for unit, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plan, verify, write."""
    from symmplan.planner import plan as make_plan

    problem = read_problem(args.file)
    print(
        f"planning {len(problem.buffers):,} buffers, effort {args.effort} ...",
        file=sys.stderr,
        flush=True,
    )
    begin = time.perf_counter()
    plan = make_plan(problem, effort=args.effort, capacity=args.capacity)
    middle = time.perf_counter()
    plan.verify()
    end = time.perf_counter()
    return {
        "ok": True,
        **plan_facts(plan),
        "plan_s": round(middle - begin, 6),
        "verify_s": round(end - middle, 6),
        "verified": True,
        "written": write_reports(plan, args),
        "summary": plan_summary(plan),
    }


def render(result: dict[str, Any]) -> str:
    """The plan's summary, the times and what was written."""
    lines = [
        result["summary"],
        f"planned in {result['plan_s']:.3f} s, verified in {result['verify_s']:.3f} s",
    ]
    lines += [f"wrote {path}" for path in result["written"].values()]
    return "\n".join(lines)
