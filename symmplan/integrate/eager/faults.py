"""One rank of an eager session fails: an error on every rank, and nobody left waiting.

[Note: one rank departs]
    Who finds that the program departs from the schedule rings the alarm of the group, breaks the
    arena, and raises. Peers inside a collective of that arena notice that it is broken, read the
    alarm and raise the same error, which names rank, op and buffer.

[Note: who waits elsewhere]
    A peer may wait where nothing of symmplan's can look around: for its device, on which a kernel
    waits for the rank that departed, or in a collective that is not declared. So each rank has a
    thread that listens for the alarm. When it rings, the rank's next declared call raises; if none
    comes for a while, the thread aborts the group's communicators, which ends the wait, and lets
    the waiting thread raise the peer's error as soon as it is back in Python, before it can use
    what the aborted collective left behind. Before that, all ranks see to it that no planned
    collective waits for one of them; see `symmplan.integrate.eager.rescue`.

[Note: threads that end]
    A thread that comes back from C++ (a store, an abort) while the interpreter ends is unwound
    through code that may not throw, and the process is aborted. So the thread that listens ends
    with its session, and what is left of our threads when the interpreter exits ends there: its
    exit handlers run while other threads still can. They are daemons all the same, because one
    that waits for a peer for ever must not keep the process; each wait for one has a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from symmplan.errors import RunError, SymmplanError
from symmplan.memory.own import own_work
from symmplan.memory.sessions import Alarm, SessionKeys
from symmplan.torch_private import c10d, threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from symmplan.integrate.eager.schedule import Event
    from symmplan.integrate.eager.tape import Step
    from symmplan.memory.groups import Group

__all__ = ["REDO", "Faults", "ends_within", "public"]

#: Seconds within which the error of a rank that gave up is there to be read.
_PATIENCE = 2.0
#: Seconds that a rank has to come upon a peer's failure by itself.
_GRACE = 3.0
_POLL = 0.25
#: Seconds that peers have to hear of a failure and to say how far they are.
_MEETING = _PATIENCE + _GRACE + 5.0
#: Seconds that a device has to come to rest after a failure.
_REST = 10.0
#: Seconds that an abort may take. On a device that never comes to rest it does not end.
_ABORT = 15.0

REDO = "make the same calls in every iteration, or call session.replan() on all ranks"


class Faults:
    """What a session does about failures, its own and its peers'.

    Args:
        keys: Of the session in its group's store.
        on_failure: Called once with the first error: nothing may be served any more.
        rescue: Called once after that, with the group, a key in its store and seconds: peers may
            wait for planned calls that this rank did not make.

    Attributes:
        failed: Whether this rank knows of a failure.
        told: What was raised in one of the program's calls. It has heard of that, and need not hear
            of it again when it leaves the session.

    Collective: no.
    """

    def __init__(
        self,
        keys: SessionKeys,
        on_failure: Callable[[BaseException], None],
        rescue: Callable[[Group, str, float], None],
    ) -> None:
        self._keys = keys
        self._group = keys.group
        self._on_failure = on_failure
        self._rescue = rescue
        self._rescuing = threading.Lock()
        self._rescued = False
        self._alarm = Alarm(keys)
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._quiet = threading.Event()
        self._raised_there = False
        self.failed = False
        self.told: BaseException | None = None
        self._listener: threading.Thread | None = None

    def listen(self) -> None:
        """Hear of what peers fail with, until `close`."""
        if self._group.size > 1:
            _OPEN.add(self)
            self._listener = _started(self._listen, "symmplan alarm")

    def usable(self) -> None:
        """Raise if the session failed.

        Raises:
            SymmplanError: What the first rank failed with.
        """
        if not self.failed:
            return
        self._notice()
        self.rescue()
        self.told = self._alarm.heard() or RunError(
            "an eager session was used after it failed",
            fix="call session.replan() on every rank, or leave the session",
            group=self._group.name,
            rank=self._group.rank,
        )
        raise self.told

    def depart(
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
        """Raise, on every rank. See [Note: one rank departs].

        ``event`` is the planned call, None if there is none any more; it gives the names of the op
        and of a buffer where there are no better ones.
        """
        error = RunError(
            f"rank {self._group.rank}: {what}",
            expected=expected,
            got=got,
            fix=fix,
            group=self._group.name,
            rank=self._group.rank,
            failed_rank=self._group.rank,
            op=op or (event.name if event is not None else ""),
            buffer=buffer or _name_of_buffer(event),
        )
        self.fail(error)
        self.rescue()
        raise error

    def fail(self, error: BaseException) -> None:
        """This rank failed, or learnt that another did. Only the first error counts."""
        self._notice()
        self.told = error
        if not self.failed:
            self.failed = True
            self._alarm.ring(error)
            self._on_failure(error)

    def rescue(self, group: Group | None = None) -> None:
        """See that no peer waits for a planned collective of this rank. Whoever is first does it.

        Args:
            group: The session's, with another connection to its store.

        Collective: yes, over the ranks of a session that failed. Nobody waits for long.
        """
        with self._rescuing:
            if not self._rescued:
                self._rescued = True
                self._rescue(group or self._group, self._alarm.key("at"), _MEETING)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Run something of ours; if it fails, say why on every rank."""
        try:
            with own_work:
                yield
        except BaseException as error:
            self.found(error)
            raise

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Note what is raised inside: the program hears of it."""
        try:
            yield
        except BaseException as error:
            self.told = error
            raise

    def perform(self, steps: Sequence[Step]) -> None:
        """Do what needs nothing of a call, such as barriers."""
        if steps:
            with self.guarded():
                for step in steps:
                    step([])

    def found(self, error: BaseException) -> None:
        """``error`` came up here. Returns if it is this rank's own.

        Raises:
            SymmplanError: What a peer failed with, if that is why.
        """
        told = self._alarm.heard(_PATIENCE) if isinstance(error, SymmplanError) else None
        self.fail(error)
        self.rescue()
        if told is not None:
            raise told from None

    def give_up(self, error: BaseException) -> None:
        """The program left by ``error``.

        Peers may wait anywhere: in an op, on their device, or for this rank to record one.
        """
        self._keys.fail(error)
        self.fail(error)
        self.rescue()
        self._abort()

    def _abort(self) -> None:
        """End what waits for a peer that will never come."""
        if self._group.size > 1:
            ends_within(_ABORT, c10d.abort_group, self._group.process_group)

    def at_rest(self, device: torch.device) -> bool:
        """Whether the device has nothing to do; after a failure it may wait for a peer for ever."""
        if device.type != "cuda":
            return True
        if not self.failed:
            torch.cuda.synchronize(device)
            return True
        return ends_within(_REST, torch.cuda.synchronize, device)

    def close(self) -> None:
        """Listen no more. See [Note: threads that end]."""
        self._notice()
        if self._listener is not None and self._listener is not threading.current_thread():
            self._listener.join(_ABORT)
        _OPEN.discard(self)

    # The thread. See [Note: who waits elsewhere].

    def _notice(self) -> None:
        """The program's thread knows by now: it needs no other to tell it."""
        with self._lock:
            self._quiet.set()
            if self._raised_there:
                self._raised_there = False
                threads.raise_in_thread(self._thread, None)

    def _listen(self) -> None:
        alarm = self._alarm.listener()
        while not self._quiet.wait(_POLL):
            told = alarm.heard()
            if told is None:
                continue
            self.failed = True
            self._on_failure(told)
            if self._quiet.wait(_GRACE):
                return
            for _ in range(int(_ABORT / _POLL)):
                if not _imports(self._thread) or self._quiet.wait(_POLL):
                    break
            with self._lock:
                if self._quiet.is_set():
                    return
                self._raised_there = True
                self.told = told
                threads.raise_in_thread(self._thread, told)
            self.rescue(alarm.group)
            if not self._quiet.wait(_GRACE):
                self._abort()
            return


def ends_within(seconds: float, act: Callable[..., object], *args: Any) -> bool:
    """Call ``act(*args)`` and wait for its end, but not for ever.

    Returns:
        Whether it ended. It goes on if not.
    """
    thread = _started(lambda: act(*args), "symmplan ends_within")
    thread.join(seconds)
    return not thread.is_alive()


def _started(act: Callable[[], object], name: str) -> threading.Thread:
    def run() -> None:
        try:
            act()
        finally:
            _THREADS.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _THREADS.add(thread)
    thread.start()
    return thread


def _end_threads() -> None:
    """The interpreter is about to end. See [Note: threads that end]."""
    for faults in tuple(_OPEN):
        faults.close()
    for thread in tuple(_THREADS):
        thread.join(_GRACE)
    # What sessions leave in cycles may hold a process group, whose threads are torch's.
    gc.collect()


def _forget_threads() -> None:
    """They run in the process that this one was forked from."""
    _OPEN.clear()
    _THREADS.clear()


#: What has a thread that listens, and all threads of ours.
_OPEN: set[Faults] = set()
_THREADS: set[threading.Thread] = set()
atexit.register(_end_threads)
os.register_at_fork(after_in_child=_forget_threads)


def _imports(thread: int) -> bool:
    """Whether a thread is importing a module, which would stay half there if it had to raise."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _name_of_buffer(event: Event | None) -> str:
    """A buffer that an event touches, for messages."""
    if event is None:
        return ""
    claimed = [buffer for buffer, _, _ in event.claims]
    bound = [site.buffer for site in event.bound.values()]
    return next((name for name in (*claimed, *bound, *event.writes) if name), "")


def public(given: Any) -> Any:
    """Arguments for messages: no objects, no addresses."""
    if isinstance(given, (tuple, list)):
        if len(given) == 2 and isinstance(given[1], torch.dtype):
            return f"{str(given[1]).removeprefix('torch.')}{list(given[0])}"
        return tuple(public(v) for v in given)
    if isinstance(given, dict):
        return {k: public(v) for k, v in given.items()}
    return getattr(given, "__name__", given)
