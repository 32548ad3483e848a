"""Sizes as people give them: ``"40GiB"``, ``"10MB"``."""

from __future__ import annotations

import re

from symmplan.errors import PlanningError

__all__ = ["parse_bytes"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_bytes(given: int | str, name: str = "capacity") -> int:
    """A number of bytes: a whole number, or text with a unit.

    Args:
        given: Bytes, or text such as ``"40GiB"`` (powers of 1024) or ``"10MB"`` (powers of 1000).
        name: What it is called, for the error.

    Raises:
        PlanningError: It is no such number, or negative.

    >>> parse_bytes("40GiB"), parse_bytes("10MB"), parse_bytes("1.5 KiB"), parse_bytes(7)
    (42949672960, 10000000, 1536, 7)
    """
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = _SIZE.fullmatch(given) if isinstance(given, str) else None
    # "40Gi" is a size; "40i" is none.
    if found is None or (found[3] and not found[2]):
        raise PlanningError(
            f"{name} is {given!r}",
            expected="bytes, or a number with a unit such as 40GiB or 10MB",
            got=repr(given),
            fix="write it like 512MiB",
        )
    power = " kmgt".index(found[2].lower() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
