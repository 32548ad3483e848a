"""What a program did for which its plan has no place; each is planned for once.

[Note: planned for once]
    A new plan knows what the recorded stretch did. It gives two modules bytes apart from each other
    if their parameters were needed at the same time, unless it has no room for that (see [Note:
    room for one module more] in `symmplan.planner.parameters`). In both cases a further plan would
    be no better. So what a plan was made for is not a reason for another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["Lacking"]


class Lacking:
    """What the plan lacks for the stretch that is being recorded."""

    def __init__(self) -> None:
        self._now: set[tuple[Hashable, ...]] = set()
        self._planned_for: set[tuple[Hashable, ...]] = set()

    def __bool__(self) -> bool:
        return bool(self._now)

    def note(self, why: str, *what: Hashable) -> None:
        """Something has no place, unless a plan was made for it. See [Note: planned for once].

        Args:
            why: One of `symmplan.integrate.fsdp.reasons`.
            what: The collective, or the modules.
        """
        if (why, *what) not in self._planned_for:
            self._now.add((why, *what))

    def planned_for(self) -> None:
        """A plan was made for all of it, or would be no other than the last."""
        self._planned_for |= self._now

    def begin(self) -> None:
        """Another stretch begins."""
        self._now.clear()
