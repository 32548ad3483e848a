"""A plan in a few lines of text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from symmplan.report.format import count, size, table, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from symmplan.model import Plan, Problem, Unplanned

__all__ = ["choice_rows", "plan_line", "plan_summary", "problem_line", "reasons_line"]

#: How many barriers or left-out tensors are listed before "and n more"; the JSON and the HTML
#: page have all of them.
_SHOWN = 20

#: What compiled graphs call the operation behind which saved tensors live on, and the bytes that
#: they leave alone because other graphs have saved them.
_SAVED, _KEPT = "symmplan::saved", "symmplan::kept"


def plan_summary(plan: Plan, choices: Iterable[Any] = ()) -> str:
    """Segments, bytes against the bound and against no sharing, what was left out and why.

    The plan is not verified here. Names are printed with control characters spelled out, so that
    a name cannot forge a line.

    Args:
        plan: The plan.
        choices: How its collectives run, and what was measured, as ``handle.choices``.
    """
    held = f"{count(len(plan.placements), 'buffer')} in {count(len(plan.segments), 'segment')}"
    steps = count(len(plan.problem.operations), "operation")
    lines = [
        f"plan {plan.fingerprint[:12]}: {held}, {steps}",
        *table(
            [
                ("peak", size(plan.peak_bytes), f"{plan.peak_bytes:,} bytes"),
                ("lower bound", size(plan.lower_bound_bytes), _quality(plan)),
                ("one buffer per tensor", size(plan.unshared_bytes), _saving(plan)),
            ]
        ),
    ]
    if plan.unsharded_modules is not None:
        lines.append(f"unsharded modules: {plan.unsharded_modules:,} at once")
    rows = choice_rows(choices)
    lines += ["collectives:", *table(rows, {2})] if rows else []
    for part in (_budget_lines, _segment_lines, _placed_lines, _crossing_lines, _barrier_lines):
        lines += part(plan)
    return "\n".join([*lines, *_unplanned_lines(plan.unplanned)])


def choice_rows(choices: Iterable[Any]) -> list[tuple[str, str, str, str, str]]:
    """Of each: collective, group, bytes, algorithm, and milliseconds of all that were measured."""
    return [
        (
            visible(c.op),
            f"group {visible(c.group)}",
            size(c.nbytes),
            c.algorithm,
            ", ".join(f"{which} {s * 1e3:.3g} ms" for which, s in c.seconds.items())
            or visible(c.ruled)
            or "not measured",
        )
        for c in choices
    ]


def plan_line(plan: Plan) -> str:
    """Buffers, segments, bytes and the bound, on one line."""
    held = f"{count(len(plan.placements), 'buffer')} in {count(len(plan.segments), 'segment')}"
    reached = plan.peak_bytes == plan.lower_bound_bytes
    bound = "the minimum" if reached else f"the minimum is {size(plan.lower_bound_bytes)} or more"
    return f"{held}, {size(plan.peak_bytes)} ({bound})"


def problem_line(problem: Problem) -> str:
    """Buffers, their bytes, operations and what was left out, on one line."""
    nbytes = size(sum(buffer.nbytes for buffer in problem.buffers))
    held = f"{count(len(problem.buffers), 'buffer')} of {nbytes}"
    left = f", {len(problem.unplanned):,} left out" if problem.unplanned else ""
    return f"{held}, {count(len(problem.operations), 'operation')}{left}"


def reasons_line(unplanned: Iterable[Unplanned]) -> str:
    """How many tensors were left out, and why, the two most frequent reasons; on one line."""
    reasons = Counter(visible(tensor.reason) for tensor in unplanned)
    common = reasons.most_common(2)
    first = [f"{n:,} x {reason}" for reason, n in common]
    more = reasons.total() - sum(n for _, n in common)
    return "; ".join([*first, *([f"{more:,} more"] if more else [])])


def _quality(plan: Plan) -> str:
    if plan.peak_bytes == plan.lower_bound_bytes:
        return "reached: no plan needs fewer bytes"
    if plan.lower_bound_bytes == 0:
        return "not known"
    ratio = plan.peak_bytes / plan.lower_bound_bytes
    # 1.0000 would claim the bound was reached.
    return f"peak / bound = {max(ratio, 1.0001):.4f}"


def _saving(plan: Plan) -> str:
    if not plan.peak_bytes:
        return ""
    return f"{plan.unshared_bytes / plan.peak_bytes:.2f} x the peak"


def _budget_lines(plan: Plan) -> list[str]:
    """The demoted collectives, and the cost."""
    budget = plan.budget
    if budget is None:
        return []
    known = [g.seconds for g in budget.demotions if g.seconds is not None]
    cost = f", {sum(known) * 1e3:.3g} ms" if known else ""
    rows = [
        (
            f"{g.calls:,} x {visible(g.what)}",
            f"{g.before} -> {g.after}",
            "not measured" if g.seconds is None else f"{g.seconds * 1e3:+.3g} ms",
        )
        for g in budget.demotions[:_SHOWN]
    ]
    wanted = f"{size(budget.wanted_bytes)} wanted, {size(budget.capacity)} there"
    return [f"budget: {wanted}{cost}", *table(rows), *_more(len(budget.demotions))]


def _segment_lines(plan: Plan) -> list[str]:
    held = Counter(placement.segment for placement in plan.placements.values())
    rows = [
        (
            visible(s.name),
            "groups " + ", ".join(visible(g) for g in s.groups),
            size(s.nbytes),
            f"bound {size(s.lower_bound_bytes)}",
            count(held[s.name], "buffer") + (", signal pad" * s.signal_pad),
        )
        for s in plan.segments
    ]
    return ["segments:", *table(rows)] if rows else ["segments: none"]


def _placed_lines(plan: Plan) -> list[str]:
    """The placed tensors, those of one op and role together."""
    alike: dict[tuple[str, str], list[int]] = {}
    for buffer in plan.problem.buffers:
        if buffer.op and buffer.op != _KEPT and buffer.name in plan.placements:
            alike.setdefault((buffer.op, buffer.where or ""), []).append(buffer.nbytes)
    rows = [
        (f"{len(sizes):,} x {visible(where)} of {visible(op)}", size(sum(sizes)))
        for (op, where), sizes in sorted(alike.items())[:_SHOWN]
    ]
    return ["placed:", *table(rows), *_more(len(alike))] if rows else []


def _crossing_lines(plan: Plan) -> list[str]:
    """What stays in place between a forward and its backward, and what of other graphs does."""
    size_of = {b.name: b.nbytes for b in plan.problem.buffers}
    ends = {o.name for o in plan.problem.operations if o.op == _SAVED}
    saved = {a.buffer for a in plan.problem.accesses if a.operation in ends}
    kept = [b.nbytes for b in plan.problem.buffers if b.op == _KEPT]
    lines = []
    if saved:
        total = size(sum(size_of[b] for b in saved))
        lines.append(f"crosses from forward to backward: {count(len(saved), 'buffer')}, {total}")
    if kept:
        lines.append(f"left alone, saved by other graphs: {size(sum(kept))}")
    return lines


def _barrier_lines(plan: Plan) -> list[str]:
    if not plan.barriers:
        return ["barriers: none needed"]
    rows = [
        (
            f"before {visible(b.before)}",
            f"group {visible(b.group)}",
            "protects " + (_some([visible(n) for n in b.buffers]) or "the whole program"),
        )
        for b in plan.barriers[:_SHOWN]
    ]
    return [f"barriers: {len(plan.barriers):,}", *table(rows), *_more(len(plan.barriers))]


def _unplanned_lines(unplanned: tuple[Unplanned, ...]) -> list[str]:
    """The declared tensors that were left out, then those that may lie anywhere."""
    if not unplanned:
        return ["left out: none"]
    missed = [tensor for tensor in unplanned if tensor.needed]
    lines = _left_out("left out", missed) if missed else ["left out: none"]
    free = [tensor for tensor in unplanned if not tensor.needed]
    return lines + _left_out("need not be symmetric", free) if free else lines


def _left_out(title: str, tensors: Sequence[Unplanned]) -> list[str]:
    """The tensors under a title, those with one reason together."""
    alike: dict[tuple[str, str, str], list[Unplanned]] = {}
    for tensor in sorted(tensors, key=lambda t: (t.reason, t.op, t.where, t.name)):
        alike.setdefault((tensor.reason, tensor.op, tensor.where), []).append(tensor)
    lines = [f"{title}: {len(tensors):,}"]
    for (reason, op, where), same in list(alike.items())[:_SHOWN]:
        sizes = [t.nbytes for t in same]
        total = "size unknown" if None in sizes else size(sum(n for n in sizes if n is not None))
        lines += [
            f"  {len(same):,} x {visible(where)} of {visible(op)}, {total}: {visible(reason)}",
            f"    {_some([visible(t.name) for t in same])}",
        ]
    return lines + _more(len(alike))


def _some(names: list[str], shown: int = 4) -> str:
    head = ", ".join(names[:shown])
    return head if len(names) <= shown else f"{head} and {len(names) - shown:,} more"


def _more(total: int) -> list[str]:
    return [f"  and {total - _SHOWN:,} more"] if total > _SHOWN else []
