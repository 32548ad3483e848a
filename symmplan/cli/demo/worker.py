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

    def __init__(self, descriptor: int, rank: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)
        self.rank = rank

    def mark(self, where: str) -> None:
        """Say what comes next."""
        self._send(mark=where)

    def result(self, value: dict[str, Any]) -> None:
        """Say what came out."""
        self._send(result=value)

    def error(self, error: BaseException) -> None:
        """Say what went wrong; the parent decides whose error is told first."""
        cause = _root(error)
        if isinstance(cause, SymmplanError):
            text, expected, got, fix = str(cause), cause.expected, cause.got, cause.fix
        else:  # a foreign message often needs its class to be understood
            text, expected, got, fix = f"{type(cause).__name__}: {cause}", None, None, None
        self._send(
            error=text.strip().partition("\n")[0],
            expected=None if expected is None else str(expected),
            got=None if got is None else str(got),
            fix=fix,
            kinds=[kind.__name__ for kind in type(cause).__mro__],
            traceback="".join(traceback.format_exception(error)),
        )

    def _send(self, **message: Any) -> None:
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
    reporter = Reporter(setup["pipe"], setup["rank"])
    try:
        reporter.mark("import torch")
        from symmplan.cli.demo.train import run_rank

        reporter.result(run_rank(setup, reporter))
    except BaseException as error:  # noqa: BLE001 - the parent tells it
        reporter.error(error)
        code = 1
    else:
        code = 0
    sys.stderr.flush()
    # Not a return: tearing down process groups while a peer is dead may hang.
    os._exit(code)


if __name__ == "__main__":
    main()
