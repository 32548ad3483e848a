"""Messages about wrong options, about files and about programs that fail."""

from __future__ import annotations

import difflib
import errno
import os
import re
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from symmplan.errors import CommandError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["check_outputs", "long_options", "meant", "program_error", "unusable"]

#: Options that name a file to be written.
_OUTPUTS = ("output", "html", "perfetto", "memory_viz")
#: The symmplan that runs, for frames.
_OURS = f"{Path(__file__).parent.parent}/"
#: What no user wrote, besides packages: Python's own modules, and code without a file.
_PYTHON = (sysconfig.get_path("stdlib"), "<")


def long_options(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a command, such as ``"--html"``, in order."""
    return list(dict.fromkeys(re.findall(r"--[a-z][\w-]*", parser.format_usage())))


def meant(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """A question after the options that may be meant by words that a command does not know."""
    options = long_options(parser)
    close = [difflib.get_close_matches(word.partition("=")[0], options, 1) for word in unknown]
    names = [found[0] for found in close if found]
    return f"; did you mean {' and '.join(names)}?" if names else ""


def unusable(error: OSError) -> CommandError:
    """The error for a file that cannot be used, with its fix."""
    name = Path(str(error.filename or "a file"))
    folder = name.absolute().parent
    if isinstance(error, FileNotFoundError):
        lack = f"{folder} has no such file" if folder.is_dir() else f"there is no folder {folder}"
        fix = f"check the path: {lack}"
    elif isinstance(error, IsADirectoryError):
        fix = f"name a file in {name}"
    else:
        fix = f"see who may use it: ls -ld {name}"
    return CommandError(f"cannot use {name}: {error.strerror or error}", fix=fix)


def check_outputs(args: argparse.Namespace) -> None:
    """Look, before any work, whether the files that it ends with can be written.

    Raises:
        OSError: One cannot: its folder is not there, or it is a folder itself.
    """
    for option in _OUTPUTS:
        path = getattr(args, option, None)
        number = None if path is None else _why_not_written(path)
        if number is not None:
            raise OSError(number, os.strerror(number), str(path))


def _why_not_written(path: Path) -> int | None:
    """The number of the error that writing a file would end with."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return errno.ENOTDIR if folder.exists() else errno.ENOENT
    if path.is_dir():
        return errno.EISDIR
    written = path if path.exists() else folder
    return None if os.access(written, os.W_OK) else errno.EACCES


def program_error(error: Exception) -> CommandError | None:
    """The error for a user's program that a command runs and that failed.

    Args:
        error: The error that ended the command.

    Returns:
        The error to show; None if the error is symmplan's own, which is a bug and needs its
        traceback.
    """
    if isinstance(error, SyntaxError):
        own = [f"{error.filename}:{error.lineno}"]
    else:
        own = _users_frames(traceback.extract_tb(error.__traceback__))
    if not own:
        return None
    return CommandError(
        f"the program raised {type(error).__name__}: {error}",
        expected="a program that runs",
        got=own[-1],
        fix="correct it there; --debug shows the traceback",
        line=own[-1],
    )


def _users_frames(frames: Sequence[traceback.FrameSummary]) -> list[str]:
    """The frames of a program that a command of ours called, if the error is not ours again."""
    ours = [i for i, frame in enumerate(frames) if frame.filename.startswith(_OURS)]
    if not ours or ours[-1] == len(frames) - 1 or frames[ours[-1]].name == "main":
        return []
    begun = frames[ours[0] :]
    return [f"{f.filename}:{f.lineno} in {f.name}" for f in begun if _is_users(f.filename)]


def _is_users(file: str) -> bool:
    return not file.startswith((_OURS, *_PYTHON)) and "site-packages" not in file
