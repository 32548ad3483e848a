"""A plan as a list of collectives to be followed step after step.

[Note: one answer on all ranks]
    A collective's bytes must lie at the same place on all ranks. So the place may depend only on
    what all ranks share, which is the sequence of FSDP2's collectives. `Schedule.follow` is a
    function of that sequence alone. It does not look at whether the bytes are free on this rank. If
    they are not, this rank alone makes room (see `symmplan.integrate.fsdp.segments`).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from attrs import field, frozen

from symmplan.capture.fsdp import OPS
from symmplan.model import PUSHES
from symmplan.place.expected import Expected

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from symmplan.capture.fsdp import Planned
    from symmplan.capture.fsdp_recording import Call, Key
    from symmplan.model import Algorithm, AlgorithmName, Placement, Plan

__all__ = ["Schedule", "ScheduledCollective"]


@frozen(eq=False)
class ScheduledCollective:
    """One collective of the schedule.

    Attributes:
        call: Which.
        place: Where its buffer lies; None if it stays in ordinary memory.
        algorithm: How it runs.
        zero_copy: Whether its buffer is the parameters themselves.
        runs_by: The algorithm by which it runs as planned.
        pushed: Whether its input goes straight to the peers; see `symmplan.integrate.fsdp.push`.
    """

    call: Call
    place: Placement | None
    algorithm: Algorithm
    zero_copy: bool = False
    runs_by: AlgorithmName = field(init=False)
    pushed: bool = field(init=False)

    @runs_by.default
    def _runs_by(self) -> AlgorithmName:
        return "ordinary" if self.place is None else self.algorithm.name

    @pushed.default
    def _pushed(self) -> bool:
        return self.runs_by in PUSHES


class Schedule:
    """The stretches of a program that were planned, the last one again and again.

    Args:
        plan: The plan.
        stretches: The collectives of each stretch, in order.

    Attributes:
        collectives: All of them.
        places_nothing: Whether they all stay in ordinary memory.
    """

    def __init__(self, plan: Plan, stretches: Sequence[Sequence[Planned]]) -> None:
        stretches = [[c for c in stretch if not c.carried] for stretch in stretches]
        self.collectives = tuple(
            ScheduledCollective(
                c.call,
                None if c.buffer is None else plan.placements[c.buffer],
                c.algorithm,
                c.zero_copy,
            )
            for stretch in stretches
            for c in stretch
        )
        self.places_nothing = all(s.place is None for s in self.collectives)
        self._places: dict[Key, list[int]] = {}
        for index, scheduled in enumerate(self.collectives):
            self._places.setdefault(scheduled.call.key, []).append(index)
        #: Begin and end of the stretch of each of them.
        self._bounds: list[tuple[int, int]] = []
        for stretch in stretches:
            begin = len(self._bounds)
            self._bounds += [(begin, begin + len(stretch))] * len(stretch)
        self._next = self._bounds[-1][0]

    def follow(self, key: Key, counts: Counter[str]) -> ScheduledCollective | None:
        """The plan's entry for the program's next collective.

        Args:
            key: The collective.
            counts: Where it is ``reordered`` if it came out of order.

        Returns:
            None if the plan does not know the collective. Out of order, the next such collective of
            this stretch is taken, otherwise one of the plan. See [Note: one answer on all ranks].
        """
        places = self._places.get(key)
        if places is None:
            return None
        begin, end = self._bounds[self._next]
        inside = [p for p in places if begin <= p < end] if len(places) > 1 else ()
        places = list(inside) or places
        at = bisect_left(places, self._next)
        index = places[at] if at < len(places) else places[0]
        if index != self._next:
            counts["reordered"] += 1
        begin, end = self._bounds[index]
        self._next = index + 1 if index + 1 < end else begin
        return self.collectives[index]

    def expected(
        self, key: Key, memory: str, scheduled: ScheduledCollective | None = None
    ) -> Expected | None:
        """How a collective is to run; None if the plan does not know it.

        Args:
            key: The collective.
            memory: Name of the memory backend.
            scheduled: The plan's entry for it, if that is known.
        """
        known = (s for s in self.collectives if s.call.key == key)
        scheduled = next(known, None) if scheduled is None else scheduled
        if scheduled is None:
            return None
        return Expected(
            name=key.site,
            op=OPS[key.kind],
            group=scheduled.call.group,
            memory=memory,
            nbytes=scheduled.call.nbytes,
            dtype=key.dtype,
            algorithm=scheduled.runs_by,
        )
