"""The `symmplan` command. See `symmplan.cli.shell` for how a command is found and run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after ``symmplan``; those of the process if None.

    Returns:
        The exit code: see `symmplan.cli.shell`.
    """
    from symmplan.cli.shell import run_command

    return run_command(argv)
