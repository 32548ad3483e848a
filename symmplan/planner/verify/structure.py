"""Names, sizes, alignments and the constraints that need no notion of time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from symmplan.errors import VerificationError

if TYPE_CHECKING:
    from symmplan.model import Buffer, Placement, Plan, SegmentSpec

__all__ = ["check_structure", "fail"]


def fail(kind: str, what: str, *, expected: object, got: object, **fields: Any) -> NoReturn:
    """Raise the error for a broken rule.

    Args:
        kind: Which rule, for programs.
        what: What happened, for people.
        expected: What the rule asks for.
        got: What was found.
        fields: Values worth keeping.

    Raises:
        VerificationError: Always.
    """
    raise VerificationError(
        what,
        expected=expected,
        got=got,
        fix="plan the problem again; a plan is never edited",
        kind=kind,
        **fields,
    )


def check_structure(plan: Plan) -> None:
    """Check all that holds at every instant.

    Args:
        plan: What is checked.

    Raises:
        VerificationError: A rule is broken.
    """
    buffers = {b.name: b for b in plan.problem.buffers}
    if plan.effort not in ("fast", "optimal"):
        fail(
            "effort",
            f"the plan claims the effort {plan.effort!r}",
            expected='"fast" or "optimal"',
            got=repr(plan.effort),
        )
    segments: dict[str, SegmentSpec] = {}
    for segment in plan.segments:
        if segment.name in segments:
            fail(
                "segment_name",
                f"segment {segment.name!r} is listed twice",
                expected="unique names",
                got=repr(segment.name),
                segment=segment.name,
            )
        segments[segment.name] = segment
        _check_groups(plan, segment)
    for name in sorted(buffers.keys() - plan.placements.keys()):
        fail(
            "missing_buffer",
            f"buffer {name!r} has no placement",
            expected="a placement for every buffer of the problem",
            got="none",
            buffer=name,
        )
    for name in sorted(plan.placements.keys() - buffers.keys()):
        fail(
            "unknown_buffer",
            f"the plan places {name!r}, which the problem does not have",
            expected="buffers of the problem only",
            got=repr(name),
            buffer=name,
        )
    for name, place in plan.placements.items():
        _check_placement(buffers[name], place, segments)
    _check_pairs(plan)
    for segment in plan.segments:
        _check_pad_flag(plan, segment, buffers)


def _check_groups(plan: Plan, segment: SegmentSpec) -> None:
    groups = set(segment.groups)
    shared = any(groups <= set(s) for s in plan.problem.shared_groups)
    if not groups or len(groups) < len(segment.groups) or (len(groups) > 1 and not shared):
        fail(
            "segment_groups",
            f"segment {segment.name!r} serves the groups {segment.groups!r}",
            expected="one group, or several of one set of shared_groups",
            got=repr(segment.groups),
            segment=segment.name,
        )


def _check_placement(b: Buffer, place: Placement, segments: dict[str, SegmentSpec]) -> None:
    at = f"buffer {b.name!r} at bytes [{place.offset}, {place.end}) of segment {place.segment!r}"
    segment = segments.get(place.segment)
    if segment is None:
        fail(
            "unknown_segment",
            f"buffer {b.name!r} lies in segment {place.segment!r}, which does not exist",
            expected=f"one of {', '.join(list(segments)[:8])}",
            got=repr(place.segment),
            buffer=b.name,
            segment=place.segment,
        )
    broken: tuple[str, str, object, object] | None = None
    if place.nbytes != b.nbytes:
        broken = ("nbytes", "has the wrong size", f"{b.nbytes} bytes", place.nbytes)
    elif b.group not in segment.groups:
        broken = ("group", "is not served over its group", repr(b.group), repr(segment.groups))
    elif place.offset < 0 or place.end > segment.nbytes:
        limits = f"bytes within [0, {segment.nbytes})"
        broken = ("out_of_segment", "reaches beyond it", limits, f"[{place.offset}, {place.end})")
    elif b.offset is not None and place.offset != b.offset:
        broken = ("pin", "is not where it is pinned", f"offset {b.offset}", place.offset)
    elif place.offset % b.align:
        broken = ("misaligned", "is misaligned", f"a multiple of {b.align}", place.offset)
    if broken is not None:
        kind, what, expected, got = broken
        fail(
            kind,
            f"{at} {what}",
            expected=expected,
            got=got,
            buffer=b.name,
            segment=place.segment,
            placement=place,
        )


def _check_pairs(plan: Plan) -> None:
    for a, b in plan.problem.together:
        first, second = plan.placements[a], plan.placements[b]
        if (first.segment, first.offset) != (second.segment, second.offset):
            fail(
                "together",
                f"buffers {a!r} and {b!r} must share their offset",
                expected=f"{b!r} in segment {first.segment!r} at byte {first.offset}",
                got=f"segment {second.segment!r}, byte {second.offset}",
                buffers=(a, b),
            )
    for a, b in plan.problem.apart:
        if plan.placements[a].segment == plan.placements[b].segment:
            fail(
                "apart",
                f"buffers {a!r} and {b!r} must not share a segment",
                expected="two segments",
                got=f"both in segment {plan.placements[a].segment!r}",
                buffers=(a, b),
            )


def _check_pad_flag(plan: Plan, segment: SegmentSpec, buffers: dict[str, Buffer]) -> None:
    if len(plan.segments) > 64:
        # Segments are few. A plan with very many is checked for the flag as a whole.
        used = {p.segment for n, p in plan.placements.items() if buffers[n].signal_pad}
        needed = segment.name in used
    else:
        needed = any(
            p.segment == segment.name and buffers[n].signal_pad for n, p in plan.placements.items()
        )
    if segment.signal_pad != needed:
        fail(
            "signal_pad",
            f"segment {segment.name!r} is wrong about its signal pad",
            expected=needed,
            got=segment.signal_pad,
            segment=segment.name,
        )
