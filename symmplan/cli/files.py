"""Read problems and plans, write reports: shared by the commands."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from symmplan.errors import PlanFormatError
from symmplan.model import Plan, Problem

if TYPE_CHECKING:
    import argparse
    from typing import Any

__all__ = ["add_output_arguments", "read_plan", "read_problem", "write_reports", "write_text"]


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """``--html`` and ``-o``, which `write_reports` serves."""
    parser.add_argument("--html", metavar="OUT", type=Path, help="write a picture of the plan")
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="write the plan as JSON")


def write_reports(plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Write what the options ask for; the paths written, for the result."""
    written: dict[str, Any] = {}
    if args.html is not None:
        plan.to_html(args.html)
        written["html"] = str(args.html)
    if args.output is not None:
        write_text(args.output, plan.to_json())
        written["plan"] = str(args.output)
    return written


def write_text(path: Path, text: str) -> None:
    """Write all of ``text`` or nothing: a reader never sees half a file."""
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    # A name of its own, so that ranks that write the same file do not mix their bytes.
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # mkstemp is private; a report is an ordinary file
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def read_problem(path: Path) -> Problem:
    """A problem from CSV (``id,lower,upper,size``) or from its JSON; the content decides.

    Raises:
        ProblemError: The CSV has a bad line.
        PlanFormatError: The JSON is not a problem.
    """
    if _text(path).lstrip()[:1] in ("{", "["):
        return Problem.from_json(_text(path))
    return Problem.from_csv(path)


def read_plan(path: Path) -> Plan:
    """A plan from its JSON, verified.

    Raises:
        PlanFormatError: It is not a plan.
        VerificationError: It is one, but wrong.
    """
    return Plan.from_json(_text(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanFormatError(
            f"{path} is not text",
            expected="UTF-8",
            got=f"byte 0x{error.object[error.start]:02x} at offset {error.start}",
            fix="give the CSV or JSON file itself, not an archive of it",
        ) from None
