"""Checks that need no notion of time: names, sizes, alignments, and use of the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import networkx as nx

from symmplan.errors import VerificationError

if TYPE_CHECKING:
    from symmplan.model import Buffer, Placement, Plan, SegmentSpec

__all__ = ["User", "check_structure", "fail", "users_of"]


def fail(kind: str, what: str, *, expected: object, got: object, **fields: Any) -> NoReturn:
    """Raise the error for a broken rule: ``kind`` names it for programs, ``what`` for people."""
    raise VerificationError(
        what,
        expected=expected,
        got=got,
        fix="plan the problem again; a plan is never edited",
        kind=kind,
        **fields,
    )


def check_structure(plan: Plan) -> None:
    """Check all that holds at every instant."""
    buffers = {b.name: b for b in plan.problem.buffers}
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
        what = f"buffer {name!r} has no placement"
        every = "a placement for every buffer of the problem"
        fail("missing_buffer", what, expected=every, got="none", buffer=name)
    for name in sorted(plan.placements.keys() - buffers.keys()):
        what = f"the plan places {name!r}, which the problem does not have"
        only = "buffers of the problem only"
        fail("unknown_buffer", what, expected=only, got=repr(name), buffer=name)
    for name, place in plan.placements.items():
        _check_placement(buffers[name], place, segments)
    _check_pairs(plan)
    padded = {p.segment for name, p in plan.placements.items() if buffers[name].signal_pad}
    for segment in plan.segments:
        needed = segment.name in padded
        if segment.signal_pad != needed:
            fail(
                "signal_pad",
                f"segment {segment.name!r} is wrong about its signal pad",
                expected=needed,
                got=segment.signal_pad,
                segment=segment.name,
            )


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
        at = f"bytes [{place.offset}, {place.end}) of segment {place.segment!r}"
        fail(
            kind,
            f"buffer {b.name!r} at {at} {what}",
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


class User(NamedTuple):
    """A buffer, or several that must share their offset; live from the first to the last access.

    Attributes:
        names: The buffers, sorted.
        group: Their process group.
        segment: Where they lie.
        offset: First byte.
        end: First byte after the largest.
        align: Strictest alignment among them, in bytes.
        persistent: Whether one of them is bound for the whole program.
        pinned: Whether one of them has a fixed offset.
    """

    names: tuple[str, ...]
    group: str
    segment: str
    offset: int
    end: int
    align: int
    persistent: bool
    pinned: bool


def users_of(plan: Plan) -> tuple[list[User], dict[str, int]]:
    """The users of a plan whose structure was checked, and the number of each buffer's."""
    joined = nx.connected_components(nx.Graph(plan.problem.together))
    linked = {name: tuple(sorted(names)) for names in joined for name in names}
    buffers = {b.name: b for b in plan.problem.buffers}
    owner: dict[str, int] = {}
    users: list[User] = []
    for name, first in buffers.items():
        if name in owner:
            continue
        place, names = plan.placements[name], linked.get(name, (name,))
        end, align = place.end, first.align
        persistent, pinned = first.persistent, first.offset is not None
        if len(names) > 1:
            merged = [buffers[n] for n in names]
            end = place.offset + max(m.nbytes for m in merged)
            align = max(m.align for m in merged)
            persistent = any(m.persistent for m in merged)
            pinned = any(m.offset is not None for m in merged)
        for n in names:
            owner[n] = len(users)
        users.append(
            User(names, first.group, place.segment, place.offset, end, align, persistent, pinned)
        )
    return users, owner
