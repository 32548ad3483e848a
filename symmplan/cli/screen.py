"""What fits on a terminal: how wide it is, text wrapped to it, and colours where it has some."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["fitted", "log_on_stderr", "write"]

#: What stands out, and how, in a terminal where rich is installed. Cyan and yellow cannot be read
#: on white everywhere, nor blue on black.
_STYLES = {
    "bold": r"^\S[^:\n]*:$|(?<![\w.])\d[\d,.]* (B|[KMGT]iB|us|ms|s|x)\b",
    "dim": r"^-{5,}$",
    "green": r"\b(parity holds|faster|bit for bit|reached)\b|^  ok\b",
    "magenta": r"\b(slower|not searched)\b|^  missing\b",
    "red": r"\b(DOES NOT HOLD|DIFFERENT PLANS)\b|^  fix\b",
}


def fitted(text: str, width: int | None = None, *, stream: TextIO | None = None) -> str:
    """``text`` with long lines wrapped and indented, to ``width`` or that of the terminal.

    Where ``stream``, stdout if None, is no terminal, lines stay as they are.

    >>> print(fitted("  4 x input: copied because it comes from elsewhere", 30))
      4 x input: copied because it
          comes from elsewhere
    """
    if width is None:
        stream = stream or sys.stdout
        if "COLUMNS" in os.environ and stream is sys.stdout:
            width = shutil.get_terminal_size().columns
        elif stream.isatty():
            width = os.get_terminal_size(stream.fileno()).columns
        else:
            return text
    if not width:  # a terminal that does not know: of `script`, of some CI
        return text
    lines = []
    for line in text.splitlines():
        deeper = " " * (len(line) - len(line.lstrip()) + 4)
        # What is wider than the screen by itself, such as a path, stays whole.
        whole = {"break_long_words": False, "break_on_hyphens": False}
        wrapped = textwrap.wrap(line, width, subsequent_indent=deeper, **whole)  # type: ignore[arg-type]
        lines += [line] if len(line) <= width else wrapped
    return "\n".join(lines)


def write(text: str) -> None:
    """Print a result; in colours if stdout is a terminal and rich is installed."""
    text = text if text.endswith("\n") else text + "\n"
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.text import Text

            shown = Text(text, end="")
            for style, pattern in _STYLES.items():
                shown.highlight_regex(re.compile(pattern, re.MULTILINE), style)
            Console(soft_wrap=True).print(shown, end="")
            return
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def log_on_stderr() -> Iterator[None]:
    """Show what symmplan logs meanwhile, unless somebody shows it already."""
    log, handler = logging.getLogger("symmplan"), logging.StreamHandler()
    level, quiet = log.level, not log.isEnabledFor(logging.INFO)
    if quiet:
        log.setLevel(logging.INFO)
        log.addHandler(handler)
    try:
        yield
    finally:
        if quiet:
            log.setLevel(level)
            log.removeHandler(handler)
