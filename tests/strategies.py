"""Problems shared by the tests; the planner's Hypothesis strategies are `symmplan.testing`'s."""

from __future__ import annotations

import random

from symmplan.testing import interval_lists, interval_problems, problems

__all__ = ["hard_rows", "interval_lists", "interval_problems", "problems"]


def hard_rows():
    """Forty buffers that are packed as tightly as can be by searching only."""
    draw, rows = random.Random(2), []
    for i in range(40):
        begin = draw.randrange(30)
        rows.append((f"b{i}", begin, begin + draw.randrange(1, 15), draw.randrange(1, 99)))
    return rows
