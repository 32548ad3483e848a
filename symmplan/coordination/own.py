"""Work of symmplan's own: collectives that the program did not ask for.

[Note: own work]
    Meeting for a barrier, registering a segment, timing a choice, or running a compiled graph in
    its placements calls torch's collectives. An eager session watches torch's collectives, and must
    not take these for the program's: they are in no recording and no plan. So everything that
    symmplan runs by itself runs inside `own_work`, and a session ignores it. This holds for one
    thread; the program may go on in another.
"""

from __future__ import annotations

import contextlib

from symmplan.process import PROCESS

__all__ = ["in_own_work", "own_work"]


class _OwnWork(contextlib.ContextDecorator):
    """A context manager and a decorator; may be nested."""

    def __enter__(self) -> None:
        PROCESS.thread.own_work += 1

    def __exit__(self, *error: object) -> None:
        PROCESS.thread.own_work -= 1


#: ``with own_work:`` or ``@own_work``. See [Note: own work].
own_work = _OwnWork()


def in_own_work() -> bool:
    """Whether this thread is in work of symmplan's own: what it calls is not the program's."""
    return PROCESS.thread.own_work > 0
