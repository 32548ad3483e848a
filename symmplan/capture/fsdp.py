"""What FSDP2 did in a step -> `Problem`: its all-gather outputs and reduce-scatter inputs.

FSDP2 asks for a buffer, fills it, runs the collective and drops the buffer later. Seen from the
host this is a list of three kinds of events, the same on all ranks, in the order in which they are
issued; that order is the problem's one stream.

[Note: issue order is enforced]
    On a device FSDP2 uses several streams, so issue order alone would order nothing. So the code
    that hands out placements makes each new user of some bytes wait for the event that was recorded
    when the previous user's buffer was dropped, on any stream. Issue order then *is* an order of
    the accesses of two buffers that share bytes. It orders no other accesses.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, get_args

from attrs import define, evolve, field, frozen

from symmplan.capture.fsdp_recording import Key, Kind
from symmplan.capture.fsdp_unsharded import gathers_unsharded, placeable
from symmplan.model import Access, Algorithm, Buffer, Operation, Problem, Requirement, Unplanned
from symmplan.registry import spec_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from symmplan.capture.fsdp_recording import Call, Recording
    from symmplan.model import OpSpec

#: What of a collective may be symmetric.
_WHERE = {"all_gather": "output", "reduce_scatter": "input"}
#: Of a module, what that is.
_TENSORS = {"all_gather": "parameters", "reduce_scatter": "gradients"}
#: The op of each kind of collective.
OPS = {
    "all_gather": "c10d::_allgather_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
}


def _declared(kind: Kind) -> tuple[OpSpec, Requirement] | None:
    """The declaration of a collective and its buffer; None if that need not be symmetric."""
    import torch

    spec = spec_for(getattr(torch.ops.c10d, OPS[kind].partition("::")[2]).default)
    if spec is None:
        return None
    return next(((spec, r) for r in spec.requirements if r.where == f"{_WHERE[kind]}_tensor"), None)


#: Alignment of slots in bytes: a copy's, on any device.
_SLOT_ALIGN = 512

_SYMMETRIC = Algorithm("symmetric")
_NOT_DECLARED = Algorithm("ordinary", "it is not declared that its buffer must be symmetric")
_NO_ROOM = Algorithm("ordinary", "outside of training passes there is room for one module more")


@frozen
class Planned:
    """A collective of a problem."""

    call: Call  # which
    buffer: str | None = None  # name of its buffer in the problem; None if it was left out
    algorithm: Algorithm = _SYMMETRIC  # how it runs
    zero_copy: bool = False  # whether its buffer is the parameters themselves
    carried: bool = False  # whether it ran before the stretch began
    index: int = 0  # which of its recording


def problem_of(
    recordings: Sequence[Recording],
    ranks: Mapping[str, tuple[int, ...]],
    algorithm_of: Callable[[Call], Algorithm] = lambda _: Algorithm("symmetric"),
    zero_copy: Mapping[str, int] | None = None,
    tenants: Mapping[int, Sequence[Buffer]] | None = None,
    live: int | None = None,
) -> tuple[Problem, tuple[tuple[Planned, ...], ...]]:
    """Turn recordings, one after the other, into a problem.

    Args:
        recordings: Stretches of the program. A buffer that is live at the end of one may be live
            at any time of any of them, and shares its bytes with none.
        ranks: ``{name of the group: its global ranks}``. Groups whose ranks are among those of
            another one run the same plan and may share a segment.
        algorithm_of: How a collective runs.
        zero_copy: ``{site: bytes}`` of the modules whose all-gathers fill the parameters
            themselves: one address for all of a module's, in use until the parameters are released.
        tenants: ``{number: its bytes}``, in use while it runs. All groups of a problem with tenants
            may share a segment.
        live: How many of those may be alive together; see `symmplan.capture.fsdp_unsharded`.

    Returns:
        The problem, and for each recording the collectives that ran, in order.
    """
    sizes = zero_copy or {}
    made = _Steps(sizes)
    stretches: list[tuple[Planned, ...]] = []
    placed = {r.collectives[i].key.site for r in recordings for i in placeable(r, sizes)}
    for number, recording in enumerate(recordings):
        inside = placeable(recording, sizes)
        events = gathers_unsharded(recording, inside, live)
        dropped = {index for what, index in events if what == "drop"}
        planned: dict[int, Planned] = {}
        for index in recording.ran:
            call = recording.collectives[index]
            algorithm = algorithm_of(call) if made.declares(call) else _NOT_DECLARED
            if index in recording.unplaced:
                if index in recording.carried or call.key.site in placed:
                    continue
                algorithm = _NO_ROOM
            one = Planned(
                call,
                algorithm=algorithm,
                zero_copy=algorithm.name != "ordinary" and index in inside,
                carried=index in recording.carried,
                index=index,
            )
            name = _name(number, index, call.key)
            planned[index] = evolve(one, buffer=made.buffer(name, one, lasts=index not in dropped))
        begun = dict.fromkeys(i for what, i in events if what == "begin" and i in planned)
        stretches.append(tuple(planned[i] for i in begun))
        for at, (what, index) in enumerate(events):
            if what == "tenant":
                made.tenant_runs(f"{number}.{at:04d}", (tenants or {}).get(index, ()))
            elif index in planned and planned[index].buffer is not None:
                made.event(what, planned[index], _name(number, index, planned[index].call.key))
    return made.problem(ranks), tuple(stretches)


@define
class _Steps:
    """The problem of recorded steps, while it is made.

    Args:
        sizes: As ``zero_copy`` of `problem_of`.
    """

    _sizes: Mapping[str, int]
    _operations: list[Operation] = field(init=False, factory=list)
    _accesses: list[Access] = field(init=False, factory=list)
    _buffers: list[Buffer] = field(init=False, factory=list)
    _unplanned: list[Unplanned] = field(init=False, factory=list)
    #: The first buffer of each module's parameters, and buffers that must have one address.
    _first: dict[str, str] = field(init=False, factory=dict)
    _together: list[tuple[str, str]] = field(init=False, factory=list)
    _suballocated: dict[str, Buffer] = field(init=False, factory=dict)
    #: By group its slots, and how many pushes it had.
    _slots: dict[str, list[Buffer]] = field(init=False, factory=dict)
    _pushed: Counter[str] = field(init=False, factory=Counter)
    _declared: dict[Kind, tuple[OpSpec, Requirement] | None] = field(
        init=False, factory=lambda: {kind: _declared(kind) for kind in get_args(Kind)}
    )

    def declares(self, call: Call) -> bool:
        """Whether a collective's buffer must be symmetric, by its declaration."""
        return self._declared[call.key.kind] is not None

    def _facts(self, call: Call) -> tuple[OpSpec, Requirement]:
        facts = self._declared[call.key.kind]
        assert facts is not None
        return facts

    def buffer(self, name: str, one: Planned, *, lasts: bool) -> str | None:
        """Add a collective's buffer.

        Args:
            name: Of the collective.
            one: The collective.
            lasts: Whether nobody was seen to drop the buffer.

        Returns:
            Its name; None if the collective stays in ordinary memory.
        """
        call, algorithm = one.call, one.algorithm
        op, where = OPS[call.key.kind], _WHERE[call.key.kind]
        if algorithm.name == "ordinary":
            needed = self.declares(call) and not algorithm.fastest
            self._unplanned.append(
                Unplanned(name, op, where, algorithm.reason, call.nbytes, needed=needed)
            )
            return None
        if algorithm.name == "push":
            turn, mine = self._pushed[call.group], self._slots.setdefault(call.group, [])
            self._pushed[call.group] += 1
            return _slot(mine, turn, list(self._slots).index(call.group), call)
        made = _buffer(name, call, algorithm, self._facts(call)[1], persistent=lasts)
        if algorithm.name == "shared push":
            where = f"slot ({algorithm.name})"
            made = evolve(
                made, nbytes=call.pushed_bytes, align=_SLOT_ALIGN, where=where, persistent=False
            )
        elif one.zero_copy:
            site, where = call.key.site, f"{where} ({algorithm.name}, the parameters themselves)"
            made = evolve(made, nbytes=self._sizes[site], where=where)
            if self._first.setdefault(site, name) != name:
                self._together.append((self._first[site], name))
        self._buffers.append(made)
        return name

    def event(self, what: str, one: Planned, name: str) -> None:
        """A buffer is begun, its collective runs, or the buffer is dropped.

        Args:
            what: Which of these.
            one: The collective; its buffer is placed.
            name: Of the collective.
        """
        assert one.buffer is not None
        spec, requirement = self._facts(one.call)
        runs, buffer, how = what == "run", one.buffer, one.algorithm.name
        operation = _launch(f"{name}.{what}", one.call, spec)
        if how == "push":
            if runs:
                access = Access(operation.name, buffer, write=True, remote=True, releases=True)
                self._add(operation, access)
        elif how == "shared push":
            if what != "drop":
                # Peers write behind the first meeting, until the second.
                peers = {"write": not runs, "remote": not runs, "enters": not runs}
                self._add(
                    evolve(operation, handshake=True), Access(operation.name, buffer, **peers)
                )
        else:
            if not runs:
                operation = Operation(operation.name)
            self._add(
                operation,
                Access(
                    operation.name,
                    buffer,
                    write=what == "begin" or (runs and one.call.key.kind == "all_gather"),
                    remote=runs,
                    enters=runs and requirement.enters,
                    releases=runs and requirement.releases,
                ),
            )

    def tenant_runs(self, name: str, suballocations: Sequence[Buffer]) -> None:
        """A tenant runs in its bytes, with its peers'."""
        reached = {"write": True, "remote": True, "enters": True, "releases": True}
        for bytes_ in suballocations:
            self._suballocated.setdefault(bytes_.name, bytes_)
            run = f"{name}.{bytes_.name}.run"
            self._add(Operation(run, group=bytes_.group), Access(run, bytes_.name, **reached))

    def _add(self, operation: Operation, access: Access) -> None:
        self._operations.append(operation)
        self._accesses.append(access)

    def problem(self, ranks: Mapping[str, tuple[int, ...]]) -> Problem:
        """All of it; ``ranks`` as for `problem_of`."""
        slots = [slot for of in self._slots.values() for slot in of]
        buffers = [*self._buffers, *self._suballocated.values(), *slots]
        groups = list(dict.fromkeys(b.group for b in buffers))
        return Problem(
            buffers=buffers,
            operations=self._operations,
            accesses=self._accesses,
            together=self._together,
            shared_groups=(tuple(groups),) if self._suballocated else _shared(groups, ranks),
            unplanned=self._unplanned,
        )


def _name(number: int, index: int, key: Key) -> str:
    again = f"again{number}." if number else ""
    phase = "backward" if key.backward else "forward"
    return f"{again}{index:04d}.{phase}.{key.site}.{key.kind}"


def _launch(name: str, call: Call, spec: OpSpec) -> Operation:
    """A collective runs, by any algorithm: each is the process group's, or keeps more apart."""
    return Operation(
        name,
        group=call.group,
        handshake=spec.handshake,
        release=spec.release,
        synchronizes=spec.synchronizes,
        op=OPS[call.key.kind],
    )


def _buffer(
    name: str, call: Call, algorithm: Algorithm, requirement: Requirement, *, persistent: bool
) -> Buffer:
    return Buffer(
        name,
        call.nbytes,
        call.group,
        align=requirement.align,
        signal_pad=requirement.signal_pad,
        persistent=persistent,
        op=OPS[call.key.kind],
        where=f"{_WHERE[call.key.kind]} ({algorithm.name})",
        dtype=call.key.dtype,
        shape=(call.key.numel,),
        label=f"{call.key.site} {_TENSORS[call.key.kind]}",
    )


def _slot(slots: list[Buffer], turn: int, number: int, call: Call) -> str:
    """The slot of a group's next push, made as large as it has to be."""
    if len(slots) <= turn % 2:
        slots.append(
            Buffer(
                f"slot{number}.{turn}",
                call.pushed_bytes,
                call.group,
                align=_SLOT_ALIGN,
                persistent=True,
                op=OPS[call.key.kind],
                where="slot (push)",
            )
        )
    slot = slots[turn % 2]
    slots[turn % 2] = evolve(slot, nbytes=max(slot.nbytes, call.pushed_bytes))
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
