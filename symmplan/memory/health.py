"""Whether the segments of an arena may still be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Health"]


@define(eq=False)
class Health:
    """Whether the segments of an arena may still be used; shared by all of them.

    A rank that left a barrier by an error no longer knows which accesses of its peers are over, so
    nothing in the arena may be trusted any more.

    Attributes:
        reason: First line of the first error, None while all is well. Not the error itself: its
            traceback would hold on to the frames that hold the memory.
        on_break: Called with the keys of processes that did not arrive.
    """

    reason: str | None = None
    on_break: list[Callable[[Sequence[int]], None]] = field(factory=list)

    def break_(self, error: BaseException, because: Sequence[int] = ()) -> None:
        """Make the arena unusable because of ``error``; the first one stays.

        ``because`` are keys of the processes that did not arrive.
        """
        if self.reason is None:
            self.reason = (str(error) or repr(error)).splitlines()[0]
            for act in self.on_break:
                act(because)
