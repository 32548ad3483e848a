"""Changes that would save bytes, found by planning the changed problem, and what bytes can buy.

[Note: advice]
    Each trial changes one thing in the problem (an ordering, an alignment, a flag) and plans it
    again; a change that lowers the peak becomes advice, with the bytes that it saves. Changes that
    the lower bound rules out are not tried: as long as the buffers that prove the bound stay the
    same size, nothing is saved. The number of trials falls with the size of the problem, so advice
    takes a bounded amount of work.
"""

from __future__ import annotations

import contextlib
from itertools import chain, combinations, islice
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, frozen

from symmplan.errors import SymmplanError
from symmplan.planner.order import order_of
from symmplan.planner.parameters import plan_with_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from symmplan.model import Alternative, Buffer, Plan, Problem
    from symmplan.planner.order import Order

__all__ = ["Advice", "advise", "trades"]

#: Buffers times trials; each trial is one fast plan.
_WORK = 200_000
_MAX_TRIALS = 60
#: Buffers of the peak between which an ordering is sought.
_PEAK = 24


@frozen
class Advice:
    """One thing to change.

    Attributes:
        kind: ``"order"`` (a wait or event is missing), ``"alignment"``, ``"persistent"``,
            ``"apart"``, ``"together"``, ``"signal_pad"``, ``"pin"``, or ``"total"`` (all that save
            something, together). Of `trades`: ``"unsharded_modules"`` (of `symmplan.fsdp.apply`),
            or ``"demotion"`` (an algorithm that takes fewer bytes, which a `capacity=` decides).
        saves: Bytes by which `Plan.peak_bytes` falls if it is changed; below 0 if it grows.
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
    """Changes that would save bytes and give nothing up, the largest saving first."""
    from symmplan.planner.plan import plan as replan

    trials = max(4, min(_MAX_TRIALS, _WORK // max(1, len(plan.problem.buffers))))
    found: list[Advice] = []
    # Changes worth a trial, those of one action first.
    ideas = chain(_alignment(plan), _flags(plan), _orderings(plan))
    for idea in islice(ideas, trials):
        assert idea.problem is not None
        try:
            better = replan(idea.problem)
        except SymmplanError:
            continue  # the change contradicts another constraint
        saves = plan.peak_bytes - better.peak_bytes
        if saves > 0:
            found.append(evolve(idea, saves=saves))
    found.sort(key=lambda a: (-a.saves, a.kind, a.buffers, a.edges))
    return (*found, *_total(plan, found))


def trades(plan: Plan) -> tuple[Advice, ...]:
    """What gives up speed for bytes, or bytes for speed: each kind in the order of savings."""
    found = [*_unsharded_modules(plan), *_demotions(plan)]
    return tuple(sorted(found, key=lambda a: (a.kind, -a.saves, a.text)))


def _total(plan: Plan, found: list[Advice]) -> Iterator[Advice]:
    """The saving of several pieces of advice together; no sum, as they may overlap."""
    from symmplan.planner.plan import plan as replan

    if len(found) < 2:
        return
    problem = plan.problem
    for advice in found:
        with contextlib.suppress(SymmplanError):  # it contradicts a piece that saves more
            problem = _also(problem, plan.problem, advice)
    with contextlib.suppress(SymmplanError):
        saves = plan.peak_bytes - replan(problem).peak_bytes
        if saves > found[0].saves:
            text = f"all {len(found)} together need less"
            yield Advice("total", saves, text, problem=problem)


def _also(problem: Problem, plain: Problem, advice: Advice) -> Problem:
    """A problem with one more change: how the problem of an advice differs from ``plain``.

    Raises:
        ProblemError: The changes contradict each other.
    """
    advised = advice.problem
    assert advised is not None
    before = {b.name: asdict(b) for b in plain.buffers}
    after = {b.name: asdict(b) for b in advised.buffers}
    buffers = [
        evolve(b, **{k: v for k, v in after[b.name].items() if v != before[b.name][k]})
        for b in problem.buffers
    ]
    pairs = {}
    for name in ("edges", "together", "apart"):
        old, new = dict.fromkeys(getattr(plain, name)), dict.fromkeys(getattr(advised, name))
        left = [pair for pair in getattr(problem, name) if pair in new or pair not in old]
        pairs[name] = list(dict.fromkeys([*left, *(pair for pair in new if pair not in old)]))
    return evolve(problem, buffers=buffers, **pairs)


def _alignment(plan: Plan) -> Iterator[Advice]:
    problem = plan.problem
    least = min((b.align for b in problem.buffers), default=1)
    strict = [b for b in problem.buffers if b.align > least]
    if strict:
        text = f"{len(strict)} buffers ask for more than {least}-byte alignment"
        yield _changed(problem, "alignment", text, strict, align=least)
    if least > 1 and any(b.nbytes % least for b in problem.buffers):
        text = f"sizes are not multiples of the alignment of {least} bytes"
        yield _changed(problem, "alignment", text, problem.buffers, align=1)


def _flags(plan: Plan) -> Iterator[Advice]:
    problem = plan.problem
    rigid = [b for b in problem.buffers if b.persistent]
    for b in sorted(rigid, key=lambda b: (-b.nbytes, b.name))[:8]:
        text = f"{_called(b)!r} is bound for the whole program and shares no bytes"
        yield _changed(problem, "persistent", text, [b], persistent=False)
    for b in sorted(problem.buffers, key=lambda b: b.name):
        if b.offset is not None:
            text = f"{_called(b)!r} is pinned at byte {b.offset}"
            yield _changed(problem, "pin", text, [b], offset=None)
    for kind, pairs, rule in (
        ("apart", problem.apart, "must not share a segment"),
        ("together", problem.together, "must share their offset"),
    ):
        if pairs:
            names = tuple(sorted({n for p in pairs for n in p}))
            free = evolve(problem, **{kind: ()})
            yield Advice(kind, 0, f"{len(pairs)} pairs {rule}", names, problem=free)
    pads = [b for b in problem.buffers if b.signal_pad]
    if pads and sum(s.signal_pad for s in plan.segments) > 1:
        text = f"{len(pads)} buffers use signal pads from unordered operations"
        yield _changed(problem, "signal_pad", text, pads, signal_pad=False)


def _called(buffer: Buffer) -> str:
    """What people know a buffer by, as in the picture."""
    return buffer.label or buffer.name


def _changed(
    problem: Problem, kind: str, text: str, which: Iterable[Buffer], **change: Any
) -> Advice:
    changed = {b.name: evolve(b, **change) for b in which}
    buffers = tuple(changed.get(b.name, b) for b in problem.buffers)
    return Advice(kind, 0, text, tuple(sorted(changed)), problem=evolve(problem, buffers=buffers))


def _orderings(plan: Plan) -> Iterator[Advice]:
    """Orderings between streams that would let buffers of the peak share bytes."""
    problem = plan.problem
    order = order_of(problem)
    if order.chains < 2:
        return
    # First all waits together, which is the most that waits can save. The edges make the canonical
    # linear extension the only one.
    ahead = [i for i in range(len(order.names) - 1) if not order.precedes(i, i + 1)]
    edges = tuple((order.names[i], order.names[i + 1]) for i in ahead)
    yield Advice(
        "order",
        0,
        f"the {order.chains} streams may run ahead of each other; in one order, that of "
        "`edges`, they need less",
        edges=edges[:64],
        problem=evolve(problem, edges=problem.edges + edges),
    )
    ops: dict[str, list[int]] = {}
    for a in problem.accesses:
        ops.setdefault(a.buffer, []).append(order.index[a.operation])
    size = {b.name: b.nbytes for b in problem.buffers if not b.persistent}
    called = {b.name: _called(b) for b in problem.buffers}
    peak = [n for s in plan.segments for n in s.witness if n in size]
    peak = sorted(peak, key=lambda n: (-size[n], n))[:_PEAK]
    for pair in combinations(peak, 2):
        for first, second in (pair, pair[::-1]):
            edges = _missing(order, ops[first], ops[second])
            if edges:
                one, other = called[first], called[second]
                if one == other:
                    one, other = first, second
                text = (
                    f"nothing orders {one!r} before {other!r}; record an event after "
                    f"{edges[0][0]!r}, and let {edges[0][1]!r} wait for it"
                )
                changed = evolve(problem, edges=problem.edges + edges)
                yield Advice("order", 0, text, (first, second), edges, changed)


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


def _unsharded_modules(plan: Plan) -> Iterator[Advice]:
    """The saving of one unsharded module less, and the cost of one more."""
    alive, peak = plan.unsharded_modules or 0, plan.peak_bytes
    for other in (a for a in plan.alternatives if a.demotion is None):
        needs = _needs(other)
        asked = f"unsharded_modules={other.unsharded_modules} needs {abs(needs - peak):,} bytes"
        if other.unsharded_modules < alive and needs < peak:
            text = f"{asked} less; a gather may then have to wait for the module before it"
            yield Advice("unsharded_modules", peak - needs, text)
        if other.unsharded_modules > alive and needs >= peak:
            text = (
                f"{asked} more; the last modules of forward that then fit stay unsharded, and "
                "backward does not gather them again"
            )
            yield Advice("unsharded_modules", peak - needs, text)


def _demotions(plan: Plan) -> Iterator[Advice]:
    """What each kind of collective costs in symmetric bytes, against one that takes fewer."""
    for other in plan.alternatives:
        demotion = other.demotion
        if demotion is None:
            continue
        saves = plan.peak_bytes - _needs(other)
        if saves <= 0:
            continue
        seconds = demotion.seconds
        cost = "not measured" if seconds is None else f"{seconds * 1e3:.3g} ms more in a step"
        text = (
            f"{demotion.calls} x {demotion.what} as {demotion.after} instead of "
            f"{demotion.before} needs {saves:,} bytes less; {cost}"
        )
        yield Advice("demotion", saves, text)


def _needs(other: Alternative) -> int:
    """Bytes that a plan otherwise needs."""
    return plan_with_parameters(other.problem, other.parameters, other.slots).peak_bytes
