"""The plan of an eager session, and where its tensors lie."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from symmplan.device import kind_of
from symmplan.integrate.eager.schedule import OTHER_SIZES, perform
from symmplan.memory.streams import synchronize
from symmplan.runtime.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from symmplan.capture.sites import Captured
    from symmplan.choose.choice import Choice
    from symmplan.integrate.eager.build import Builder
    from symmplan.integrate.eager.faults import Faults
    from symmplan.integrate.eager.schedule import Act, Event
    from symmplan.memory import Arena
    from symmplan.model import Plan
    from symmplan.place.program import PlacedProgram
    from symmplan.runtime.stats import Copy


@define(eq=False)
class Frozen:
    """A planned recording.

    Attributes:
        program: The recorded program, and its plan.
        arena: The plan's memory.
        rendezvous: How many were made for it.
        builder: Builds, for some memory, the expected declared calls in order, and the work at the
            end of each iteration.
        engines: Names of the communicators over which copy engines run calls.
        copies: See `Copy`.
        choices: The measured choices.
        may_rest: Whether it can lie in segments of others; see `symmplan.integrate.eager.turns`.
        refused: Why nothing is in symmetric memory; empty if it is.
        recordings: How many iterations were recorded for it.
        asleep: Whether the memory was given back until the next call.
        in_graph: Whether an iteration was captured in a CUDA graph, which has its addresses.
        events: The expected calls that ``builder`` made; none while asleep.
        tail: The work at the end of each iteration.
        leaving: ``{storage: (call, its copy out)}`` of results that are copied out at their wait.
    """

    program: PlacedProgram
    arena: Arena
    rendezvous: int
    builder: Callable[[Arena], Builder]
    engines: frozenset[str]
    copies: tuple[Copy, ...]
    choices: tuple[Choice, ...]
    may_rest: bool
    refused: str = ""
    recordings: int = 1
    asleep: bool = field(init=False, default=False)
    in_graph: bool = field(init=False, default=False)
    events: list[Event] = field(init=False, factory=list)
    tail: list[Act] = field(init=False, factory=list)
    leaving: dict[int, tuple[Event, str]] = field(init=False, factory=dict)
    # How often calls of events that are forgotten declined.
    _declines: int = field(init=False, default=0)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.program.plan

    @property
    def captured(self) -> Captured:
        """The recorded program."""
        return self.program.captured

    def schedule(self, arena: Arena) -> None:
        """Lie in ``arena`` from now on."""
        self.forget()
        with torch.inference_mode(mode=False):  # what is made here outlives the caller's mode
            events, tail = self.builder(arena).build()
        self.arena, self.events, self.tail, self.asleep = arena, events, tail, False
        self.leaving = {k: (e, name) for e in events for k, name in e.copied_at_waits()}

    def waited(self, faults: Faults, tensor: torch.Tensor) -> None:
        """Copy out a result that leaves, after its wait; who holds the tensor holds the copy."""
        event, operation = self.leaving.get(tensor.untyped_storage()._cdata, (None, ""))
        if event is None:
            return
        with faults.guarded():
            perform(event.due.get(operation, ()))
            copy = tensor.clone()
            tensor.set_(copy.untyped_storage(), 0, copy.shape, copy.stride())

    def stats(
        self, counts: Mapping[str, Any], iterations: int, disengaged: tuple[tuple[str, str], ...]
    ) -> Stats:
        """The counters of its session.

        Args:
            counts: Those of what ran.
            iterations: How many there were, recorded ones too.
            disengaged: As in `Stats`.
        """
        sites, plan = self.captured.sites, self.plan
        return Stats(
            plans=1,
            placed=sum(s.how is not None for s in sites),
            staged=sum(s.how == "stage" for s in sites),
            bound=sum(s.how == "bind" for s in sites),
            unplanned=len(plan.unplanned),
            barriers=len(plan.barriers),
            segment_bytes=0
            if self.arena.released or self.arena.timed
            else self.arena.segment_bytes,
            lower_bound_bytes=plan.lower_bound_bytes,
            unshared_bytes=plan.unshared_bytes,
            copied=self.copies,
            disengaged=disengaged,
            reasons=self._reasons(iterations - self.recordings, counts.get("plain", 0)),
            **counts,
        )

    def _reasons(self, iterations: int, plain: int) -> tuple[tuple[str, int], ...]:
        """Why calls were plain, and how often, most frequent first."""
        if self.refused:
            return ((self.refused, plain),)
        sites, placed = self.captured.sites, self.program.calls
        lost = {s.node: s.reason for s in sites if s.how is None and s.reason}
        found = Counter(why for node, why in lost.items() if node not in placed)
        times = Counter({why: n * iterations for why, n in found.items()})
        times[OTHER_SIZES] = self._declines + sum(event.declines for event in self.events)
        return tuple((why, n) for why, n in times.most_common() if n > 0)

    def leave_for_sleep(self) -> Arena:
        """The memory, in which nothing is expected any more until the next call. Collective: no."""
        self.forget()
        self.asleep = True
        return self.arena

    def let_go(self, device: torch.device, *, failed: bool) -> None:
        """Give the memory back; ``failed`` if the session did. Collective: no."""
        self.forget()
        if failed and kind_of(device).is_accelerator:
            return  # a kernel may wait for a peer for ever, in memory that must not go
        synchronize(device)
        self.arena.give_back()

    def forget(self) -> None:
        """End it: what it reports stays, what it held is dropped. Collective: no."""
        self._declines += sum(event.declines for event in self.events)
        for event in self.events:
            event.forget()
        self.events, self.tail, self.leaving = [], [], {}
