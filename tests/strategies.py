"""Hypothesis strategies shared by the tests; the planner's are public: `symmplan.testing`."""

from __future__ import annotations

from symmplan.testing import interval_lists, interval_problems, problems

__all__ = ["interval_lists", "interval_problems", "problems"]
