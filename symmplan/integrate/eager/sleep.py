"""A session's memory is given back between two iterations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan.integrate.eager.schedule import let_go
from symmplan.runtime.sleep import all_may_sleep, give_back, in_capture

if TYPE_CHECKING:
    from symmplan.integrate.eager.frozen import Frozen
    from symmplan.integrate.eager.kernels import Cursor
    from symmplan.integrate.eager.settings import Settings
    from symmplan.runtime.sleep import WhyNot


def sleep(settings: Settings, frozen: Frozen, cursor: Cursor) -> None:
    """Give the memory of a session back.

    Args:
        settings: Of the session.
        frozen: Its plan.
        cursor: Where the program is.

    Raises:
        RunError: Some rank uses the memory; raised on all of them, and nothing has changed.

    Collective: yes.
    """
    groups, timeout = settings.process_groups, settings.options.timeout
    if not all_may_sleep(_why_not(frozen, cursor), groups, timeout):
        return
    arenas = [frozen.leave_for_sleep()]
    give_back("eager session", arenas, groups, settings.device, timeout)


def _why_not(frozen: Frozen, cursor: Cursor) -> WhyNot:
    """Why a session cannot sleep now on this rank."""
    if cursor.at:
        return (
            "session.sleep() was called in the midst of an iteration",
            f"{cursor.at} of {len(frozen.events)} calls",
            "call it behind session.step()",
        )
    if frozen.in_graph and frozen.arena.segments:
        name, segment = next(iter(frozen.arena.segments.items()))
        return in_capture("session", f"segment {name!r} at {segment.address:#x}")
    held = let_go(lambda: [lease for event in frozen.events for lease in event.held()])
    if held:
        return (
            "session.sleep() was called while the program holds a tensor of the session",
            f"buffer {held[0].name!r}",
            "drop the tensor, or keep a clone of it",
        )
    return None
