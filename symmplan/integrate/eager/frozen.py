"""The plan of an eager session, and where its tensors lie."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from symmplan.coordination.all_gather import all_agree
from symmplan.device import device_of, kind_of
from symmplan.memory.streams import synchronize
from symmplan.runtime.engines import register_known
from symmplan.runtime.leases import in_use
from symmplan.runtime.tenants import settled, synchronizes_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from symmplan.capture.sites import Captured
    from symmplan.integrate.eager.build import Builder
    from symmplan.integrate.eager.schedule import Act, Event
    from symmplan.memory import Arena
    from symmplan.model import Plan
    from symmplan.runtime.choice import Choice
    from symmplan.runtime.program import PlacedProgram
    from symmplan.runtime.stats import Copy

#: At how many ends of iterations a session is ready to move before it stays where it is.
_READY = 8


@define(eq=False)
class Frozen:
    """A planned recording; a `symmplan.runtime.tenants.Tenant`.

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
        stays: Whether it may not move any more: it is over, or a CUDA graph has the addresses.
        there: The memory to which it has to `move`, or None; the same on all ranks.
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
    stays: bool = field(init=False, default=False)
    there: Arena | None = field(init=False, default=None)
    _ready: int = field(init=False, default=0)

    _thread: int = field(init=False, factory=threading.get_ident)

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
        settled(self, arena)
        self.leaving = {k: (e, name) for e in events for k, name in e.copied_at_waits()}

    @property
    def lasts(self) -> bool:
        """Yes: a session has its bytes also between its iterations."""
        return True

    @property
    def movable(self) -> bool:
        """Whether the session may get other bytes between two iterations."""
        return not self.stays and synchronizes_once(self.arena)

    @property
    def align(self) -> int:
        """The strictest alignment of its buffers, in bytes."""
        return max((b.align for b in self.plan.problem.buffers), default=1)

    @contextlib.contextmanager
    def still(self) -> Iterator[int | None]:
        """A context in which no iteration runs; 0 if it may move meanwhile. See `Tenant.still`."""
        here = threading.get_ident() == self._thread  # else its place in the program is not known
        yield 0 if here and not self.stays else None

    def move_in(self, there: Arena) -> None:
        """Lie there once an iteration ends in which no rank holds any of the session's tensors.

        Collective: with copy engines, over the session's group.
        """
        if self.engines:
            register_known(there)
        if self.there is not None:
            self.there.give_back()
        self.there, self._ready = there, _READY

    def move(self, device: torch.device, groups: dict[str, Any], timeout: float) -> None:
        """An iteration is over; go there if that can be.

        Args:
            device: Where the tensors lie.
            groups: ``{name: process group}`` of the session.
            timeout: Seconds that ranks wait for each other.

        Collective: yes.
        """
        there = self.there
        if there is None or device_of(device).is_capturing():
            return
        synchronize(device)
        free = not self.stays and not in_use(self.arena.segments.values())
        self._ready -= 1
        if all_agree("move", free, groups, timeout):
            old = self.arena
            self.schedule(there)
            self.there = None
            old.give_back()
        elif not self._ready:
            self.there = None
            there.give_back()

    def let_go(self, device: torch.device, *, failed: bool) -> None:
        """Give the memory back; ``failed`` if the session did. Collective: no."""
        self.forget()
        if failed and kind_of(device).is_accelerator:
            return  # a kernel may wait for a peer for ever, in memory that must not go
        synchronize(device)
        self.arena.give_back()

    def forget(self) -> None:
        """End it: what it reports stays, what it held is dropped. Collective: no."""
        self.stays = True
        self.events, self.tail, self.leaving = [], [], {}
        there, self.there = self.there, None
        if there is not None:
            there.give_back()
