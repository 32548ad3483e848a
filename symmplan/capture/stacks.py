"""Where in a program an op was called, and whether the program called it itself."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["called_at", "is_by_torch", "stack"]

#: So many frames of a call are remembered.
_DEEPEST = 8
#: Modules of torch that call ops for a program.
_CALLERS = ("torch.nn.", "torch.distributed.", "torch.autograd.", "torch.optim.")


def stack() -> list[str]:
    """The frames that are neither torch's nor symmplan's, the innermost last."""
    found: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(found) < _DEEPEST:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("symmplan", "torch"):
            code = frame.f_code
            function = getattr(code, "co_qualname", code.co_name)  # 3.11
            function = function.rpartition("<locals>.")[2]
            found.insert(0, f"{code.co_filename}:{frame.f_lineno} in {function}")
        frame = frame.f_back
    return found


def is_by_torch() -> bool:
    """Whether code of torch calls, which the program's author cannot change."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_CALLERS):
            return True
        if module.partition(".")[0] not in ("symmplan", "torch"):
            return False
        frame = frame.f_back
    return True  # a thread of autograd


def called_at() -> str:
    """The innermost of these frames, ``"file:line"``."""
    return next((frame.partition(" in ")[0] for frame in stack()[-1:]), "")
