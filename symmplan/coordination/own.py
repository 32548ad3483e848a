"""Work of symmplan's own: collectives that the program did not ask for.

[Note: own work]
    Meeting for a barrier, registering a segment, timing a choice, or running a compiled graph in
    its placements calls torch's collectives. An eager session watches torch's collectives, and must
    not take these for the program's: they are in no recording and no plan. So everything that
    symmplan runs by itself runs inside `own_work`, and a session ignores it. This holds for one
    thread; the program may go on in another.

[Note: dropped objects]
    A program may drop a backend, a model or an arena without a word. Then its memory is given back,
    on each rank by itself, at a moment of its own: nothing collective may happen there. The garbage
    collector may find the object in the midst of any statement, so inside `own_work`, which may
    hold a lock or count the users of a segment, it only notes what is to be done. That is done when
    the outermost `own_work` of the thread ends. While a CUDA graph is being captured, nobody can
    wait for the device, so it is done later, too. A device that has failed gives nothing back, and
    says so in whatever it is asked: what the program gets is its own error, not that one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from typing import TYPE_CHECKING, Any, TypeVar, cast

from symmplan.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["at_drop", "end_dropped", "in_own_work", "own_work"]

_Act = TypeVar("_Act", bound="Callable[..., Any]")

_LOG = logging.getLogger("symmplan")


class _OwnWork:
    """A context manager and a decorator; may be nested."""

    def __enter__(self) -> None:
        PROCESS.thread.own_work += 1

    def __exit__(self, *error: object) -> None:
        PROCESS.thread.own_work -= 1
        if PROCESS.dropped:
            end_dropped()

    def __call__(self, act: _Act) -> _Act:
        @functools.wraps(act)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return act(*args, **kwargs)

        return cast("_Act", inside)


#: ``with own_work:`` or ``@own_work``. See [Note: own work].
own_work = _OwnWork()


def in_own_work() -> bool:
    """Whether this thread is in work of symmplan's own: what it calls is not the program's."""
    return PROCESS.thread.own_work > 0


def at_drop(thing: Any, act: Callable[[], None]) -> weakref.finalize[..., Any]:
    """Do something once an object is dropped. See [Note: dropped objects].

    Args:
        thing: The object, to which ``act`` must not refer.
        act: Does nothing collective.
    """
    finalizer = weakref.finalize(thing, _dropped, act)
    finalizer.atexit = False
    return finalizer


def _dropped(act: Callable[[], None]) -> None:
    PROCESS.dropped.append(act)
    end_dropped()


def end_dropped() -> None:
    """Do what is due for objects that were dropped, unless it has to wait. Collective: no."""
    if _has_to_wait():
        return
    with contextlib.suppress(IndexError):  # another thread may do the last
        while PROCESS.dropped:
            act = PROCESS.dropped.popleft()
            PROCESS.thread.own_work += 1
            try:
                act()
            except Exception:  # noqa: BLE001 (the statement that is interrupted goes on)
                _LOG.exception("the memory of a dropped object could not be given back")
            finally:
                PROCESS.thread.own_work -= 1


def _has_to_wait() -> bool:
    """Whether nothing can be given back now."""
    here = [d for d in PROCESS.devices.copy().values() if d.is_accelerator and d.is_available()]
    try:
        return in_own_work() or any(device.is_capturing() for device in here)
    except RuntimeError:  # that device has failed
        return True
