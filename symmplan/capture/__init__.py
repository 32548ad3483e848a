"""Capture: what a program does with the tensors that must be symmetric, as a `Problem`."""

from __future__ import annotations

from symmplan.capture.fx import capture_fx
from symmplan.capture.sites import Captured, Site
from symmplan.capture.steps import join

__all__ = ["Captured", "Site", "capture_fx", "join"]
