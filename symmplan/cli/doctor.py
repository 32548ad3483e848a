"""Say what this machine and this torch can do, and what to fix.

Each line is ok, missing (something optional is off) or fix (symmplan's CPU path needs it). With a
line that says fix the exit code is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict

from symmplan import __version__
from symmplan.report.format import table

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "render", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``symmplan doctor`` has no options of its own."""
    del parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run every probe."""
    from symmplan.cli.machine import checks

    del args
    found = checks()
    return {
        "ok": all(check.status != "fix" for check in found),
        "symmplan": __version__,
        "checks": [asdict(check) for check in found],
    }


def render(result: dict[str, Any]) -> str:
    """One line per check, and the fix under it."""
    rows = [(c["status"], c["name"], c["detail"]) for c in result["checks"]]
    lines = [f"symmplan {result['symmplan']}"]
    for line, check in zip(table(rows), result["checks"], strict=True):
        lines.append(line)
        if check["fix"]:
            lines.append(f"           fix: {check['fix']}")
    return "\n".join(lines)
