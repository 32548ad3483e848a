"""Check a plan from the JSON that `symmplan plan -o` or Plan.to_json wrote, print it, draw it.

Reading verifies the plan: a file that was changed by hand into a wrong plan is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from symmplan.cli import files
from symmplan.cli.files import render_plan as render
from symmplan.errors import PlanFormatError
from symmplan.model import Plan

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "render", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan show``."""
    parser.add_argument("file", metavar="PLAN", type=Path)
    files.add_output_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Read, verify, write."""
    files.check_output_arguments(args)
    text = files.read_text(args.file)
    if files.kind_of(text) in ("CSV", "problem"):
        raise PlanFormatError(
            f"{args.file} is not a plan",
            expected="the JSON that `symmplan plan -o` or Plan.to_json wrote",
            got="a problem to be planned" if text.strip() else "an empty file",
            fix=f"symmplan plan {args.file}",
        )
    return files.plan_result(files.from_text(args.file, text, Plan.from_json), args)
