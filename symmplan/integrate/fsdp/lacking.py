"""What a program did for which its plan has no place; each is planned for once.

[Note: planned for once]
    A new plan knows what the recorded stretch did. It gives two modules bytes apart from each other
    if their parameters were needed at the same time, unless it has no room for that (see [Note:
    room for one module more] in `symmplan.planner.parameters`). In both cases a further plan would
    be no better. So what a plan was made for is not a reason for another one.

[Note: bytes beside a plan]
    What has no place needs ordinary memory beside the segments, in other sizes than the planned
    stretches did. Torch's allocator would have it on top of what it has cached for these. So it
    gives that back when a stretch first does something that none did before, but not more often
    than the program may be planned again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmplan.memory.device_memory import empty_cache

if TYPE_CHECKING:
    from collections.abc import Hashable

    from symmplan.integrate.fsdp.segments import Memory

__all__ = ["Lacking"]


class Lacking:
    """What the plan lacks for the stretch that is being recorded.

    Args:
        memory: What the plan lies in.
        times: In how many stretches at most torch's allocator gives back its cache.
    """

    def __init__(self, memory: Memory, times: int) -> None:
        self._memory = memory
        self._times = times
        self._now: set[tuple[Hashable, ...]] = set()
        self._seen: set[tuple[Hashable, ...]] = set()
        self._planned_for: set[tuple[Hashable, ...]] = set()

    def __bool__(self) -> bool:
        return bool(self._now)

    def note(self, why: str, *what: Hashable) -> None:
        """Something has no place, unless a plan was made for it. See [Note: planned for once].

        Args:
            why: One of `symmplan.integrate.fsdp.reasons`.
            what: The collective, or the modules.
        """
        noted = why, *what
        if noted in self._planned_for:
            return
        if self._times and not self._now and noted not in self._seen:
            self._times -= 1
            self._give_back_cache()
        self._now.add(noted)
        self._seen.add(noted)

    def planned_for(self) -> None:
        """A plan was made for all of it, or would be no other than the last."""
        self._planned_for |= self._now

    def begin(self) -> None:
        """Another stretch begins."""
        self._now.clear()

    def _give_back_cache(self) -> None:
        """See [Note: bytes beside a plan]."""
        facade = self._memory.facade
        if facade is not None and not facade.is_capturing():
            empty_cache(self._memory.device)
