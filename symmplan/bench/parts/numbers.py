"""Numbers on the command line, refused where they are given."""

from __future__ import annotations

import argparse
import math

__all__ = ["count_of", "number_of", "sizes_of"]

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def count_of(text: str) -> int:
    """A whole number of 1 or more.

    >>> count_of("12")
    12
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more; got {text!r}")
    return int(text)


def number_of(text: str) -> float:
    """A number above 0.

    >>> number_of("0.5")
    0.5
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0; got {text!r}")
    return number


def sizes_of(text: str) -> tuple[int, ...]:
    """Bytes from ``"64K,16M"``, in whole cache lines, so that types and ranks divide them."""
    sizes = []
    for part in text.upper().split(","):
        unit = _UNITS.get(part[-1:], 1)
        digits = part[:-1] if part[-1:] in _UNITS else part
        if not digits.isdecimal() or not int(digits):
            raise argparse.ArgumentTypeError(f"{part!r} is no size; say 4096, 64K or 16M")
        sizes.append(max(64, int(digits) * unit // 64 * 64))
    return tuple(sizes)
