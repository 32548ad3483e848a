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

from symmplan.cli.files import add_output_arguments, plan_result, read_text
from symmplan.cli.files import render_plan as render
from symmplan.errors import PlanningError
from symmplan.model import Problem
from symmplan.planner.budget import bytes_of

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
        help="fail if the segments need more; text such as 40GiB, 512MiB or 10MB will do",
    )
    add_output_arguments(parser)


def _bytes(text: str) -> int | None:
    try:
        return bytes_of(text)
    except PlanningError as error:
        raise ValueError(error.what) from error


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plan, verify, write."""
    from symmplan.planner import plan as make_plan

    text = read_text(args.file)
    is_json = text.lstrip()[:1] in ("{", "[")
    problem = Problem.from_json(text) if is_json else Problem.from_csv(args.file)
    what = f"planning {len(problem.buffers):,} buffers, effort {args.effort} ..."
    print(what, file=sys.stderr, flush=True)
    begin = time.perf_counter()
    plan = make_plan(problem, effort=args.effort, capacity=args.capacity)
    middle = time.perf_counter()
    plan.verify()
    end = time.perf_counter()
    times = {"plan_s": round(middle - begin, 6), "verify_s": round(end - middle, 6)}
    return {**plan_result(plan, args), **times}
