"""Where the program of a rank is, for errors about ranks that make different calls."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from symmplan.coordination.exchange import swapped
from symmplan.memory.races import source_line

if TYPE_CHECKING:
    from symmplan.coordination.groups import Group

__all__ = ["both_callers", "caller"]

#: Seconds within which a peer says where it is: it finds the difference when this rank does.
_PATIENCE = 1.0


def caller(site: str = "") -> str:
    """The module that runs and the line of the program, for people; empty if neither is known.

    Args:
        site: Name of the module, if it is known; else it is looked for on the stack.
    """
    site, line = site or _module(), source_line()
    parts = [f"module {site!r}"] if site else []
    parts += [f"at {line}"] if line else []
    return " ".join(parts)


def both_callers(group: Group, other: int, meeting: str, site: str) -> str:
    """Where this rank and rank ``other`` are, which make different calls in one meeting.

    Args:
        group: Of both.
        other: That rank.
        meeting: Tells the meeting from others of the group, equal on both.
        site: As for `caller`.

    Collective: yes, of all ranks of the meeting; a rank that does not answer is left out.
    """
    here = caller(site)
    told = {group.rank: here, other: swapped(group, meeting, here, other, _PATIENCE)}
    said = [f"rank {rank} in {text}" for rank, text in sorted(told.items()) if text]
    return "; ".join(said).replace(" in at ", " at ")


def _module() -> str:
    """The innermost module whose method runs, by its name in the outermost one."""
    from torch.nn import Module

    inner: Any = None
    outer: Any = None
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Module):
            inner, outer = inner or found, found
        frame = frame.f_back
    if inner is None:
        return ""
    names = (name for name, module in outer.named_modules() if module is inner)
    return next(names, "").replace("_orig_mod.", "") or type(inner).__name__
