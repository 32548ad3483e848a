"""Which threads run a program that is recorded.

[Note: threads of a program]
    A session records and serves the thread that entered it, and the threads in which autograd runs
    that thread's backward: torch carries a mark of the thread over to them. Calls of other threads
    run in torch's own way, in every iteration. The collective of a checkpoint or a metric comes
    when its thread makes it, so ranks could not agree on an order. If such a thread is the last to
    drop a tensor, the tensor counts as one that leaves the iteration, because the moment of the
    drop differs from iteration to iteration.
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
