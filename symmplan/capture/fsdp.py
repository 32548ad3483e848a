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

from typing import TYPE_CHECKING, get_args

from attrs import evolve, frozen

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
_UNDECLARED = "it is not declared that its buffer must be symmetric"
_NO_ROOM = Algorithm("ordinary", "outside of training passes there is room for one module more")


@frozen
class Planned:
    """A collective of a problem."""

    call: Call  # which
    buffer: str | None  # name of its buffer in the problem; None if it was left out
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
    operations: list[Operation] = []
    accesses: list[Access] = []
    buffers: list[Buffer] = []
    unplanned: list[Unplanned] = []
    stretches: list[tuple[Planned, ...]] = []
    together: list[tuple[str, str]] = []
    first: dict[str, str] = {}
    suballocated: dict[str, Buffer] = {}
    slots: dict[str, list[Buffer]] = {}
    pushed: dict[str, int] = {}
    declared = {kind: _declared(kind) for kind in get_args(Kind)}
    sizes = zero_copy or {}
    placed = {r.collectives[i].key.site for r in recordings for i in placeable(r, sizes)}
    for number, recording in enumerate(recordings):
        calls = {i: recording.collectives[i] for i in recording.ran}
        inside = placeable(recording, sizes)
        events = gathers_unsharded(recording, inside, live)
        dropped = {index for what, index in events if what == "drop"}
        planned: dict[int, Planned] = {}
        for index, call in calls.items():
            name, site = _name(number, index, call.key), call.key.site
            facts = declared[call.key.kind]
            algorithm = (
                algorithm_of(call) if facts is not None else Algorithm("ordinary", _UNDECLARED)
            )
            if index in recording.unplaced:
                if index in recording.carried or site in placed:
                    continue
                algorithm = _NO_ROOM
            if facts is None or algorithm.name == "ordinary":
                planned[index] = Planned(call, None, algorithm=algorithm, index=index)
                words = (OPS[call.key.kind], _WHERE[call.key.kind], algorithm.reason)
                left = Unplanned(
                    name, *words, call.nbytes, needed=not (facts is None or algorithm.fastest)
                )
                unplanned.append(left)
                continue
            if algorithm.name == "shared push":
                made = _buffer(name, call, algorithm, facts[1], persistent=False)
                where = f"slot ({algorithm.name})"
                buffers.append(
                    evolve(made, nbytes=call.pushed_bytes, align=_SLOT_ALIGN, where=where)
                )
                planned[index] = Planned(call, name, algorithm=algorithm)
                continue
            if algorithm.name == "push":
                turn = pushed[call.group] = pushed.get(call.group, -1) + 1
                mine = slots.setdefault(call.group, [])
                slot = _slot(mine, turn, list(slots).index(call.group), call)
                planned[index] = Planned(call, slot, algorithm=algorithm)
                continue
            made = _buffer(name, call, algorithm, facts[1], persistent=index not in dropped)
            if index in inside:
                where = f"{_WHERE[call.key.kind]} ({algorithm.name}, the parameters themselves)"
                made = evolve(made, nbytes=sizes[site], where=where)
                if first.setdefault(site, name) != name:
                    together.append((first[site], name))
            buffers.append(made)
            zero_copy_ = index in inside
            carried = index in recording.carried
            planned[index] = Planned(call, name, algorithm, zero_copy_, carried, index)
        begun = dict.fromkeys(i for what, i in events if what == "begin" and i in planned)
        stretches.append(tuple(planned[i] for i in begun))
        for at, (what, index) in enumerate(events):
            if what == "tenant":
                for tenant in (tenants or {}).get(index, ()):
                    suballocated.setdefault(tenant.name, tenant)
                    run = f"{number}.{at:04d}.{tenant.name}.run"
                    operations.append(Operation(run, group=tenant.group))
                    accesses.append(
                        Access(
                            run, tenant.name, write=True, remote=True, enters=True, releases=True
                        )
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
            if one.algorithm.name == "shared push":
                if what != "drop":
                    met = evolve(_launch(f"{one.buffer}.{what}", one.call, spec), handshake=True)
                    operations.append(met)
                    # Peers write behind the first meeting, until the second.
                    accesses.append(
                        Access(
                            met.name, one.buffer, write=not runs, remote=not runs, enters=not runs
                        )
                    )
                continue
            if one.algorithm.name == "push":
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
    buffers += suballocated.values()
    buffers += (slot for of in slots.values() for slot in of)
    groups = list(dict.fromkeys(b.group for b in buffers))
    problem = Problem(
        buffers=buffers,
        operations=operations,
        accesses=accesses,
        together=together,
        shared_groups=(tuple(groups),) if suballocated else _shared(groups, ranks),
        unplanned=unplanned,
    )
    return problem, tuple(stretches)


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
