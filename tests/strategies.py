"""Hypothesis strategies shared by the tests. Those of the planner are public: `symmplan.testing`."""

from __future__ import annotations

from symmplan.testing import interval_lists, interval_problems, problems

__all__ = ["interval_lists", "interval_problems", "problems"]
