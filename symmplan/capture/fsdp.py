"""What FSDP2 did in a step -> `Problem`: its all-gather outputs and reduce-scatter inputs.

FSDP2 asks for a buffer, fills it, runs the collective and drops the buffer later. Seen from the
host this is a list of three kinds of events, the same on all ranks, in the order in which they are
issued; that order is the problem's one stream.

[Note: issue order is enforced]
    On a device the streams of FSDP2 run apart, so issue order alone would order nothing. Whoever
    hands out the placements therefore makes each new user of some bytes wait for the event that
    was recorded when the old one was dropped, on whatever stream. With that, issue order *is* an
    order of the accesses of any two buffers that share bytes, and of no others.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from attrs import define, evolve, field, frozen

from symmplan.capture.fsdp_live import gathered_ahead, gathers_live
from symmplan.model import Access, Buffer, Operation, Problem, Requirement, Unplanned, WayName
from symmplan.registry import spec_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.model import OpSpec

__all__ = ["OPS", "Call", "GuestBytes", "Key", "Planned", "Recording", "Way", "problem_of"]

Kind = Literal["all_gather", "reduce_scatter"]
#: How many events came before, those of guests not counted, and how many runs of guests since then.
#: Guests run on the ranks that compiled them: what is without guests is the same on all ranks.
Moment: TypeAlias = tuple[int, int]

#: What of a collective may be symmetric.
_WHERE = {"all_gather": "output", "reduce_scatter": "input"}
#: The op of each kind of collective.
OPS = {
    "all_gather": "c10d::_allgather_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
}


def _declared(kind: Kind) -> tuple[OpSpec, Requirement] | None:
    """What is declared of a collective, and of its buffer; None if that need not be symmetric."""
    import torch

    spec = spec_for(getattr(torch.ops.c10d, OPS[kind].partition("::")[2]).default)
    if spec is None:
        return None
    return next(((spec, r) for r in spec.requirements if r.where == f"{_WHERE[kind]}_tensor"), None)


#: Alignment of slots in bytes: a copy's, on any device.
_SLOT_ALIGN = 512

_UNDECLARED = "it is not declared that its buffer must be symmetric"


@frozen(cache_hash=True)
class Key:
    """By what a collective is recognised in a later step; equal on all ranks."""

    site: str  # name of the FSDP module in the model
    kind: Kind  # ``"all_gather"`` or ``"reduce_scatter"``
    numel: int  # elements of the all-gather's output, or of the reduce-scatter's input
    dtype: str  # element type, as torch prints it
    backward: bool  # whether autograd was running

    @property
    def nbytes(self) -> int:
        """Size of its buffer in bytes."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return self.numel * dtype.itemsize

    @property
    def of_backward(self) -> bool:
        """Whether it belongs to a backward pass; FSDP2 may reduce after it."""
        return self.backward or self.kind == "reduce_scatter"


@frozen
class Call:
    """A collective.

    Attributes:
        key: See `Key`.
        nbytes: Size of its buffer in bytes.
        group: Name of the process group. Empty until it runs: FSDP2 also asks for buffers that it
            then uses without a collective.
    """

    key: Key
    nbytes: int
    group: str = ""


@frozen
class Way:
    """How a collective runs.

    Attributes:
        name: ``"ordinary"``: in ordinary memory. ``"symmetric"``: in its placement, through the
            program's own communicator. ``"copy engine"``: in its placement, without kernels; a
            reduce-scatter as an all-to-all into a second placement, which is summed locally.
            ``"push"``: a reduce-scatter whose inputs are copied into the peers' slots, of which
            each group has two.
        reason: Why it stays in ordinary memory.
    """

    name: WayName
    reason: str = ""


@frozen
class Planned:
    """A collective of a problem."""

    call: Call  # which
    buffer: str | None  # name of its buffer in the problem; None if it was left out
    #: Name of the buffer of an all-to-all's output; None if it needs none.
    received: str | None = None
    way: Way = Way("symmetric")  # how it runs
    direct: bool = False  # whether its buffer is the parameters themselves
    ahead: bool = False  # whether it is started before FSDP2 asks for it


@frozen
class GuestBytes:
    """What somebody else needs of the segments while it runs."""

    name: str  # of its segment
    nbytes: int  # size in bytes
    group: str  # the process group that meets there
    align: int  # what it must begin at a multiple of, in bytes
    user: str  # who it is, for people


@define(eq=False)
class Recording:
    """The events of a stretch of the program, in the order of issue.

    Attributes:
        collectives: Every buffer that FSDP2 asked for, in order.
        events: ``(what, index in collectives)`` with ``"begin"``, ``"run"``, ``"drop"``, or
            ``"use"`` and ``"release"``: in forward the module begins to use the parameters that
            this all-gather gathered, and is done with them; and ``("guest", number)``: a guest
            runs, see `symmplan.place.guests`.
        heard: Of collectives that are not FSDP2's how many of its had run before, and what they
            are; see `symmplan.place.listening`.
    """

    collectives: list[Call] = field(factory=list)
    events: list[tuple[str, int]] = field(factory=list)
    heard: list[tuple[int, Any]] = field(factory=list)
    _launched: int = 0

    def begin(self, key: Key, nbytes: int) -> int:
        """FSDP2 asks for a buffer of ``nbytes`` bytes; returns its index."""
        index = len(self.collectives)
        self.collectives.append(Call(key, nbytes))
        self.events.append(("begin", index))
        return index

    def run(self, index: int, group: str) -> None:
        """The collective of buffer ``index`` runs over ``group``."""
        call = self.collectives[index]
        self.collectives[index] = Call(call.key, call.nbytes, group)
        self.events.append(("run", index))
        self._launched += 1

    def hear(self, other: Any) -> None:
        """Somebody else's collective is called. May be called from any thread."""
        self.heard.append((self._launched, other))

    def withdraw(self, index: int) -> None:
        """The collective of buffer ``index`` was none of the program's."""
        call = self.collectives[index]
        self.collectives[index] = Call(call.key, call.nbytes)

    def drop(self, index: int) -> None:
        """Nobody holds buffer ``index`` any more. May be called from any thread."""
        self.events.append(("drop", index))

    def use(self, index: int) -> None:
        """A module begins to use the parameters that all-gather ``index`` gathered."""
        self.events.append(("use", index))

    def release(self, index: int) -> None:
        """The parameters that all-gather ``index`` gathered are resharded."""
        self.events.append(("release", index))

    def guest(self, number: int) -> None:
        """A guest runs. Once between two other events is enough, however long FSDP2 rests."""
        behind = (i for i, e in enumerate(reversed(self.events)) if e[0] != "guest")
        last = next(behind, len(self.events))
        if ("guest", number) not in self.events[len(self.events) - last :]:
            self.events.append(("guest", number))

    @property
    def ran(self) -> tuple[int, ...]:
        """The indices of the collectives that ran."""
        return tuple(i for i, c in enumerate(self.collectives) if c.group)

    def drops(self) -> list[Moment | None]:
        """When each buffer was dropped; None if it lives."""
        result: list[Moment | None] = [None] * len(self.collectives)
        before = guests = 0
        for what, index in tuple(self.events):  # other threads may append
            if what == "drop":
                result[index] = before, guests
            elif what == "guest":
                guests += 1
            else:
                before, guests = before + 1, 0
        return result

    def with_drops(self, drops: Sequence[Moment | None]) -> Recording:
        """The same with other drops, those of one moment in the order of their buffers.

        One behind more guests than there are comes behind the last.
        """
        due = deque(sorted((moment, i) for i, moment in enumerate(drops) if moment is not None))
        others = [event for event in tuple(self.events) if event[0] != "drop"]
        events: list[tuple[str, int]] = []
        before = guests = 0
        for event in [*others, None]:
            guest = event is not None and event[0] == "guest"
            now = (before, guests if guest else math.inf)
            while due and due[0][0] <= now:
                events.append(("drop", due.popleft()[1]))
            events += [] if event is None else [event]
            before, guests = (before, guests + 1) if guest else (before + 1, 0)
        return Recording(self.collectives, events, self.heard)


def problem_of(
    recordings: Sequence[Recording],
    ranks: Mapping[str, tuple[int, ...]],
    way_of: Callable[[Call], Way] = lambda _: Way("symmetric"),
    direct: Mapping[str, int] | None = None,
    guests: Mapping[int, Sequence[GuestBytes]] | None = None,
    live: int | None = None,
) -> tuple[Problem, tuple[tuple[Planned, ...], ...]]:
    """Turn recordings, one after the other, into a problem.

    Args:
        recordings: Stretches of the program. A buffer that is live at the end of one may be live
            at any time of any of them, and shares its bytes with none.
        ranks: ``{name of the group: its global ranks}``. Groups whose ranks are among those of
            another one run the same plan and may share a segment.
        way_of: How a collective runs.
        direct: ``{site: bytes}`` of the modules whose all-gathers fill the parameters themselves:
            one address for all of a module's, in use until the parameters are released.
        guests: ``{number: what it needs while it runs}``. All groups of a problem with guests may
            share a segment.
        live: How many of those may be alive at once; see `symmplan.capture.fsdp_live`.

    Returns:
        The problem, and for each recording the collectives that ran, in order.
    """
    operations: list[Operation] = []
    accesses: list[Access] = []
    buffers: list[Buffer] = []
    unplanned: list[Unplanned] = []
    stretches: list[tuple[Planned, ...]] = []
    together: list[tuple[str, str]] = []
    first: dict[str, str] = {}
    hosted: dict[str, GuestBytes] = {}
    slots: dict[str, list[Buffer]] = {}
    pushed: dict[str, int] = {}
    declared = {kind: _declared(kind) for kind in get_args(Kind)}
    sizes = direct or {}
    for number, recording in enumerate(recordings):
        calls = {i: recording.collectives[i] for i in recording.ran}
        inside = {i for i, c in calls.items() if c.key.kind == "all_gather" and c.key.site in sizes}
        ahead = gathered_ahead(recording, inside)
        events = gathers_live(recording, inside, live)
        dropped = {index for what, index in events if what == "drop"}
        planned: dict[int, Planned] = {}
        for index, call in calls.items():
            name, site = _name(number, index, call.key), call.key.site
            facts = declared[call.key.kind]
            way = way_of(call) if facts is not None else Way("ordinary", _UNDECLARED)
            if facts is None or way.name == "ordinary":
                planned[index] = Planned(call, None, way=way)
                words = (OPS[call.key.kind], _WHERE[call.key.kind], way.reason)
                unplanned.append(Unplanned(name, *words, call.nbytes))
                continue
            if way.name == "push":
                turn = pushed[call.group] = pushed.get(call.group, -1) + 1
                mine = slots.setdefault(call.group, [])
                slot = _slot(mine, turn, list(slots).index(call.group), call)
                planned[index] = Planned(call, slot, way=way)
                continue
            made = _buffer(name, call, way, facts[1], persistent=index not in dropped)
            if index in inside:
                where = f"{_WHERE[call.key.kind]} ({way.name}, the parameters themselves)"
                made = evolve(made, nbytes=sizes[site], where=where)
                if first.setdefault(site, name) != name:
                    together.append((first[site], name))
            buffers.append(made)
            received = None
            if way.name == "copy engine" and call.key.kind == "reduce_scatter":
                received = f"{name}.received"
                buffers.append(_received(received, call, way))
            direct_ = index in inside
            planned[index] = Planned(call, name, received, way, direct_, index in ahead)
        begun = dict.fromkeys(i for what, i in events if what == "begin" and i in planned)
        stretches.append(tuple(planned[i] for i in begun))
        for at, (what, index) in enumerate(events):
            if what == "guest":
                for guest in (guests or {}).get(index, ()):
                    hosted.setdefault(guest.name, guest)
                    run = f"{number}.{at:04d}.{guest.name}.run"
                    operations.append(Operation(run, group=guest.group))
                    accesses.append(
                        Access(run, guest.name, write=True, remote=True, enters=True, releases=True)
                    )
                continue
            one = planned.get(index)
            if one is None or one.buffer is None:
                continue
            kind = one.call.key.kind
            facts = declared[kind]
            assert facts is not None
            spec, requirement = facts
            runs = what == "run"
            if one.way.name == "push":
                if runs:
                    operation = f"{_name(number, index, one.call.key)}.run"
                    operations.append(_launch(operation, one.call, spec))
                    accesses.append(
                        Access(operation, one.buffer, write=True, remote=True, releases=True)
                    )
                continue
            operation = f"{one.buffer}.{what}"
            operations.append(_launch(operation, one.call, spec) if runs else Operation(operation))
            reached = {
                "remote": runs,
                "enters": runs and requirement.enters,
                "releases": runs and requirement.releases,
            }
            write = what == "begin" or (runs and kind == "all_gather")
            accesses.append(Access(operation, one.buffer, write=write, **reached))
            if runs and one.received is not None:
                accesses.append(Access(operation, one.received, write=True, **reached))
    buffers += (
        Buffer(g.name, g.nbytes, g.group, align=g.align, op=g.user, where="carve-out")
        for g in hosted.values()
    )
    buffers += (slot for of in slots.values() for slot in of)
    groups = list(dict.fromkeys(b.group for b in buffers))
    problem = Problem(
        buffers=buffers,
        operations=operations,
        accesses=accesses,
        together=together,
        shared_groups=(tuple(groups),) if hosted else _shared(groups, ranks),
        unplanned=unplanned,
    )
    return problem, tuple(stretches)


def _name(number: int, index: int, key: Key) -> str:
    again = f"again{number}." if number else ""
    phase = "backward" if key.backward else "forward"
    return f"{again}{index:04d}.{phase}.{key.site}.{key.kind}"


def _launch(name: str, call: Call, spec: OpSpec) -> Operation:
    """A collective runs, in any way: each is the process group's, or keeps more apart."""
    return Operation(
        name,
        group=call.group,
        handshake=spec.handshake,
        release=spec.release,
        meets=spec.meets,
        op=OPS[call.key.kind],
    )


def _buffer(
    name: str, call: Call, way: Way, requirement: Requirement, *, persistent: bool
) -> Buffer:
    return Buffer(
        name,
        call.nbytes,
        call.group,
        align=requirement.align,
        signal_pad=requirement.signal_pad,
        persistent=persistent,
        op=OPS[call.key.kind],
        where=f"{_WHERE[call.key.kind]} ({way.name})",
        dtype=call.key.dtype,
        shape=(call.key.numel,),
    )


def _received(name: str, call: Call, way: Way) -> Buffer:
    """Where the parts of all ranks arrive that this one sums."""
    made = _buffer(name, call, way, Requirement("output"), persistent=False)
    return evolve(made, op="c10d::alltoall_base_", where=f"output ({way.name})")


def _slot(slots: list[Buffer], turn: int, number: int, call: Call) -> str:
    """The slot of a group's next push, made as large as it has to be."""
    if len(slots) <= turn % 2:
        slots.append(
            Buffer(
                f"slot{number}.{turn}",
                call.nbytes,
                call.group,
                align=_SLOT_ALIGN,
                persistent=True,
                op=OPS[call.key.kind],
                where="slot (push)",
            )
        )
    slot = slots[turn % 2]
    slots[turn % 2] = evolve(slot, nbytes=max(slot.nbytes, call.nbytes))
    return slot.name


def _shared(
    groups: Sequence[str], ranks: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[str, ...], ...]:
    """For each group that holds others: itself and them."""
    found = []
    taken: dict[str, None] = {}
    for leader in sorted(groups, key=lambda g: (-len(ranks[g]), groups.index(g))):
        members = set(ranks[leader])
        if leader in taken:
            continue
        inside = [g for g in groups if g not in taken and members.issuperset(ranks[g])]
        taken.update(dict.fromkeys(inside))
        if len(inside) > 1:
            found.append(tuple(inside))
    return tuple(found)
