"""Is every use of bytes that peers touch ordered with theirs? See [Note: peers count] in the model.

The check takes the program twice in a row, with the plan's barriers as operations. For every two
accesses that need an order it asks *from whom this rank must have heard*: first from the peers that
may still be in the earlier access, then from those that may be in the later one already. So a path
has to lead from the earlier access to the later one through a meeting of the one group, then
through one of the other.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from attrs import evolve

from symmplan.model import Operation
from symmplan.planner.graphs import Paths, graph_of
from symmplan.planner.verify.structure import fail

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from symmplan.model import Plan
    from symmplan.planner.verify.sharing import Pairs
    from symmplan.planner.verify.structure import User

__all__ = ["check_barriers"]


class _Span(NamedTuple):
    """A call that touches a user's bytes: names of the operations where it begins and ends."""

    begin: str
    end: str
    changes: bool
    touches_unasked: bool  # peers, before this rank has begun it
    lingers: bool  # peers, after it has ended here
    gated: bool  # no rank touches a byte before all ranks have begun it
    drained: bool  # all ranks are done with the bytes when it ends


class _Need(NamedTuple):
    earlier: _Span
    later: _Span
    users: tuple[int, int]
    runs: int  # 1 if the later one is of the program's next run
    heard: tuple[str, ...]  # groups, in this order


def check_barriers(
    plan: Plan,
    users: list[User],
    owner: Mapping[str, int],
    reuse: tuple[Pairs, Pairs],
    paths: Paths,
) -> None:
    """Check that the listed barriers are known and suffice.

    Raises:
        VerificationError: A barrier is missing (``barrier``) or makes no sense
            (``unknown_barrier``).
    """
    _check_known(plan, paths)
    exposed = _exposed(plan, users, owner)
    if not exposed:
        return
    passed = [[p for p in pairs if not exposed.isdisjoint(p)] for pairs in reuse]
    wanted = exposed.union(*chain(*passed))
    spans = _spans(plan, users, owner, wanted)
    needs = [
        n for runs in (0, 1) for a, b in passed[runs] for n in _needs(spans, users, a, b, runs)
    ]
    needs += (
        n
        for u in sorted(exposed)
        for n in _needs(spans, users, u, u, 0)
        if paths.number[n.earlier.end] < paths.number[n.later.begin]
    )
    if not needs:
        return
    ordered = paths.exist(
        [(paths.number[n.earlier.end], paths.number[n.later.begin]) for n in needs]
    )
    needs = [n for n, holds in zip(needs, ordered, strict=True) if holds or n.runs]
    _check(needs, users, _twice(plan))


def _check_known(plan: Plan, paths: Paths) -> None:
    groups = {b.group for b in plan.problem.buffers}
    names = {b.name for b in plan.problem.buffers}
    for barrier in plan.barriers:
        known = barrier.before in paths.number and barrier.group in groups
        if not known or not barrier.buffers or not names.issuperset(barrier.buffers):
            fail(
                "unknown_barrier",
                f"the barrier before {barrier.before!r} over {barrier.group!r} names what the "
                "problem does not have, or no buffer",
                expected="an operation, a group and at least one buffer of the problem",
                got=repr(barrier),
                barrier=barrier,
            )


def _exposed(plan: Plan, users: list[User], owner: Mapping[str, int]) -> set[int]:
    """Users whose bytes peers may touch while this rank is not in the call, and some more."""
    calls = {o.name: o for o in plan.problem.operations}
    found: set[int] = set()
    for a in plan.problem.accesses:
        if a.remote and not (a.enters and a.releases):
            call, user = calls[a.operation], owner[a.buffer]
            if not (call.handshake and call.release and call.group == users[user].group):
                found.add(user)
    return found


def _spans(
    plan: Plan, users: list[User], owner: Mapping[str, int], wanted: set[int]
) -> dict[int, list[_Span]]:
    calls = {o.name: o for o in plan.problem.operations}
    ended_at = {begun: o.name for o in plan.problem.operations for begun in o.ends}
    accesses = [a for a in plan.problem.accesses if owner[a.buffer] in wanted]
    touching = {(a.operation, a.buffer) for a in accesses if a.operation in ended_at}
    facts: dict[tuple[int, str], list[bool]] = {}
    for a in accesses:
        begun = [s for s in calls[a.operation].ends if (s, a.buffer) in touching]
        for name in begun or (a.operation,):
            seen = facts.setdefault((owner[a.buffer], name), [False] * 3)
            seen[0] |= a.write
            if not begun:  # else this is the end of calls that state the facts where they begin
                seen[1] |= a.remote and not a.enters
                seen[2] |= a.remote and not a.releases
    found: dict[int, list[_Span]] = {}
    for (user, name), (changes, unasked, lingers) in facts.items():
        call = calls[name]
        ours = call.group == users[user].group
        gated, drained = ours and call.handshake, ours and call.release
        span = _Span(
            begin=name,
            end=ended_at.get(name, name),
            changes=changes,
            touches_unasked=unasked and not gated,
            lingers=lingers and not drained,
            gated=gated,
            drained=drained,
        )
        found.setdefault(user, []).append(span)
    return found


def _needs(
    spans: dict[int, list[_Span]], users: list[User], first: int, second: int, runs: int
) -> Iterator[_Need]:
    before, after = users[first].group, users[second].group
    for a in spans[first]:
        for b in spans[second]:
            if first == second and not (a.changes or b.changes):
                continue
            if before == after and (a.drained or b.gated):
                continue
            heard = [before] if a.lingers else []
            if b.touches_unasked and after not in heard:
                heard.append(after)
            if heard:
                yield _Need(a, b, (first, second), runs, tuple(heard))


def _twice(plan: Plan) -> Paths:
    """The program with its barriers before their operations, and all of it once more behind."""
    barred: dict[str, list[Operation]] = {}
    for k, barrier in enumerate(plan.barriers):
        node = Operation(f"\0barrier{k}", group=barrier.group, synchronizes=True)
        barred.setdefault(barrier.before, []).append(node)
    operations: list[Operation] = []
    edges: list[tuple[str, str]] = []
    streams = dict.fromkeys(o.stream for o in plan.problem.operations)
    for run in range(2):
        if run:  # one run is over before the next begins
            operations += (Operation(f"\0over {s}", stream=s) for s in streams)
            operations += (Operation(f"\0again {s}", stream=s) for s in streams)
            edges += ((f"\0over {s}", f"\0again {t}") for s in streams for t in streams if s != t)
        for op in plan.problem.operations:
            for node in (*barred.get(op.name, ()), op):
                operations.append(
                    evolve(
                        node,
                        name=_named(node.name, run),
                        stream=op.stream,
                        ends=tuple(_named(begun, run) for begun in node.ends),
                    )
                )
        for a, b in plan.problem.edges:
            first = barred[b][0].name if b in barred else b
            edges.append((_named(a, run), _named(first, run)))
    return Paths(graph_of(operations, edges))


def _named(name: str, run: int) -> str:
    return f"{name}\0{run}"


def _check(needs: list[_Need], users: list[User], paths: Paths) -> None:
    for heard in sorted({n.heard for n in needs}):
        mine = [n for n in needs if n.heard == heard]
        ends = [
            (
                paths.number[_named(n.earlier.end, 0)],
                paths.number[_named(n.later.begin, n.runs)],
            )
            for n in mine
        ]
        for need, good in zip(mine, paths.exist(ends, heard), strict=True):
            if not good:
                _missing(need, users)


def _missing(need: _Need, users: list[User]) -> None:
    first, second = users[need.users[0]], users[need.users[1]]
    op, other = need.earlier.begin, need.later.begin
    low, high = max(first.offset, second.offset), min(first.end, second.end)
    when = " of the program's next run" if need.runs else ""
    groups = ", then ".join(repr(g) for g in need.heard)
    fail(
        "barrier",
        f"bytes [{low}, {high}) of segment {first.segment!r} pass from buffer "
        f"{first.names[0]!r} (operation {op!r}) to {second.names[0]!r} (operation {other!r}{when}) "
        f"while peers of group {groups} may still use them, or use them already",
        expected=f"a meeting or barrier over {groups} in between",
        got="none",
        buffers=(first.names[0], second.names[0]),
        operations=(op, other),
        group_name=need.heard[0],
        segment=first.segment,
    )
