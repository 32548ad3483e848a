"""What would save bytes, found by planning again with it applied.

[Note: advice]
    Each trial changes one thing in the problem (an ordering, an alignment, a flag) and plans it
    again; what lowers the peak becomes advice with the bytes that the new plan needs less. Changes
    that the lower bound rules out are not tried: as long as the buffers that prove the bound are
    the same and as large, nothing is saved. The number of trials falls with the size of the
    problem, so advice takes a bounded amount of work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from symmplan.errors import SymmplanError
from symmplan.planner.order import order_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from symmplan.model import Buffer, Plan, Problem
    from symmplan.planner.order import Order

__all__ = ["Advice", "advise"]

#: Buffers times trials; each trial is one fast plan.
_WORK = 200_000
_MAX_TRIALS = 60
#: Buffers of the peak between which an ordering is sought.
_PEAK = 24


@frozen
class Advice:
    """One thing to know or to change.

    Attributes:
        kind: ``"order"`` (a wait or event is missing), ``"barrier"`` (reuse costs a barrier),
            ``"alignment"``, ``"persistent"``, ``"apart"``, ``"together"``, ``"signal_pad"``,
            ``"pin"``, or ``"peak"`` (which buffers make it).
        saves: Bytes by which `Plan.peak_bytes` falls when it is followed; 0 for what is only
            good to know.
        text: One sentence for people.
        buffers: Names of the buffers concerned.
        edges: Orderings to add, as (earlier, later) operation names.
        problem: The problem with the advice applied, or None if nothing changes.
    """

    kind: str
    saves: int
    text: str
    buffers: tuple[str, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()
    problem: Problem | None = None


def advise(plan: Plan) -> tuple[Advice, ...]:
    """What would save bytes, largest saving first, then what is good to know.

    Args:
        plan: The plan to be improved; every saving is against its ``peak_bytes``.
    """
    from symmplan.planner.plan import plan as replan

    trials = max(4, min(_MAX_TRIALS, _WORK // max(1, len(plan.problem.buffers))))
    found: list[Advice] = []
    for k, idea in enumerate(_ideas(plan)):
        if k >= trials:
            break
        assert idea.problem is not None
        try:
            better = replan(idea.problem)
        except SymmplanError:
            continue  # the change contradicts another constraint
        saves = plan.peak_bytes - better.peak_bytes
        if saves > 0:
            found.append(evolve(idea, saves=saves))
    found.sort(key=lambda a: (-a.saves, a.kind, a.buffers, a.edges))
    return (*found, *_peaks(plan), *_barriers(plan))


def _ideas(plan: Plan) -> Iterator[Advice]:
    """Changes worth a trial, those of one action first."""
    yield from _alignment(plan)
    yield from _flags(plan)
    yield from _orderings(plan)


def _alignment(plan: Plan) -> Iterator[Advice]:
    problem = plan.problem
    least = min((b.align for b in problem.buffers), default=1)
    strict = [b.name for b in problem.buffers if b.align > least]
    if strict:
        yield _changed(
            problem,
            "alignment",
            f"{len(strict)} buffers ask for more than {least}-byte alignment",
            strict,
            align=least,
        )
    if least > 1 and any(b.nbytes % least for b in problem.buffers):
        names = [b.name for b in problem.buffers]
        yield _changed(
            problem,
            "alignment",
            f"sizes are no multiples of the alignment of {least} bytes",
            names,
            align=1,
        )


def _flags(plan: Plan) -> Iterator[Advice]:
    problem = plan.problem
    rigid = [b for b in problem.buffers if b.persistent]
    for b in sorted(rigid, key=lambda b: (-b.nbytes, b.name))[:8]:
        text = f"{b.name!r} is bound for the whole program and shares with nothing"
        yield _changed(problem, "persistent", text, [b.name], persistent=False)
    for b in sorted(problem.buffers, key=lambda b: b.name):
        if b.offset is not None:
            yield _changed(
                problem, "pin", f"{b.name!r} is pinned at byte {b.offset}", [b.name], offset=None
            )
    if problem.apart:
        yield Advice(
            "apart",
            0,
            f"{len(problem.apart)} pairs must not share a segment",
            tuple(sorted({n for p in problem.apart for n in p})),
            problem=evolve(problem, apart=()),
        )
    if problem.together:
        yield Advice(
            "together",
            0,
            f"{len(problem.together)} pairs must share their offset",
            tuple(sorted({n for p in problem.together for n in p})),
            problem=evolve(problem, together=()),
        )
    pads = [b.name for b in problem.buffers if b.signal_pad]
    if pads and sum(s.signal_pad for s in plan.segments) > 1:
        yield _changed(
            problem,
            "signal_pad",
            f"{len(pads)} buffers use signal pads from unordered operations",
            pads,
            signal_pad=False,
        )


def _changed(problem: Problem, kind: str, text: str, names: list[str], **change: object) -> Advice:
    chosen = set(names)

    def apply(b: Buffer) -> Buffer:
        return evolve(b, **change) if b.name in chosen else b  # type: ignore[arg-type]

    changed = evolve(problem, buffers=tuple(apply(b) for b in problem.buffers))
    return Advice(kind, 0, text, tuple(sorted(names)), problem=changed)


def _orderings(plan: Plan) -> Iterator[Advice]:
    """Orderings between streams that would let buffers of the peak share bytes."""
    problem = plan.problem
    order = order_of(problem)
    if order.chains < 2:
        return
    # All at once first: what is there to be gained at most by waiting more?
    issued = evolve(problem, edges=problem.edges + _in_issue_order(order))
    yield Advice(
        "order",
        0,
        f"the {order.chains} streams run ahead of each other; one after the other, as in "
        "`edges`, they would need less",
        edges=tuple(e for e in issued.edges if e not in set(problem.edges))[:64],
        problem=issued,
    )
    ops: dict[str, list[int]] = {}
    for a in problem.accesses:
        ops.setdefault(a.buffer, []).append(order.index[a.operation])
    size = {b.name: b.nbytes for b in problem.buffers if not b.persistent}
    peak = [n for s in plan.segments for n in s.witness if n in size]
    peak = sorted(peak, key=lambda n: (-size[n], n))[:_PEAK]
    for i, x in enumerate(peak):
        for y in peak[i + 1 :]:
            for first, second in ((x, y), (y, x)):
                edges = _missing(order, ops[first], ops[second])
                if edges:
                    yield Advice(
                        "order",
                        0,
                        f"nothing orders {first!r} before {second!r}; an event after "
                        f"{edges[0][0]!r} that {edges[0][1]!r} waits for would",
                        (first, second),
                        edges,
                        evolve(problem, edges=problem.edges + edges),
                    )


def _missing(order: Order, first: list[int], second: list[int]) -> tuple[tuple[str, str], ...]:
    """Edges that put all of ``first`` before all of ``second``; none if that cannot be."""
    missing = []
    for a in first:
        for b in second:
            if a == b or order.precedes(b, a):
                return ()
            if not order.precedes(a, b):
                missing.append((a, b))
    # What another missing edge implies is not asked for.
    needed = [
        (a, b)
        for a, b in missing
        if not any(
            (c, d) != (a, b)
            and (a == c or order.precedes(a, c))
            and (d == b or order.precedes(d, b))
            for c, d in missing
        )
    ]
    return tuple((order.names[a], order.names[b]) for a, b in sorted(needed))


def _in_issue_order(order: Order) -> tuple[tuple[str, str], ...]:
    """Edges that make the canonical linear extension the only one."""
    return tuple(
        (order.names[i], order.names[i + 1])
        for i in range(len(order.names) - 1)
        if not order.precedes(i, i + 1)
    )


def _peaks(plan: Plan) -> Iterator[Advice]:
    size = {b.name: b.nbytes for b in plan.problem.buffers}
    for segment in plan.segments:
        names = sorted(segment.witness, key=lambda n: (-size[n], n))
        if names:
            yield Advice(
                "peak",
                0,
                f"{len(names)} buffers that are live together make the peak of "
                f"{segment.name!r}, {segment.nbytes} bytes; the largest is {names[0]!r} with "
                f"{size[names[0]]} bytes",
                tuple(names),
            )


def _barriers(plan: Plan) -> Iterator[Advice]:
    for barrier in plan.barriers:
        yield Advice(
            "barrier",
            0,
            f"a barrier over {barrier.group!r} must run before {barrier.before!r}, because "
            "peers touch bytes that are reused there; an operation that handshakes would save it",
            barrier.buffers,
        )
