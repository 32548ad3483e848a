"""Small helpers that every view of a plan uses: bytes for people, names made harmless."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

__all__ = ["count", "size", "table", "visible"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: int) -> str:
    """Bytes for people, never rounded to something that looks exact: ``1.50 MiB``.

    >>> size(768), size(1536), size(3 << 20)
    ('768 B', '1.50 KiB', '3 MiB')
    """
    value, unit = float(nbytes), 0
    while abs(value) >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    digits = f"{value:.0f}" if value == int(value) else f"{value:.2f}"
    return f"{digits} {_UNITS[unit]}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 buffer``, ``2 buffers``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def visible(text: str) -> str:
    r"""``text`` on one line, with control characters spelled out.

    Names come from users' programs and from files: one with a newline or a terminal escape in it
    must not be able to forge a line of a report.

    >>> visible("a\nb")
    'a\\nb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(char: str) -> str:
    # A lone surrogate cannot be encoded for output, so it is spelled out like the rest.
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


def table(rows: Sequence[tuple[str, ...]], right: Container[int] = ()) -> list[str]:
    """Lines with the columns of ``rows`` aligned; the last column is left ragged.

    Args:
        rows: All of one length.
        right: Columns that are aligned to the right, as numbers are.
    """
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        padded = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in cells]
        lines.append(("  " + "  ".join(padded)).rstrip())
    return lines
