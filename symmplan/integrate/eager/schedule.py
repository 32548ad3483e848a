"""What a frozen session expects next.

[Note: when bytes may be overwritten]
    Every placement that the program gets to see is lent as a storage of its own on the segment's
    bytes. Before an event writes a placement, the storages of all buffers that share bytes with it
    must have no user but the session. So a tensor that is held longer than planned is found before
    a byte of it changes, at the price of a few reference counts.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

from attrs import define, field

from symmplan.capture.eager import signature
from symmplan.registry import bind_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from symmplan.capture.eager import Recorded
    from symmplan.capture.sites import Site
    from symmplan.integrate.eager.tape import Step, Tape
    from symmplan.place.loans import Lent
    from symmplan.place.observe import Expected
    from symmplan.place.ways import Lowering

__all__ = ["Event"]

#: Seconds that threads of the process group have to let go of what a finished work held.
_PATIENCE = 0.25
_POLL = 0.01


@define(eq=False)
class Event:
    """A call that the schedule expects.

    Attributes:
        call: What was recorded.
        overload: The op that stands for it in the graph; None for memory.
        shapes: ``{path: stand-in}`` of the op's results.
        row: How it runs on this memory backend.
        group: Name of the process group, or of the communicator over which copy engines run it.
        before: What to do first: overwriting of dead placements, barriers.
        after: Barriers of ops behind it that are not declared.
        writes: Names of the buffers that it writes first.
        claims: Those, each with a buffer on its bytes whose placement nobody may hold any more.
        arguments: The placements of declared arguments.
        bound: ``{slot: argument}`` of those that must already lie there.
        results: ``{path: placement}`` of results.
        lent: ``{path: Lent}`` of those results that stay there.
        leaving: ``{path: Lent}`` of pending results that are copied out when they are waited for.
        lists: Which of the op's arguments are lists of tensors, by position.
        tape: What it does; None if nothing of it is in a placement.
        gives: Takes out of its frame what the program gets.
        run: Makes it: of a frame, or for memory of a function, its arguments and those by name.
        short: The same of what the program gives: the dispatch keys, None in front of the
            dispatcher, and its arguments; of a
            ``c10d::`` call the process group and its method's arguments; of memory its kind and as
            `run`. Returns `MISS` if that is not as planned. None if there is no such way.
        work: The Python half of the last work that C++ got, if it is symmplan's.
        copies: How often bytes are copied into and out of placements.
        expected: How it is to run, for a check; None if it is no collective in a placement.
    """

    call: Recorded
    overload: Any
    shapes: dict[tuple[int, ...], Any]
    row: Lowering | None
    group: str = ""
    before: list[Step] = field(factory=list)
    after: list[Step] = field(factory=list)
    writes: list[str] = field(factory=list)
    claims: list[tuple[str, str, Lent]] = field(factory=list)
    arguments: dict[Site, torch.Tensor] = field(factory=dict)
    bound: dict[int, Site] = field(factory=dict)
    results: dict[tuple[int, ...], torch.Tensor] = field(factory=dict)
    lent: dict[tuple[int, ...], Lent] = field(factory=dict)
    leaving: dict[tuple[int, ...], Lent] = field(factory=dict)
    lists: list[int] = field(factory=list)
    tape: Tape | None = None
    gives: Callable[[list[Any]], Any] | None = None
    run: Callable[..., Any] | None = None
    short: Callable[..., Any] | None = None
    work: Any = None
    copies: int = 0
    expected: Expected | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"symmplan.{self.call.kind}" if self.call.op is None else str(self.call.op.name())

    @property
    def recorded(self) -> dict[str, Any]:
        """What was recorded of each argument, or its default."""
        return bind_arguments(self.overload, self.call.args, self.call.kwargs)

    @property
    def form(self) -> bool:
        """Whether it is a ``c10d::`` call in the words of a functional collective."""
        return self.overload is not None and self.call.op is not self.overload

    @property
    def pends(self) -> bool:
        """Whether the program gets a work to wait for; of ``c10d::`` calls."""
        # Symmplan's own ops are over when they return.
        return self.call.asynchronous and not (self.row is not None and self.row.one_sided)

    @property
    def marks(self) -> tuple[tuple[int, int], ...]:
        """The storages that nobody may hold any more, each with the uses that are the session's."""
        return tuple(dict.fromkeys((lent.storage, lent.uses) for _, _, lent in self.claims))

    def ahead(self, operation: str, steps: Sequence[Step]) -> None:
        """Do something right before an operation of this call, or else before all of it."""
        tape = self.tape
        for section in () if tape is None else (tape.begin, tape.late, tape.away):
            if operation in section:
                section[operation][:0] = steps
                return
        self.before += steps

    def behind_launch(self) -> list[str]:
        """The copies that are made before the call returns."""
        tape = None if self.pends else self.tape
        return [] if tape is None else [name for name in tape.late if name]

    def overdue(self) -> tuple[str, str] | None:
        """A buffer that is about to be written, and one on its bytes that is still held."""
        for buffer, other, lent in self.claims:
            if lent.held:
                gc.collect()  # it may only hang in a cycle
                deadline = time.monotonic() + _PATIENCE
                while lent.held:
                    if time.monotonic() >= deadline:
                        return buffer, other
                    time.sleep(_POLL)
        return None

    def differs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """What the call was expected to be and is, if not the same."""
        want, have = (self.call.args, self.call.kwargs), (signature(args), signature(kwargs))
        if want == have:
            return None
        return (want, have) if want[1] or have[1] else (want[0], have[0])

    def frame(self, values: Sequence[Any], behind: Any = None) -> list[Any]:
        """What its steps work on. See [Note: frames] in `symmplan.integrate.eager.tape`.

        Args:
            values: All arguments of the op, in the order of its schema.
            behind: The dispatch keys behind the session's.
        """
        assert self.tape is not None
        frame = list(values)
        for i in self.lists:
            frame += values[i] or ()
        frame.append(behind)
        frame += self.tape.rest
        return frame
