"""The calls that a frozen session expects.

[Note: when bytes may be overwritten]
    Every placement that the program gets is leased as a storage of its own on the segment's bytes.
    Before an event writes a placement, the session checks that no tensor of the program still holds
    any of its bytes. So a tensor that is held longer than planned is found before a byte of it
    changes. The check costs a few look-ups of reference counts.

[Note: other sizes]
    Whether an all-to-all sends as many rows as planned, only its rank knows. In shared memory ranks
    tell each other, when they meet in the call: if one has other sizes, all of them make the call
    that the program made. In memory that NCCL does not know, no two ranks need to make it alike:
    the process group moves the same rows, whether they lie in placements or not. In NCCL's memory
    all ranks keep to the plan; see [Note: both ends] in `symmplan.place.algorithms`.
"""

from __future__ import annotations

import functools
import gc
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import define, field

from symmplan.capture.c10d import is_all_to_all
from symmplan.capture.signatures import signature
from symmplan.errors import RunError
from symmplan.memory import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from symmplan.capture.c10d import Functional
    from symmplan.capture.recorded import Recorded
    from symmplan.capture.sites import Site
    from symmplan.place.expected import Expected
    from symmplan.place.program import PlacedCall
    from symmplan.runtime.leases import Ledger, StorageLease

#: A barrier, or the overwriting of a dead placement.
Act: TypeAlias = "Callable[[], None]"

#: Why a planned all-to-all ran in torch's own way.
OTHER_SIZES = "its parts had other sizes than planned on some rank"

#: Seconds that threads of the process group have to let go of what a finished work held.
_PATIENCE = 0.25
_POLL = 0.01


@define(eq=False)
class Event:
    """A call that the schedule expects.

    Attributes:
        call: The recorded call.
        device: Where its tensors lie.
        elements: An element of each type there, which stands for tensors while calls are checked.
        overload: The op that stands for it in the graph; None for memory.
        shapes: ``{path: stand-in}`` of the op's results.
        placed: The call in the plan; None if none of its tensors is in a placement.
        before: Work before the call.
        due: ``{operation of the problem: work right before it}``, for the operations of this call.
        after: Barriers of later ops that are not declared.
        run: Makes the planned call, given args, kwargs and the dispatch keys after ours, and
            returns the op's result. None before the first call; see `settle`.
        writes: Names of the buffers that it writes first.
        claims: For each, its bytes in a ledger, and the lease of the tensor that the program gets.
        views: ``{(buffer, whether as a staged argument): placement}``.
        bound: ``{argument: placement}`` of those that must lie there already.
        leased: ``{path: StorageLease}`` of those results that stay there.
        leaving: ``{path: StorageLease}`` of pending results that are copied out at their wait.
        moving: ``{argument: StorageLease}`` of tensors of the program that move there; see
            [Note: tensors that move] in `symmplan.integrate.eager.moving`.
        shared: Those of the last call that are to be copied back, each with its own storage.
        work: The Python half of the last work that C++ got, if it is symmplan's.
        copies: How often bytes are copied into and out of placements.
        declined: Whether the last call, an all-to-all, had other sizes than planned on some rank.
        declines: How often that was so.
        other_sizes: What ends the planned call then; the program never sees it.
    """

    call: Recorded
    device: torch.device
    elements: Mapping[torch.dtype, torch.Tensor]
    overload: Any
    shapes: dict[tuple[int, ...], Any]
    placed: PlacedCall | None
    before: list[Act] = field(factory=list)
    due: dict[str, list[Act]] = field(factory=dict)
    after: list[Act] = field(factory=list)
    run: Callable[[Any, Any, Any], Any] | None = None
    writes: list[str] = field(factory=list)
    claims: list[tuple[Ledger, int, int, StorageLease | None]] = field(factory=list)
    views: dict[tuple[str, bool], torch.Tensor] = field(factory=dict)
    bound: dict[Site, torch.Tensor] = field(factory=dict)
    leased: dict[tuple[int, ...], StorageLease] = field(factory=dict)
    leaving: dict[tuple[int, ...], StorageLease] = field(factory=dict)
    moving: dict[Site, StorageLease] = field(factory=dict)
    shared: list[tuple[torch.Tensor, torch.Tensor]] = field(factory=list)
    work: Any = None
    copies: int = 0
    declined: bool = False
    declines: int = 0
    other_sizes: RunError = field(factory=lambda: RunError(OTHER_SIZES))

    @property
    def name(self) -> str:
        """For people."""
        return name_of(self.call.op, self.call.kind)

    @property
    def form(self) -> Functional | None:
        """Of a ``c10d::`` call, what it is in the words of a functional collective."""
        return None if self.overload is self.call.op else self.call.form

    @property
    def pends(self) -> bool:
        """Whether the program gets a work to wait for; of ``c10d::`` calls."""
        row = None if self.placed is None else self.placed.row
        asynchronous = self.form is not None and self.form.asynchronous
        return asynchronous and (row is None or not row.synchronous)

    @property
    def may_decline(self) -> bool:
        """Whether its sizes may be others in some call, on some rank."""
        if self.placed is None or self.call.op is None or not is_all_to_all(self.call.op):
            return False
        expected = self.placed.expected
        return expected is not None and not BACKENDS[expected.memory].engines

    @property
    def expected(self) -> Expected | None:
        """How it is to run, for a check; None if it is no collective in a placement."""
        return None if self.placed is None else self.placed.expected

    def copies_behind(self) -> list[str]:
        """The operations that copy behind its launch, before the call returns."""
        placed = self.placed
        if placed is None or self.pends:
            return []
        back = [placed.copy("copy back", s) for s in placed.staged if s.writes]
        out = [s for s in placed.sites if s.leaves and s.path not in self.leaving]
        return [*back, *(placed.copy("copy out", s) for s in out)]

    def copied_at_waits(self) -> list[tuple[int, str]]:
        """The storages of what is copied out when it is waited for, and the operations."""
        if self.placed is None:
            return []
        copies = {s.path: self.placed.copy("copy out", s) for s in self.placed.sites if s.leaves}
        return [(leased.storage, copies.get(path, "")) for path, leased in self.leaving.items()]

    def ahead(self, operation: str, acts: Sequence[Act]) -> None:
        """Do something right before an operation of this call."""
        acts_there = self.before if self.placed is None else self.due.setdefault(operation, [])
        acts_there[:0] = acts

    def overdue(self) -> tuple[str, str] | None:
        """A buffer that is about to be written, and one on its bytes that is still held.

        If there is none, the event has the bytes from now on.
        """
        for buffer, (ledger, begin, end, lease) in zip(self.writes, self.claims, strict=True):
            if ledger.claim(begin, end, lease):
                held = let_go(functools.partial(ledger.claim, begin, end, lease))
                if held:
                    return buffer, held[0].name
        return None

    def held(self) -> list[StorageLease]:
        """The results in placements that the program still holds."""
        return [lease for lease in self.leases if lease.held]

    @property
    def leases(self) -> tuple[StorageLease, ...]:
        """What the program may hold of placements."""
        return (*self.leased.values(), *self.leaving.values(), *self.moving.values())

    def forget(self) -> None:
        """Hold no memory any more: what makes the call refers to the call."""
        self.run = None
        for held in (self.before, self.after, self.due, self.claims, self.views, self.bound):
            held.clear()
        self.leased, self.leaving, self.moving = {}, {}, {}

    def differs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The expected and the actual call, if they differ.

        How many rows an all-to-all sends to whom may differ. See [Note: other sizes].
        """
        if self.placed is None and self.call.op is not None and is_all_to_all(self.call.op):
            return None
        want = self.call.args, self.call.kwargs
        have = signature(args), signature(kwargs) if kwargs else kwargs
        self.declined = want != have and self.may_decline
        if want == have or self.declined:
            return None
        return (want, have) if want[1] or have[1] else (want[0], have[0])


def let_go(held: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """What is held for good: not in a cycle, nor by a thread that is about to let go of it."""
    gc.collect()
    deadline = time.monotonic() + _PATIENCE
    while (still := held()) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return still


def perform(acts: Sequence[Act]) -> None:
    """Barriers, overwriting of dead placements."""
    for act in acts:
        act()


def name_of(op: Any, kind: str) -> str:
    """Name of a call, for people."""
    return f"symmplan.{kind}" if op is None else str(op.name())


def counted(events: Sequence[Event]) -> Counter[str]:
    """The counts that the calls of ``events`` add to `Stats`."""
    return Counter(
        served=sum(e.placed is not None and not e.declined for e in events),
        plain=sum(e.call.kind == "op" and (e.placed is None or e.declined) for e in events),
        copies=sum(e.copies for e in events if not e.declined),
    )
