"""The plan of an eager session, and where its tensors lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import define, field

from symmplan.device import kind_of
from symmplan.memory.streams import synchronize

if TYPE_CHECKING:
    from collections.abc import Callable

    from symmplan.capture.sites import Captured
    from symmplan.choose.choice import Choice
    from symmplan.integrate.eager.build import Builder
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
        engines: Whether copy engines run some of the calls.
        copies: See `Copy`.
        choices: The measured choices.
        refused: Why nothing is in symmetric memory; empty if it is.
        events: The expected calls that ``builder`` made.
        tail: The work at the end of each iteration.
        leaving: ``{storage: (call, its copy out)}`` of results that are copied out at their wait.
    """

    program: PlacedProgram
    arena: Arena
    rendezvous: int
    builder: Callable[[Arena], Builder]
    engines: bool
    copies: tuple[Copy, ...]
    choices: tuple[Choice, ...]
    refused: str = ""
    events: list[Event] = field(init=False, factory=list)
    tail: list[Act] = field(init=False, factory=list)
    leaving: dict[int, tuple[Event, str]] = field(init=False, factory=dict)

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
        with torch.inference_mode(mode=False):  # what is made here outlives the caller's mode
            events, tail = self.builder(arena).build()
        self.arena, self.events, self.tail = arena, events, tail
        self.leaving = {k: (e, name) for e in events for k, name in e.copied_at_waits()}

    def let_go(self, device: torch.device, *, failed: bool) -> None:
        """Give the memory back; ``failed`` if the session did. Collective: no."""
        self.forget()
        if failed and kind_of(device).is_accelerator:
            return  # a kernel may wait for a peer for ever, in memory that must not go
        synchronize(device)
        self.arena.give_back()

    def forget(self) -> None:
        """End it: what it reports stays, what it held is dropped. Collective: no."""
        self.events, self.tail, self.leaving = [], [], {}
