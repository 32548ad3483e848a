"""Which threads run a program that is recorded.

[Note: threads of a program]
    A session records and serves the thread that entered it, and the threads in which autograd runs
    that thread's backward: torch carries a mark of the thread over to them. What other threads call
    runs in torch's own way, in the recorded iteration and in all others. A checkpoint's or a
    metric's collective comes whenever its thread does, and that is in no order which ranks could
    agree on. A tensor that such a thread is the last to drop has left the iteration: nobody knows
    when it will be dropped the next time.
"""

from __future__ import annotations

from symmplan.torch_private import threads

__all__ = ["ProgramThreads"]

_KEY = "symmplan program"


class ProgramThreads:
    """The thread that makes this, and those of autograd that work for it."""

    def __init__(self) -> None:
        self._mark = object()  # of this program; it holds nothing else
        threads.mark_thread(_KEY, self._mark)

    def current(self) -> bool:
        """Whether this is one of them. Asked on every declared call."""
        return threads.thread_mark(_KEY) is self._mark
