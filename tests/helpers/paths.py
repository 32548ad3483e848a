"""Where the project is, for tests that read its files."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a source, which nobody may change; many tests read all of them."""
    return ast.parse(source)
