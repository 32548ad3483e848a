"""How peers hear that one rank of an eager session has failed.

[Note: one rank diverges]
    A rank whose program makes another call than planned posts an alarm to the group, breaks the
    arena, and raises. Peers that wait in the arena notice that it is broken, read the alarm and
    raise the same error, which names rank, op and buffer. Peers that wait in an exchange, as at the
    end of the session, find the alarm there. A peer that waits in a collective of a process group,
    on the host or on a device, is not told: the group's own timeout ends its wait, as it does
    without a session.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from symmplan.coordination.own import own_work
from symmplan.errors import RunError, SessionError, SymmplanError
from symmplan.integrate.eager.schedule import name_of
from symmplan.memory.meeting.callers import caller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from symmplan.coordination.groups import Group
    from symmplan.coordination.sessions import SessionKeys
    from symmplan.integrate.eager.kernels import Cursor
    from symmplan.integrate.eager.schedule import Event

#: Seconds within which the error of a rank that gave up is there to be read.
_PATIENCE = 2.0

REDO = "make the same calls in every iteration, or call session.replan() on all ranks"

_SETTLE = (
    "; with DistributedDataParallel, which rebuilds its buckets after its first backward pass, "
    "enter the session after two iterations"
)

# What sessions leave in cycles may hold a process group, whose threads must not outlive Python.
atexit.register(gc.collect)


class Faults:
    """Tells peers of this rank's failures, and this rank of theirs.

    Args:
        keys: Of the session in its group's store.
        on_failure: Called once with the first error; the session serves nothing afterwards.

    Attributes:
        failed: Whether this rank knows of a failure.
        told: The error that was raised in one of the program's calls. It is not raised again when
            the program leaves the session.

    Collective: no.
    """

    def __init__(self, keys: SessionKeys, on_failure: Callable[[BaseException], None]) -> None:
        self._keys = keys
        self._on_failure = on_failure
        self.failed = False
        self.told: BaseException | None = None

    def usable(self) -> None:
        """Raise if the session failed.

        Raises:
            SymmplanError: The error of the first rank that failed.
        """
        if not self.failed:
            return
        self.told = self._keys.heard() or RunError(
            "an eager session was used after it failed",
            fix="call session.replan() on every rank, or leave the session",
            **self._keys.group.here,
        )
        raise self.told

    def diverge(
        self,
        what: str,
        *,
        expected: object,
        got: object,
        event: Event | None,
        op: str = "",
        buffer: str = "",
        fix: str = REDO,
    ) -> NoReturn:
        """Raise, and tell the peers. See [Note: one rank diverges].

        ``event`` is the planned call, None if there is none any more; it gives the names of the op
        and of a buffer where there are no better ones.
        """
        group = self._keys.group
        if fix == REDO and getattr(event and event.call.op, "namespace", "") == "c10d":
            fix += _SETTLE
        error = RunError(
            f"rank {group.rank}: {what}",
            expected=expected,
            got=got,
            fix=fix,
            **group.here,
            failed_rank=group.rank,
            op=op or (event.name if event is not None else ""),
            buffer=buffer or _name_of_buffer(event),
        )
        self.fail(error)
        raise error

    def expect(
        self, events: list[Event], cursor: Cursor, op: Any, args: Any, kwargs: Any, kind: str
    ) -> Event:
        """The planned call that comes next.

        Args:
            events: The schedule.
            cursor: How far the program is in it.
            op: What the program calls; None for memory.
            args: Arguments that say what it does.
            kwargs: The same by name.
            kind: ``"op"``, ``"empty"`` or ``"out"``.

        Raises:
            RunError: The program calls something else. See [Note: one rank diverges].
        """
        event = events[cursor.at] if cursor.at < len(events) else None
        if event is None or op is not event.call.op or kind != event.call.kind:
            name = name_of(op, kind)
            what = f"{name} was called after the last call of the recorded iteration"
            expected = "session.step()"
            if event is not None:
                what = f"call {cursor.at} is another op than planned: {name} {caller()}, where all "
                what += f"ranks called {event.name} at {event.call.line}"
                expected = f"{event.name} ({event.call.line})"
            self.diverge(what, expected=expected, got=name, event=event, op=name)
        difference = event.differs(args, kwargs)
        if difference is not None:
            self.diverge(
                f"call {cursor.at}, {event.name}, {caller()}, has other arguments than all ranks' "
                f"planned call at {event.call.line}",
                expected=public(difference[0]),
                got=public(difference[1]),
                event=event,
            )
        if not cursor.roles.fits(event.call.stream):
            self.diverge(
                f"call {cursor.at}, {event.name}, runs on another stream than planned",
                expected=f"the stream that was {event.call.stream!r} when it was recorded",
                got="another stream",
                event=event,
            )
        overdue = event.overdue()
        if overdue is not None:
            buffer, other = overdue
            self.diverge(
                f"{event.name} is about to write buffer {buffer!r} over {other!r}, which is still "
                "held",
                expected="no tensor that still uses it, as in the recorded iteration",
                got="one that is kept longer",
                event=event,
                buffer=other,
                fix=f"drop the tensor or keep a clone of it; or {REDO}",
            )
        return event

    def expect_end(self, events: list[Event], cursor: Cursor) -> None:
        """All planned calls have come.

        Raises:
            RunError: The program has made fewer.
        """
        if cursor.at != len(events):
            event = events[cursor.at]
            self.diverge(
                f"the iteration ended before call {cursor.at}, {event.name} at {event.call.line}",
                expected=f"{len(events)} declared calls",
                got=cursor.at,
                event=event,
            )

    def fail(self, error: BaseException) -> None:
        """This rank failed, or learnt that another did. Only the first error counts."""
        self.told = error
        if not self.failed:
            self.failed = True
            self._keys.ring(error)
            self._on_failure(error)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Run symmplan's own code; if it fails, tell every rank.

        Raises:
            SymmplanError: What a peer failed with, if that is why.
        """
        try:
            with own_work:
                yield
        except BaseException as error:
            self.found(error)
            raise

    def found(self, error: BaseException) -> None:
        """Handle an error of symmplan's own code. Returns if this rank caused it.

        Raises:
            SymmplanError: What a peer failed with, if that is why.
        """
        waited = isinstance(error, SymmplanError)  # and may have ended before the alarm rang
        told = self._keys.heard(_PATIENCE if waited else 0.0)
        self.fail(told or error)
        if told is not None:
            raise told from None

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Note that an error which is raised inside reaches the program."""
        try:
            yield
        except BaseException as error:
            self.told = error
            raise

    def give_up(self, error: BaseException) -> None:
        """The program left by ``error``. Peers may wait in the arena or in an exchange."""
        self._keys.fail(error)
        self.fail(error)


def _name_of_buffer(event: Event | None) -> str:
    """A buffer that an event touches, for messages."""
    if event is None:
        return ""
    bound = [site.buffer for site in event.bound]
    return next((name for name in (*event.writes, *bound) if name), "")


def public(given: Any) -> Any:
    """Arguments for messages: no objects, no addresses."""
    if isinstance(given, (tuple, list)):
        if len(given) == 2 and isinstance(given[1], torch.dtype):
            return f"{str(given[1]).removeprefix('torch.')}{list(given[0])}"
        return tuple(public(v) for v in given)
    if isinstance(given, dict):
        return {k: public(v) for k, v in given.items()}
    return getattr(given, "__name__", given)


#: What is wrong with the use of a session, what it is, and what to do.
NOT_ENTERED = (
    "the session was used before it was entered",
    "none yet",
    "write `with session:` around the loop, and call session.step() in it",
)
LEFT = (
    "the session was used after it was left",
    "one that is over",
    "call session.step() inside the with-block, or make a new session",
)


def misused(group: Group, what: str, got: str, fix: str) -> SessionError:
    """The error if a session is used where it cannot be."""
    return SessionError(
        what, expected="an open session", got=got, fix=fix, group=group.name, rank=group.rank
    )
