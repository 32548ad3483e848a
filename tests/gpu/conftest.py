"""Tests for devices run programs of tests for CPU ranks, and import them by name."""

from __future__ import annotations

import sys

from paths import TESTS

sys.path += [
    str(TESTS / folder) for folder in ("runtime", "integrate/fsdp", "integrate/moe", "examples")
]
