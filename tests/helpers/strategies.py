"""Problems shared by the tests; the planner's Hypothesis strategies are `symmplan.testing`'s."""

from __future__ import annotations

import random

from symmplan.testing import interval_lists, interval_problems, problems

__all__ = ["gap_rows", "hard_rows", "interval_lists", "interval_problems", "problems"]


def hard_rows():
    """Forty buffers that are packed as tightly as can be by searching only."""
    draw, rows = random.Random(2), []
    for i in range(40):
        begin = draw.randrange(30)
        rows.append((f"b{i}", begin, begin + draw.randrange(1, 15), draw.randrange(1, 99)))
    return rows


def gap_rows():
    """Fourteen buffers of which 7 bytes are live at any time, and which need 8."""
    begins = (0, 0, 0, 0, 0, 1, 2, 2, 3, 3, 4, 5, 6, 7)
    ends = (1, 2, 4, 7, 8, 8, 3, 8, 4, 7, 5, 6, 8, 8)
    sizes = (1, 3, 1, 1, 1, 1, 2, 1, 1, 1, 2, 2, 2, 2)
    return [(f"b{i:02}", *row) for i, row in enumerate(zip(begins, ends, sizes, strict=True))]
