"""Segment sizes, and bounds by their witnesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from symmplan.planner.verify.structure import fail

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from symmplan.model import Plan
    from symmplan.planner.verify.structure import User
    from symmplan.planner.verify.touches import Touches

__all__ = ["check_bounds"]


def check_bounds(plan: Plan, users: list[User], owner: Mapping[str, int], touches: Touches) -> None:
    """Check that segments are as large as needed and that the bounds are proven.

    Raises:
        VerificationError: A size (``segment_size``, ``segment_empty``) or a bound
            (``lower_bound``) is wrong.
    """
    by_segment: dict[str, list[int]] = {}
    for u, user in enumerate(users):
        by_segment.setdefault(user.segment, []).append(u)
    for segment in plan.segments:
        numbers = by_segment.get(segment.name, [])
        inside = [users[u] for u in numbers]
        if not inside:
            fail(
                "segment_empty",
                f"no buffer lies in segment {segment.name!r}",
                expected="at least one",
                got="none",
                segment=segment.name,
            )
        unit = min(u.align for u in inside)
        needed = _round(max(u.end for u in inside), unit)
        if segment.nbytes != needed:
            fail(
                "segment_size",
                f"segment {segment.name!r} has {segment.nbytes} bytes",
                expected=f"{needed}, where its last buffer ends, rounded up to {unit}",
                got=segment.nbytes,
                segment=segment.name,
            )
        where = f"segment {segment.name!r}"
        witnesses = _witnesses(where, segment.witness, users, owner, [segment.name])
        proven = _proven(where, users, witnesses, unit, segment.proof, touches)
        _check_claim(where, segment.lower_bound_bytes, proven, segment.nbytes)
    _check_joint(plan, users, owner, touches)


def _check_joint(plan: Plan, users: list[User], owner: Mapping[str, int], touches: Touches) -> None:
    """Segments that could share buffers split them by choice, so they are bounded together."""
    joint: dict[str, frozenset[str]] = {u.group: frozenset({u.group}) for u in users}
    for shared in plan.problem.shared_groups:
        together = frozenset().union(*(joint[g] for g in shared if g in joint))
        joint.update(dict.fromkeys(together, together))
    segments: dict[tuple[str, ...], list[str]] = {}
    for segment in plan.segments:
        segments.setdefault(tuple(sorted(joint[segment.groups[0]])), []).append(segment.name)
    wanted = sorted(groups for groups, names in segments.items() if len(names) > 1)
    if sorted(b.groups for b in plan.bounds) != wanted:
        _unproven(
            "joint bounds do not match the segments",
            expected=f"one for each of {wanted}",
            got=[b.groups for b in plan.bounds],
        )
    for bound in plan.bounds:
        names = segments[bound.groups]
        where = f"segments {', '.join(names)}"
        unit = min(u.align for u in users if u.segment in names)
        witnesses = _witnesses(where, bound.witness, users, owner, names)
        proven = _proven(where, users, witnesses, unit, "clique", touches)
        size = sum(s.nbytes for s in plan.segments if s.name in names)
        _check_claim(where, bound.nbytes, proven, size)


def _check_claim(where: str, claimed: int, proven: int, size: int) -> None:
    if claimed > size or claimed != proven:
        _unproven(
            f"{where} claims a lower bound of {claimed} bytes",
            expected=f"{proven}, which its witnesses prove",
            got=claimed,
        )


def _unproven(what: str, expected: object, got: object) -> NoReturn:
    fail("lower_bound", what, expected=expected, got=got)


def _round(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _witnesses(
    where: str,
    names: Sequence[str],
    users: list[User],
    owner: Mapping[str, int],
    segments: list[str],
) -> list[int]:
    found: dict[int, None] = {}
    for name in names:
        number = owner.get(name, -1)
        if number < 0 or users[number].segment not in segments or number in found:
            _unproven(
                f"{where} names {name!r} as a witness of its lower bound",
                expected="different buffers that lie there",
                got=repr(name),
            )
        found[number] = None
    return list(found)


def _proven(
    where: str, users: list[User], witnesses: list[int], unit: int, proof: str, touches: Touches
) -> int:
    chosen = [users[u] for u in witnesses]
    if proof not in ("clique", "pin"):
        _unproven(
            f"{where} claims a proof of the kind {proof!r}",
            expected="clique or pin",
            got=repr(proof),
        )
    if proof == "pin":
        if len(chosen) != 1 or not chosen[0].pinned:
            _unproven(
                f"{where} has no pinned buffer as the witness of its bound",
                expected="one pinned buffer",
                got=[u.names[0] for u in chosen],
            )
        return _round(chosen[0].end, unit)
    ordered = _compatible([u for u in witnesses if not users[u].persistent], touches)
    if ordered:
        a, b = (users[u] for u in min(ordered))
        _unproven(
            f"{where} counts {a.names[0]!r} and {b.names[0]!r} as live together, but they are "
            "ordered one after the other",
            expected="witnesses that conflict pairwise",
            got=(a.names[0], b.names[0]),
        )
    return sum(_round(u.end - u.offset, unit) for u in chosen)


def _compatible(users: list[int], touches: Touches) -> set[tuple[int, int]]:
    """Pairs of the users of which the first comes entirely before the second."""
    by_first = sorted(users, key=touches.first.__getitem__)
    firsts = touches.first[by_first]
    # A path leads only forward in the extension.
    behind = np.searchsorted(firsts, touches.last[users], side="right").tolist()
    pairs = [(a, b) for a, k in zip(users, behind, strict=True) for b in by_first[k:]]
    unordered = touches.unordered(pairs)
    return {pair for k, pair in enumerate(pairs) if k not in unordered}
