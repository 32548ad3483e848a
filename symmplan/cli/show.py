"""Check a plan from the JSON that `symmplan plan -o` or Plan.to_json wrote, print it, draw it.

Reading verifies the plan: a file that was changed by hand into a wrong plan is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from symmplan.cli.files import add_output_arguments, read_plan, write_reports
from symmplan.report import plan_facts, plan_summary

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "render", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``symmplan show``."""
    parser.add_argument("file", metavar="PLAN", type=Path)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Read, verify, write."""
    plan = read_plan(args.file)
    return {
        "ok": True,
        **plan_facts(plan),
        "verified": True,
        "written": write_reports(plan, args),
        "summary": plan_summary(plan),
    }


def render(result: dict[str, Any]) -> str:
    """The plan's summary and what was written."""
    return "\n".join([result["summary"], *(f"wrote {path}" for path in result["written"].values())])
