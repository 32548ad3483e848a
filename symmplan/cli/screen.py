"""What fits on a terminal: how wide it is, and text wrapped to it."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

__all__ = ["columns", "fitted"]

#: Where nobody looks at a terminal, lines are as long as they are.
_WIDE = 160


def columns() -> int:
    """How wide stdout is: ``$COLUMNS``, or the terminal's width."""
    return shutil.get_terminal_size((_WIDE, 24)).columns


def fitted(text: str, width: int | None = None) -> str:
    """``text`` with long lines wrapped and indented, if stdout is a terminal or ``width`` is given.

    >>> print(fitted("  4 x input: copied because it comes from elsewhere", 30))
      4 x input: copied because it
          comes from elsewhere
    """
    if width is None:
        if not (sys.stdout.isatty() or "COLUMNS" in os.environ):
            return text
        width = columns()
    lines = []
    for line in text.splitlines():
        deeper = " " * (len(line) - len(line.lstrip()) + 4)
        # What is wider than the screen by itself, such as a path, stays whole.
        whole = {"break_long_words": False, "break_on_hyphens": False}
        wrapped = textwrap.wrap(line, width, subsequent_indent=deeper, **whole)  # type: ignore[arg-type]
        lines += [line] if len(line) <= width else wrapped
    return "\n".join(lines)
