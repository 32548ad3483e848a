"""What a command is doing, on stderr, while it runs."""

from __future__ import annotations

import sys
import time

__all__ = ["ProgressLine"]

#: Seconds after which a line says that what was begun goes on: where nobody looks at a terminal.
_HEARTBEAT = 10.0


class ProgressLine:
    """Lines with the seconds since the beginning: one that is rewritten on a terminal."""

    def __init__(self) -> None:
        self._live, self._open = sys.stderr.isatty(), False
        self._begin = self._since = self._last = time.monotonic()
        self._where = ""

    def mark(self, where: str) -> None:
        """From now on ``where`` is what is being done."""
        self._since = time.monotonic()
        self._where = where
        self._show(where)

    def beat(self) -> None:
        """Nothing new: say now and then that it goes on, so that a long wait is not a silence."""
        now = time.monotonic()
        if self._where and now - self._last >= (1.0 if self._live else _HEARTBEAT):
            self._show(f"{self._where} ({now - self._since:.0f} s so far)")

    def close(self) -> None:
        """End the line that is being rewritten."""
        if self._open:
            print(file=sys.stderr, flush=True)  # noqa: T201
            self._open = False

    def _show(self, what: str) -> None:
        self._last = time.monotonic()
        text = f"{self._last - self._begin:5.1f} s  {what}"
        if not self._live:
            print(text, file=sys.stderr, flush=True)  # noqa: T201
            return
        self._open = True
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)  # noqa: T201
