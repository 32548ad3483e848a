"""Views of a plan: text for a terminal, one HTML page, plain data for machines."""

from __future__ import annotations

from symmplan.report.data import plan_facts
from symmplan.report.html import write_plan_html
from symmplan.report.text import plan_summary

__all__ = ["plan_facts", "plan_summary", "write_plan_html"]
