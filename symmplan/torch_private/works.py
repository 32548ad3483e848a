"""The works that process groups give for their collectives."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


def register_work() -> Callable[[torch.Tensor, Any], None] | None:
    """Makes ``wait_tensor`` of a tensor wait for a work; None if this torch does not say how."""
    from torch._C import _distributed_c10d as c10d

    return getattr(c10d, "_register_work", None)


def ended_by_wait(tensor: torch.Tensor, work: Any) -> None:
    """Let ``wait_tensor`` of a tensor wait for a work; waits now where torch cannot be told.

    Args:
        tensor: What the work writes.
        work: What ends then.
    """
    register = register_work()
    if register is None:
        work.wait()
    else:
        register(tensor, work)


class _Watched(dist.Work):
    """The work of a collective of which somebody wants to know when it is waited for."""

    def __init__(
        self,
        work: Any,
        waited: Callable[[], None] | None,
        written: torch.Tensor | None,
        event: Callable[[], Any] | None,
    ) -> None:
        super().__init__()
        self._work = work
        self._waited = waited
        self._written = written
        self._event = event
        self._over: Any = None

    def wait(self, timeout: Any = None) -> bool:
        done, work = True, self._work
        if work is not None:
            done = work.wait() if timeout is None else work.wait(timeout)
            self._work = None  # it may hold its tensors for as long as it lives
            if self._event is not None:
                self._over = self._event()
        self._end()
        return done

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Its end is still to be waited for."""
        if self._over is not None:
            return bool(self._over.query())
        return self._work is None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return self._work is None or bool(self._work.is_success())

    def get_future(self) -> Any:
        """A future. Who waits for it cannot be seen."""
        work, written = self._work, self._written
        if work is not None:
            self.wait()
            if not isinstance(work, _Queued):
                return work.get_future()
        future: Any = torch.futures.Future()
        future.set_result([written])
        self._waited = None
        return future

    def _end(self) -> None:
        waited, self._waited, self._written = self._waited, None, None
        if waited is not None:
            waited()


@functools.cache
def finished() -> Any:
    """A work that is over, and has no results of its own.

    One for all, as a box does not keep its Python half.
    """
    return _Watched(None, None, None, None)


def finished_work(written: torch.Tensor) -> tuple[Any, Any]:
    """A work that is over, as `watched_work` gives it, of a collective that wrote a tensor."""
    handle = _Watched(None, None, written, None)
    return handle, handle.boxed()


def watched_work(
    work: Any,
    waited: Callable[[], None],
    written: torch.Tensor,
    event: Callable[[], Any],
) -> tuple[Any, Any]:
    """A work whose first wait is told.

    Args:
        work: The real one; None if it is over.
        waited: Called after the first wait for it.
        written: The tensor that the collective writes.
        event: Gives an event behind what the current stream has queued; None where there are none.

    Returns:
        It, to be kept as long as the program may get hold of it, and its box.
    """
    handle = _Watched(work, waited, written, event)
    return handle, handle.boxed()


class _Queued(dist.Work):
    """Work that was queued on another stream."""

    def __init__(self, done: Any, kept: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self._done: Any = done
        self._kept: tuple[torch.Tensor, ...] = kept

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 (the interface's)
        if self._done is not None:
            self._done.wait()  # the current stream does
        self._done, self._kept = None, ()
        return True

    def is_completed(self) -> bool:
        return self._done is None or bool(self._done.query())

    def is_success(self) -> bool:
        return True


def queued_work(done: Any, *kept: torch.Tensor) -> Any:
    """A work for which the current stream waits.

    Args:
        done: An event behind it, on its own stream.
        kept: What it uses, which stays alive until somebody has waited.
    """
    return _Queued(done, kept)
