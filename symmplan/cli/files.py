"""Read and write the files of the commands."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from symmplan.errors import PlanFormatError
from symmplan.model import Plan
from symmplan.report import plan_facts, plan_summary

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping
    from typing import Any

__all__ = ["add_output_arguments", "check_output_arguments", "check_outputs", "from_text"]
__all__ += ["kind_of", "plan_result", "read_text", "render_plan"]
__all__ += ["write_all", "write_text", "written_lines"]


_Read = TypeVar("_Read")

#: Options that name a file to be written.
_OUTPUTS = ("output", "html")
#: In JSON no name can look like this: its quotes would be escaped.
_FORMAT = re.compile(r'"format"\s*:\s*"symmplan\.(\w+)"')


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """``--html``, ``-o`` and the rest that `plan_result` serves."""
    parser.add_argument("--html", metavar="OUT", type=Path, help="write a picture of the plan")
    parser.add_argument(
        "--beside", metavar="PLAN", type=Path, help="another plan's JSON, drawn beside it in --html"
    )
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="write the plan as JSON")


def check_output_arguments(args: argparse.Namespace) -> None:
    """Before anything is planned.

    Raises:
        UsageError: One of the options has nothing to work on.
    """
    if args.beside is not None and args.html is None:
        args.parser.error("argument --beside: is drawn in --html, which is not there")


def check_outputs(args: argparse.Namespace) -> None:
    """Look, before any work, whether the files that it ends with can be written.

    Raises:
        OSError: One cannot: its folder is not there, or it is a folder itself.
    """
    for path in (getattr(args, option, None) for option in _OUTPUTS):
        if path is None:
            continue
        is_new = not path.exists()
        try:
            path.open("a").close()
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            raise OSError(errno.EROFS, "its folder takes no files", str(path)) from None
        except OSError as error:  # it may name no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        if is_new:
            path.unlink()


def write_all(
    args: argparse.Namespace, writers: Mapping[str, Callable[[Path], object]]
) -> dict[str, str]:
    """Write what the options ask for.

    Args:
        args: ``html`` and others are paths, or None; ``output`` is where the JSON goes.
        writers: Write the file of an option; what is no option's name is the JSON's.

    Returns:
        The paths that were written, by the names of ``writers``.
    """
    paths = {name: getattr(args, name, args.output) for name in writers}
    for name, path in paths.items():
        if path is not None:
            writers[name](path)
    return {name: str(path) for name, path in paths.items() if path is not None}


def written_lines(result: Mapping[str, Any]) -> list[str]:
    """What was written, for people."""
    return [f"wrote {path}" for path in result["written"].values()]


def plan_result(plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """What a command says of a verified plan, once what the options ask for is written."""
    beside = args.beside and from_text(args.beside, read_text(args.beside), Plan.from_json)
    writers: dict[str, Callable[[Path], object]] = {
        "html": lambda path: plan.to_html(path, beside),
        "plan": lambda path: write_text(path, plan.to_json()),
    }
    written = write_all(args, writers)
    facts = {"ok": True, **plan_facts(plan), "verified": True}
    return {**facts, "written": written, "summary": plan_summary(plan)}


def render_plan(result: dict[str, Any]) -> str:
    """The plan's summary, the times if it was planned here, and what was written."""
    lines = [result["summary"]]
    if "plan_s" in result:
        planned, verified = result["plan_s"], result["verify_s"]
        lines.append(f"planned in {planned:.3f} s, verified in {verified:.3f} s")
    return "\n".join([*lines, *written_lines(result)])


def write_text(path: Path, text: str) -> None:
    """Write all of ``text`` or nothing: a reader never sees half a file."""
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    # A name of its own, so that ranks that write the same file do not mix their bytes.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:  # it names the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def kind_of(text: str) -> str:
    """What a file is meant to be: ``"plan"``, ``"problem"``, other ``"JSON"`` or a ``"CSV"``."""
    if text.lstrip()[:1] not in ("{", "["):
        return "CSV"
    found = set(_FORMAT.findall(text))  # a plan has its problem inside
    return next((kind for kind in ("plan", "problem") if kind in found), "JSON")


def from_text(path: Path, text: str, read: Callable[[str], _Read]) -> _Read:
    """What ``read`` makes of the text of a file.

    Raises:
        PlanFormatError: It is not what ``read`` takes; the file is named.
    """
    try:
        return read(text)
    except PlanFormatError as error:
        told = {name: getattr(error, name) for name in ("expected", "got", "fix")}
        raise PlanFormatError(f"{path}: {error.what}", **told, **error.fields) from error


def read_text(path: Path) -> str:
    """The text of a file, or of standard input for ``-``.

    Raises:
        PlanFormatError: It is none.
    """
    try:
        if str(path) == "-":
            return sys.stdin.read()
        return path.read_text(encoding="utf-8")
    except OSError as error:  # it may name no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    except UnicodeDecodeError as error:
        raise PlanFormatError(
            f"{path} is not text",
            expected="UTF-8",
            got=f"byte 0x{error.object[error.start]:02x} at offset {error.start}",
            fix="give the CSV or JSON file itself, not an archive of it",
        ) from None
