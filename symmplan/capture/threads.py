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

from typing import TYPE_CHECKING

from symmplan.torch_private import threads

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["threads_of_program"]

_KEY = "symmplan program"


def threads_of_program() -> Callable[[], bool]:
    """Begin a program in this thread; those of autograd that work for it are of the program, too.

    Returns:
        Whether the thread that asks is one of them. Asked on every declared call.
    """
    mark = object()  # of this program; it holds nothing else
    threads.mark_thread(_KEY, mark)
    return lambda: threads.thread_mark(_KEY) is mark
