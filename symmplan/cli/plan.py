"""Plan a problem from a file, verify the plan and say what it needs.

FILE is a CSV with the columns id,lower,upper,size (half-open, bytes; the format of the public
static-allocation benchmarks) or the JSON that Problem.to_json writes; - is standard input. The plan
is always verified by code that did not make it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from symmplan.cli import files
from symmplan.cli.files import render_plan as render
from symmplan.errors import CommandError, OptionError
from symmplan.model import Problem
from symmplan.planner.budget import bytes_of
from symmplan.planner.intervals import problem_from_csv

__all__ = ["add_arguments", "render", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan plan``."""
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        type=_capacity,
        help="fail if the segments need more: bytes, or a size such as 40GiB or 10MB",
    )
    files.add_output_arguments(parser)


def _capacity(text: str) -> int | None:
    try:
        return bytes_of(text)
    except OptionError as error:
        told = f"expected {error.expected}; got {error.got}; {error.fix}"
        raise argparse.ArgumentTypeError(told) from None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plan, verify, write."""
    from symmplan.planner import plan as make_plan

    files.check_output_arguments(args)
    text = files.read_text(args.file)
    kind = files.kind_of(text)
    if kind == "plan":
        raise CommandError(
            f"{args.file} is a plan already",
            expected="a CSV of buffers, or the JSON of Problem.to_json",
            got="the JSON of Plan.to_json",
            fix=f"symmplan show {args.file}",
        )
    if kind == "CSV":
        problem = problem_from_csv(args.file, text)
    else:
        problem = files.from_text(args.file, text, Problem.from_json)
    print(f"planning {len(problem.buffers):,} buffers ...", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    plan = make_plan(problem, capacity=args.capacity)
    middle = time.perf_counter()
    plan.verify()
    end = time.perf_counter()
    times = {"plan_s": round(middle - begin, 6), "verify_s": round(end - middle, 6)}
    return {**files.plan_result(plan, args), **times}
