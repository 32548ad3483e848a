"""Records FSDP2's collectives, and how long their buffers live."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from attrs import define, evolve, field, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

Kind = Literal["all_gather", "reduce_scatter"]
#: How many events came before, those of tenants not counted, and how many of those since then.
#: Tenants run on the ranks that compiled them: what is without tenants is the same on all ranks.
Moment: TypeAlias = tuple[int, int]


@frozen(cache_hash=True)
class Key:
    """By what a collective is recognised in a later step; equal on all ranks."""

    site: str  # name of the FSDP module in the model
    kind: Kind  # ``"all_gather"`` or ``"reduce_scatter"``
    numel: int  # elements of the all-gather's output, or of the reduce-scatter's input
    dtype: str  # element type, by its name in torch: ``"float32"``
    backward: bool  # whether autograd was running
    #: Whether it belongs to a backward pass; FSDP2 may reduce after it.
    of_backward: bool = field(init=False, eq=False, repr=False)
    #: Size of its buffer in bytes.
    nbytes: int = field(init=False, eq=False, repr=False)

    @of_backward.default
    def _of_backward(self) -> bool:
        return self.backward or self.kind == "reduce_scatter"

    @nbytes.default
    def _nbytes(self) -> int:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.numel * dtype.itemsize


@frozen
class Call:
    """A collective.

    Attributes:
        key: See `Key`.
        nbytes: Size of its buffer in bytes.
        group: Name of the process group. Empty until it runs: FSDP2 also asks for buffers that it
            then uses without a collective.
        sent: Of a reduce-scatter the element type in which gradients travel that are pushed, as
            autograd made them if that is no wider; empty if nobody saw them.
    """

    key: Key
    nbytes: int
    group: str = ""
    sent: str = ""

    @property
    def pushed_bytes(self) -> int:
        """Size in bytes of what all ranks push to one rank."""
        return evolve(self.key, dtype=self.sent or self.key.dtype).nbytes


class Look(NamedTuple):
    """The bytes of tensors at a moment."""

    events: int  # how many had come
    allocated: int  # bytes
    most: int  # bytes that they had since the look before, as far as is known
    own: bool  # whether FSDP2 alone has allocated since then, what the recording knows
    allocations: int = 0  # how many blocks torch's allocator had allocated


@define(eq=False)
class Recording:
    """The events of a stretch of the program, in the order of issue.

    Attributes:
        collectives: Every buffer that FSDP2 asked for, in order.
        events: ``(what, index in collectives)`` with ``"begin"``, ``"run"``, ``"drop"``, or
            ``"release"``: the module is done with the parameters that this all-gather gathered;
            and ``("tenant", number)``: a tenant runs, see `symmplan.runtime.tenants`.
        after_forward: The all-gathers whose modules FSDP2 released because forward was done.
        carried: Those that ran before the stretch, and whose modules were not released since.
        outside: The all-gathers of no training pass: in an evaluation, or by hand.
        unplaced: Those of them that the plan has no room for.
        moments: When somebody looked at the device's memory.
        filled: By an all-gather's index how many events came before FSDP2 had unsharded parameters
            of that in tensors of their own.
    """

    collectives: list[Call] = field(factory=list)
    events: list[tuple[str, int]] = field(factory=list)
    after_forward: set[int] = field(factory=set)
    carried: set[int] = field(factory=set)
    outside: set[int] = field(factory=set)
    unplaced: frozenset[int] = frozenset()
    moments: list[Look] = field(factory=list)
    filled: dict[int, int] = field(factory=dict)

    def begin(self, key: Key, nbytes: int, *, outside: bool = False) -> int:
        """FSDP2 asks for a buffer of ``nbytes`` bytes; returns its index."""
        index = len(self.collectives)
        if outside:
            self.outside.add(index)
        self.collectives.append(Call(key, nbytes))
        self.events.append(("begin", index))
        return index

    def run(self, index: int, group: str) -> None:
        """The collective of buffer ``index`` runs over ``group``."""
        call = self.collectives[index]
        self.collectives[index] = Call(call.key, call.nbytes, group, call.sent)
        self.events.append(("run", index))

    def send(self, index: int, dtype: str) -> None:
        """The gradients of reduce-scatter ``index`` are there, and travel as ``dtype``."""
        call = self.collectives[index]
        self.collectives[index] = Call(call.key, call.nbytes, call.group, dtype)

    def drop(self, index: int) -> None:
        """Note that buffer ``index`` was dropped. May be called from any thread."""
        self.events.append(("drop", index))

    def release(self, index: int, *, after_forward: bool = False) -> None:
        """The parameters that all-gather ``index`` gathered are resharded."""
        self.events.append(("release", index))
        if after_forward:
            self.after_forward.add(index)

    def carry(self, key: Key, group: str, *, outside: bool) -> int:
        """A module's parameters are there when the stretch begins; returns the gather's index."""
        index = self.begin(key, key.nbytes, outside=outside)
        self.run(index, group)
        self.carried.add(index)
        return index

    def tenant(self, number: int) -> None:
        """A tenant runs. Once between two other events is enough, however long FSDP2 rests."""
        behind = (i for i, e in enumerate(reversed(self.events)) if e[0] != "tenant")
        last = next(behind, len(self.events))
        if ("tenant", number) not in self.events[len(self.events) - last :]:
            self.events.append(("tenant", number))

    @property
    def ran(self) -> tuple[int, ...]:
        """The indices of the collectives that ran."""
        return tuple(i for i, c in enumerate(self.collectives) if c.group)

    def drops(self) -> list[Moment | None]:
        """When each buffer was dropped; None if it lives."""
        result: list[Moment | None] = [None] * len(self.collectives)
        before = tenants = 0
        for what, index in tuple(self.events):  # other threads may append
            if what == "drop":
                result[index] = before, tenants
            elif what == "tenant":
                tenants += 1
            else:
                before, tenants = before + 1, 0
        return result

    def with_drops(self, drops: Sequence[Moment | None]) -> Recording:
        """This recording with other drops, those of one moment in the order of their buffers.

        One behind more tenants than there are comes behind the last.
        """
        due = deque(sorted((moment, i) for i, moment in enumerate(drops) if moment is not None))
        others = [event for event in tuple(self.events) if event[0] != "drop"]
        events: list[tuple[str, int]] = []
        before = tenants = 0
        for event in [*others, None]:
            tenant = event is not None and event[0] == "tenant"
            now = (before, tenants if tenant else math.inf)
            while due and due[0][0] <= now:
                events.append(("drop", due.popleft()[1]))
            events += [] if event is None else [event]
            before, tenants = (before, tenants + 1) if tenant else (before + 1, 0)
        return evolve(self, events=events)


def with_widest(recordings: Sequence[Recording]) -> list[Recording]:
    """The recordings, in each of which a reduce-scatter's gradients are as wide as in any."""
    widest: dict[Key, Call] = {}
    for call in (c for recording in recordings for c in recording.collectives):
        known = widest.setdefault(call.key, call)
        if call.pushed_bytes > known.pushed_bytes:
            widest[call.key] = call
    return [
        evolve(r, collectives=[evolve(c, sent=widest[c.key].sent) for c in r.collectives])
        for r in recordings
    ]
