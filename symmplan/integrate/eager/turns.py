"""Where a session lies: in segments of its own, or in those of FSDP2 while that rests.

See [Note: turns with FSDP2] in `symmplan.runtime.resting`. A session can lie there if its bytes are
used on one stream, if each collective is waited for in its iteration, and if FSDP2 ran no
collective between the first of its calls and `Session.step` in the recorded iteration.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from symmplan.coordination.own import own_work
from symmplan.device import device_of
from symmplan.errors import RunError
from symmplan.memory.streams import synchronize
from symmplan.runtime.resting import Turn, agree_on_owner, part_of, rests, segments_made
from symmplan.runtime.sleep import give_back
from symmplan.torch_private.storages import can_be_taken

if TYPE_CHECKING:
    from symmplan.capture.sites import Captured
    from symmplan.integrate.eager.frozen import Frozen
    from symmplan.integrate.eager.kernels import Cursor
    from symmplan.integrate.eager.schedule import Event
    from symmplan.integrate.eager.settings import Settings
    from symmplan.memory import Arena
    from symmplan.model import Plan
    from symmplan.runtime.resting import SegmentOwner

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Turns:
    """A session's place, and its turns there.

    Args:
        settings: Of the session.

    Attributes:
        user: Name of the session, for people.
        busy: Whether the session is in the midst of an iteration.
        frozen: The session's plan, once it has one.
    """

    user = "eager session"

    def __init__(self, settings: Settings) -> None:
        self.busy = False
        self._settings = settings
        self._seen = 0  # segments that were made for its group
        self.frozen: Frozen | None = None
        self._owner: weakref.ref[Any] | None = None
        self._turn: Turn | None = None
        self._cursor: Cursor | None = None
        self._works: list[Any] = []  # that the program may have, of calls that are forgotten

    # Where it lies.

    def place(self, plan: Plan, memory: str, *, may: bool) -> Arena | None:
        """A part of FSDP2's segments, if all ranks have room there.

        Args:
            plan: What is to lie there.
            memory: Name of its memory backend.
            may: Whether it can, on this rank.

        Collective: yes, over the session's group, if FSDP2 has had segments for that.
        """
        owner = self._found(plan, memory, may=may)
        if owner is None:
            return None
        settings = self._settings
        part = part_of(owner, plan, settings.group, settings.device, self.user)
        owner.turns, self._owner = self, weakref.ref(owner)
        return part

    def _found(self, plan: Plan, memory: str, *, may: bool) -> SegmentOwner | None:
        group = self._settings.group
        self._seen = segments_made(group)
        if not self._seen:
            return None
        device, may = self._settings.device, may and can_be_taken()
        found = rests(self, plan, memory, group, device) if may else {}
        return agree_on_owner(found, group, self._settings.options.timeout)

    def follow(self, frozen: Frozen) -> None:
        """Leave its memory if segments were made since then in which it can lie.

        Collective: yes, over the session's group, if there were any made.
        """
        if frozen.asleep or segments_made(self._settings.group) == self._seen:
            return
        arena, settings = frozen.arena, self._settings
        may = frozen.may_rest and not frozen.in_graph
        if self._found(frozen.plan, arena.memory, may=may) is None:
            return
        if arena.timed:
            self.move_out()
        else:
            self._step_aside(frozen)
            given = settings.process_groups, settings.device, settings.options.timeout
            give_back(self.user, [frozen.leave_for_sleep()], *given)

    def move_out(self) -> None:
        """See `TurnTaker`. The session obtains memory when the next call comes. Collective: no."""
        frozen = self.frozen
        self._leave()
        if frozen is not None and not frozen.asleep and frozen.arena.timed:
            self._step_aside(frozen)
            synchronize(self._settings.device)
            frozen.leave_for_sleep().give_back()

    def simulated(self, frozen: Frozen) -> Plan:
        """The plan; in a simulated world it has no memory if FSDP2's has room. Collective: no."""
        group, memory = self._settings.group, frozen.arena.memory
        device = self._settings.device
        if frozen.may_rest and rests(self, frozen.plan, memory, group, device):
            frozen.arena.give_back()
        return frozen.plan

    def _leave(self) -> None:
        """Be no tenant any more."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and owner.turns is self:
            owner.turns = None
        self._owner = None

    # Turns.

    def begin(self, frozen: Frozen, cursor: Cursor) -> None:
        """An iteration begins, or goes on behind a turn of FSDP2.

        Args:
            frozen: The session's plan.
            cursor: How far its program is.

        Raises:
            RunError: A CUDA graph is being captured, which would run without FSDP2's turns.

        Collective: yes, over the session's group, if it lies in FSDP2's segments.
        """
        self.busy, self._cursor = True, cursor
        if self._turn is not None or not frozen.arena.timed:
            return
        owner = None if self._owner is None else self._owner()
        capture = device_of(self._settings.device).capture_of()
        if capture and (owner is None or owner.capture != capture):
            raise RunError(
                "a CUDA graph is being captured of a session that lies in FSDP2's segments",
                expected="segments that nobody else has between two runs of the graph",
                got="those of symmplan.fsdp",
                fix="call handle.remove() of symmplan.fsdp before the session's first iteration",
                **self._settings.group.here,
            )
        turn = Turn(frozen.arena, self._settings.group.name, self._settings.device)
        with own_work:
            turn.begin()
        self._turn = turn

    def end_iteration(self) -> None:
        """An iteration ends. Collective: as `end_turn`."""
        self.busy = False
        self.end_turn()

    def end_turn(self) -> None:
        """See `TurnTaker`."""
        turn, frozen = self._turn, self.frozen
        if turn is None or frozen is None:
            return
        self._turn = None
        if self._cursor is not None:
            self._cursor.serve = self._cursor.first
        with own_work:
            turn.follow()
            for event in frozen.events:
                _await(event)
            turn.meet()
            self._works = [event.work for event in frozen.events]
            if self._step_aside(frozen):
                frozen.schedule(frozen.arena)
            turn.put_back()
            turn.meet()
            turn.over()

    def fail(self, error: BaseException) -> None:
        """The session has failed: FSDP2's segments cannot be used if that was in a turn."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.fail(error)

    def drop(self) -> None:
        """The session is over, or has failed. Collective: no."""
        turn, self._turn = self._turn, None
        if turn is not None and self.frozen is not None:
            self._step_aside(self.frozen)
            turn.put_back()
            turn.over()
        self._leave()
        self.busy, self.frozen, self._cursor, self._works = False, None, None, []

    @staticmethod
    def _step_aside(frozen: Frozen) -> bool:
        """Let tensors that the program holds be in copies; whether there are any."""
        held = [lease for event in frozen.events for lease in event.held()]
        for lease in held:
            lease.copy_aside()
        return bool(held)


def may_rest(captured: Captured, plan: Plan) -> bool:
    """Whether a session can lie in segments of others, by what it does; equal on all ranks."""
    placed = [s.node for s in captured.sites if s.buffer is not None]
    waited = all(n in captured.waits for n in placed if captured.specs[n].asynchronous)
    streams = {operation.name: operation.stream for operation in captured.problem.operations}
    used = {streams[access.operation] for access in captured.problem.accesses}
    return waited and len(used) == 1 and bool(plan.segments)


def _await(event: Event) -> None:
    """Wait for what a call has started, if the program has not yet."""
    if event.work is not None:
        event.work.wait()
    if event.placed is not None and event.placed.spec.asynchronous:
        for lease in event.leases:
            _WAIT(lease.tensor)
