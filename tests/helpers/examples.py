"""How many examples a property gets: a sixth, which differ from run to run, or all of them.

EXAMPLES=all python -m pytest tests/planner
"""

from __future__ import annotations

import os

from hypothesis import settings

__all__ = ["examples", "share"]

_SHARE = 1 if os.environ.get("EXAMPLES") == "all" else 6


def share(count):
    """How many of so many examples run."""
    return count // _SHARE


def examples(count, **more):
    """Settings of a property for which ``count`` examples are enough; ``more`` are others."""
    return settings(max_examples=share(count), **more)
