"""The progress of a command, on stderr."""

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
        self._part, self._marked = 0.0, self._begin

    def mark(self, where: str, part: float = 0.0) -> None:
        """From now on ``where`` is what is being done.

        Args:
            where: For people.
            part: How much of all is done, from 0 to 1, for an estimate of what is left; 0 if that
                is not known.
        """
        self._since = time.monotonic()
        self._where = where
        if part:
            # What came before the first part, such as the start of ranks, does not come again.
            if not self._part:
                self._marked, self._part = self._since, part
            where += f" ({100 * part:.0f}% done{self._left(part)})"
        self._show(where)

    def _left(self, part: float) -> str:
        done = part - self._part
        if done <= 0:
            return ""
        seconds = (self._since - self._marked) / done * (1 - part)
        return f", about {seconds:.0f} s left"

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
