"""The `symmplan` command. See `symmplan.cli.shell` for how a command is found and run."""

from symmplan.cli.shell import main

__all__ = ["main"]
