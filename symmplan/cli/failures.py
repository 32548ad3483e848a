"""Errors of files and of users' programs, as the command reports them."""

from __future__ import annotations

import errno
import os
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from symmplan.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["program_error", "unusable"]

#: The symmplan that runs, for frames.
_OURS = f"{Path(__file__).parent.parent}/"
#: What no user wrote, besides packages: Python's own modules, and code without a file.
_PYTHON = (sysconfig.get_path("stdlib"), "<")


def unusable(error: OSError) -> CommandError:
    """The error for a file that cannot be used, with its fix."""
    name = Path(str(error.filename or "a file"))
    folder = name.absolute().parent
    if isinstance(error, FileNotFoundError):
        lack = f"{folder} has no such file" if folder.is_dir() else f"there is no folder {folder}"
        fix = f"check the path: {lack}"
    elif isinstance(error, IsADirectoryError):
        fix = f"name a file in {name}"
    elif error.errno == errno.EROFS:
        fix = f"name a file elsewhere: no file can be made in {folder}"
    elif error.errno == errno.ENOSPC:
        fix = f"make room there: df -h {folder}"
    elif isinstance(error, PermissionError | NotADirectoryError):
        there = name if os.path.lexists(name) else folder
        fix = f"see who may use it: ls -ld {there}"
    else:
        fix = f"name another file: {name} is none that can be read and written"
    return CommandError(f"cannot use {name}: {error.strerror or error}", fix=fix)


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
    if not ours or ours[-1] == len(frames) - 1 or frames[ours[-1]].name == "_run":
        return []
    begun = frames[ours[0] :]
    return [f"{f.filename}:{f.lineno} in {f.name}" for f in begun if _is_users(f.filename)]


def _is_users(file: str) -> bool:
    return not file.startswith((_OURS, *_PYTHON)) and "site-packages" not in file
