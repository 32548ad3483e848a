"""How much work something is, counted and not timed: the same on a busy machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import symmplan
from symmplan.planner.uncollected import uncollected

if TYPE_CHECKING:
    from collections.abc import Callable

_HERE = str(Path(symmplan.__file__).parent)


def lines_of(act: Callable[[], object]) -> int:
    """How many lines of symmplan's own code run while ``act`` does."""
    count = 0

    def each_line(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return each_line

    def each_call(frame: Any, _event: str, _argument: Any) -> Any:
        return each_line if frame.f_code.co_filename.startswith(_HERE) else None

    before = sys.gettrace()
    with uncollected():  # what others have dropped would run in the midst of it
        sys.settrace(each_call)
        try:
            act()
        finally:
            sys.settrace(before)
    return count
