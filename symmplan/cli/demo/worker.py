"""One rank of the demo: ``python -m symmplan.cli.demo.worker SETUP``.

It tells its parent what it is doing, as JSON lines in a pipe: marks (where it is), one result or
one error. It dies with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

from symmplan.errors import SymmplanError

__all__ = ["Reporter", "main"]


class Reporter:
    """Lines to the parent. Times are of the machine's monotonic clock, so ranks compare."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)

    def mark(self, where: str) -> None:
        """Say what comes next."""
        self.send(mark=where)

    def error(self, error: BaseException) -> None:
        """Say what went wrong; the parent decides whose error is told first."""
        cause = _root(error)
        text, more = f"{type(cause).__name__}: {cause}", {}
        if isinstance(cause, SymmplanError):  # a foreign message often needs its class, too
            values = {"expected": cause.expected, "got": cause.got, "fix": cause.fix}
            text, more = str(cause), {k: str(v) for k, v in values.items() if v is not None}
        self.send(
            error=text.strip().partition("\n")[0],
            kinds=[kind.__name__ for kind in type(cause).__mro__],
            traceback="".join(traceback.format_exception(error)),
            **more,
        )

    def send(self, **message: Any) -> None:
        """Say something."""
        self._pipe.write(json.dumps({"at": time.monotonic(), **message}) + "\n")


def _root(error: BaseException) -> BaseException:
    """The error behind ``error`` that says most: torch.compile wraps what it meets.

    That is one of ours, or else the innermost that was wrapped.
    """
    seen: list[BaseException] = []
    this: BaseException | None = error
    while this is not None and this not in seen:
        if isinstance(this, SymmplanError):
            return this
        seen.append(this)
        this = getattr(this, "inner_exception", None) or this.__cause__ or this.__context__
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


def _die_with_parent(parent: int) -> None:
    """Be killed when the parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before the line above
        os._exit(1)


def main() -> int:
    """Run the rank that the command line describes."""
    setup = json.loads(sys.argv[1])
    _die_with_parent(setup["parent"])
    reporter = Reporter(setup["pipe"])
    code = 1
    try:
        reporter.mark("import torch")
        from symmplan.cli.demo.train import run_rank

        reporter.send(result=run_rank(setup, reporter))
        code = 0
    except BaseException as error:  # noqa: BLE001 - the parent tells it
        reporter.error(error)
    sys.stderr.flush()
    # Not a return: tearing down process groups while a peer is dead may hang.
    os._exit(code)


if __name__ == "__main__":
    main()
