"""Tiny programs for the explorer: random ones, known ones, and what the planner is told of them.

The explorer knows what calls do; here is what the planner is told they do, and nothing of the one
is made from the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from explorer import TinyBuffer, TinyCall, TinyPlan, TinyProgram
from hypothesis import strategies as st

from symmplan.model import Access, Buffer, Operation, Problem

if TYPE_CHECKING:
    import symmplan

#: Bytes of a cell: what every offset is a multiple of.
CELL = 256

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "broadcast", "all_to_all")

#: Which arguments of one-sided ops peers take part in.
REMOTE = {"push": (False, True), "read": (True, False), "read_write": (True, True)}


def problem_of(program: TinyProgram) -> Problem:
    """What the planner is told."""
    operations: list[Operation] = []
    accesses: list[Access] = []
    calls = {c.name: c for c in program.calls}
    for call in program.calls:
        if call.kind == "wait":
            operations.append(Operation(call.name, ends=(call.of,)))
            accesses += _accesses(calls[call.of], call.name)
        else:
            operations.append(_operation(call))
            accesses += _accesses(call, call.name)
    touched = {a.buffer for a in accesses}
    return Problem(
        buffers=[
            Buffer(b.name, CELL * b.cells, group=b.group)
            for b in program.buffers
            if b.name in touched
        ],
        operations=operations,
        accesses=accesses,
        shared_groups=[("all", *program.groups)] if program.groups else [],
    )


def _operation(call: TinyCall) -> Operation:
    if call.kind in ("local", "copy"):
        return Operation(call.name)
    met = call.kind in COLLECTIVES and call.kind != "broadcast" and not call.empty
    return Operation(
        call.name,
        group=call.group,
        handshake=call.handshake,
        release=call.release,
        synchronizes=met or call.handshake or call.release,
    )


def _accesses(call: TinyCall, name: str) -> list[Access]:
    collective = call.kind in COLLECTIVES
    remote = (True, True) if collective else REMOTE.get(call.kind, (False, False))
    found = {}
    for write, buffers in ((False, call.reads), (True, call.writes)):
        for buffer in buffers:
            door = collective and remote[write]
            found[buffer] = Access(
                name, buffer, write=write, remote=remote[write], enters=door, releases=door
            )
    return list(found.values())


def planned(program: TinyProgram, plan: symmplan.Plan) -> TinyPlan:
    """A plan as the explorer takes it."""
    cells = {
        name: tuple((p.segment, i) for i in range(p.offset // CELL, p.end // CELL))
        for name, p in plan.placements.items()
    }
    return TinyPlan(cells, tuple((b.before, b.group) for b in plan.barriers))


@attrs.define
class _Drawing:
    """A program while it is drawn."""

    draw: object
    ranks: int
    groups: dict
    buffers: list = attrs.field(factory=list)
    calls: list = attrs.field(factory=list)
    pending: dict = attrs.field(factory=dict)

    def size(self, group: str) -> int | None:
        """Ranks of each group of the name, if they are all of one size."""
        sizes = {len(g) for g in self.groups.get(group, (tuple(range(self.ranks)),))}
        return sizes.pop() if len(sizes) == 1 else None

    def pick(self, *, group: str | None = None, cells: int | None = None, write: bool = False):
        """A buffer that may be read or written now, or None."""
        held = {n for c in self.pending.values() for n in c.writes}
        if write:
            held |= {n for c in self.pending.values() for n in c.reads}
        found = [
            b
            for b in self.buffers
            if b.name not in held and group in (None, b.group) and cells in (None, b.cells)
        ]
        # Rather the latest: so the others die and leave their bytes.
        return self.draw(st.sampled_from(found[::-1][:3])) if found else None

    def target(self, group: str, cells: int, not_this=None):
        """A buffer to write: a new one, or one that is there."""
        old = self.pick(group=group, cells=cells, write=True)
        if old is not None and old != not_this and not self.draw(st.integers(0, 3)):
            return old
        new = TinyBuffer(f"b{len(self.buffers)}", cells, group)
        self.buffers.append(new)
        return new

    def call(self, kind: str, reads=(), writes=(), **facts) -> None:
        call = TinyCall(
            f"{kind}{len(self.calls)}",
            kind,
            tuple(b.name for b in reads),
            tuple(b.name for b in writes),
            **facts,
        )
        self.calls.append(call)
        if call.asynchronous:
            self.pending[call.name] = call

    def wait(self) -> None:
        name = self.draw(st.sampled_from(sorted(self.pending)))
        del self.pending[name]
        self.calls.append(TinyCall(f"wait_{name}", "wait", of=name))


@st.composite
def tiny_programs(
    draw,
    *,
    kinds: tuple[str, ...] = (),
    max_calls: int = 5,
    ranks: tuple[int, ...] = (2, 3, 3),
    groups: bool = True,
    iterations: int = 2,
) -> TinyProgram:
    """Programs that are right when every buffer has memory of its own and all meet at each call.

    Args:
        draw: Hypothesis's.
        kinds: Besides local ops; by default all.
        max_calls: Besides the local ops that begin and end it, and waits.
        ranks: How many there may be.
        groups: Whether there may be a second group.
        iterations: How often it runs.
    """
    count = draw(st.sampled_from(ranks))
    more = {}
    if groups and draw(st.booleans()):
        pair = [((0, 1), (2,)), ((0,), (1, 2)), ((0, 2), (1,))]
        more["some"] = draw(st.sampled_from(pair)) if count == 3 else ((0, 1),)
    at = _Drawing(draw, count, more)
    names = ["all", *more]
    for _ in range(draw(st.integers(1, 2))):
        at.call("local", (), [at.target(draw(st.sampled_from(names)), draw(st.integers(1, 2)))])
    choices = kinds or ("local", "copy", *REMOTE, *REMOTE, *COLLECTIVES)
    for _ in range(draw(st.integers(1, max_calls))):
        _draw_call(at, draw(st.sampled_from(choices)), draw(st.sampled_from(names)))
        if at.pending and draw(st.booleans()):
            at.wait()
    while at.pending:
        at.wait()
    last = at.pick()
    if last is not None:
        at.call("local", [last])
    return TinyProgram(count, tuple(at.buffers), tuple(at.calls), more, iterations)


def _draw_call(at: _Drawing, kind: str, group: str) -> None:
    draw = at.draw
    if kind in ("local", "copy"):
        source = at.pick()
        if source is None or (kind == "local" and not draw(st.integers(0, 2))):
            cells = draw(st.sampled_from([1, 2, at.size(group) or 1]))
            at.call("local", (), [at.target(group, cells)])
            return
        cells = source.cells if kind == "copy" else draw(st.integers(1, 2))
        other = source if kind == "copy" else None
        at.call(kind, [source], [at.target(group, cells, other)])
        return
    if kind in REMOTE:
        source = at.pick(group=group if REMOTE[kind][0] else None)
        if source is None:
            return
        cells = draw(st.sampled_from([1, 2, at.size(group) or 1]))
        facts = {"handshake": draw(st.booleans()), "release": draw(st.booleans())}
        at.call(kind, [source], [at.target(group, cells, source)], group=group, **facts)
        return
    _draw_collective(at, kind, group, shm=draw(st.booleans()))


def _draw_collective(at: _Drawing, kind: str, group: str, *, shm: bool) -> None:
    draw = at.draw
    size = at.size(group)
    facts: dict = {"group": group, "handshake": shm, "release": shm}
    if kind in ("all_reduce", "broadcast"):
        in_place = draw(st.booleans())
        source = at.pick(group=group, write=in_place)
        if source is None:
            return
        target = source if in_place else at.target(group, source.cells, source)
        facts["root"] = draw(st.integers(0, at.ranks - 1))
    elif size is None:
        return
    else:
        given, made = {"all_gather": (1, size), "all_to_all": (size, size)}.get(kind, (size, 1))
        source = at.pick(group=group, cells=given)
        if source is None:
            return
        target = at.target(group, made, source)
    transports = ["push", "pull"] if shm else ["wire", "wire", "push", "pull"]
    if kind == "all_reduce":
        transports += ["copy"] if shm else []
        transports = [t for t in transports if t != "pull" or source != target]
    elif kind == "reduce_scatter":
        transports = ["pull", "copy"] if shm else ["wire", "pull"]
    facts["transport"] = draw(st.sampled_from(transports))
    if kind == "all_to_all" and size > 1:
        pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
        facts["empty"] = tuple(draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True)))
    facts["asynchronous"] = not shm and draw(st.booleans())
    at.call(kind, [source], [target], **facts)


def told(program: TinyProgram, plan: TinyPlan, verdict: object) -> str:
    """All that one needs to see what went wrong."""
    defaults = {f.name: f.default for f in attrs.fields(TinyCall)}
    lines = [f"{program.ranks} ranks, groups {program.groups}, cells {plan.cells}"]
    for call in program.calls:
        lines += [f"  barrier over {g!r}" for before, g in plan.barriers if before == call.name]
        facts = attrs.asdict(call, recurse=False).items()
        lines.append(f"  { ({k: v for k, v in facts if v != defaults[k]}) }")
    return "\n".join([*lines, str(verdict)])
