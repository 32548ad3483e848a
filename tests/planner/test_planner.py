"""The planner as a whole, against oracles that are too slow to be wrong."""

from __future__ import annotations

import os
import re

import pytest
from attrs import evolve
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from strategies import interval_problems, problems
from unsynchronised import unsynchronised

from examples import examples
from symmplan.errors import PlanningError, VerificationError
from symmplan.model import Access, Buffer, Operation, Problem
from symmplan.planner import plan
from symmplan.testing import conflicts, heaviest_set, lowest_peak

_MOST = int(os.environ.get("SYMMPLAN_EXAMPLES", examples(180).max_examples))
MANY = settings(max_examples=_MOST, deadline=None)
SOME = examples(80, deadline=None)


@MANY
@given(problems())
def test_no_two_conflicting_buffers_share_a_byte(problem):
    try:
        made = plan(problem)
    except PlanningError:
        assert problem.apart or any(b.offset is not None for b in problem.buffers)
        return
    made.verify()
    for x, y in map(sorted, conflicts(problem)):
        p, q = made.placements[x], made.placements[y]
        assert p.segment != q.segment or p.end <= q.offset or q.end <= p.offset


#: The pinned buffer is gone when the other comes.
PINNED_ACCESSES = (Access("o", "b"), Access("p", "c"))
#: A call that is not over where the ranks meet, but behind that.
IN_FLIGHT = Problem(
    buffers=(Buffer("x", 1, "g", align=1),),
    operations=(
        Operation("start"),
        Operation("meet", group="g", release=True),
        Operation("wait", ends=("start",)),
        Operation("read"),
    ),
    accesses=(
        Access("start", "x", write=True),
        Access("meet", "x"),
        Access("wait", "x"),
        Access("read", "x", remote=True),
    ),
)
#: A wait orders what precedes the peers' start, and nothing that lies between start and wait.
READ_IN_FLIGHT = Problem(
    buffers=(Buffer("x", 1, "g", align=1),),
    operations=(
        Operation("start", group="g", synchronizes=True),
        Operation("read"),
        Operation("wait", ends=("start",)),
        Operation("write"),
    ),
    accesses=(Access("read", "x", remote=True), Access("write", "x", write=True)),
)
#: Nor does a wait pass on what another group's meeting between start and wait has told this rank.
MET_IN_FLIGHT = Problem(
    buffers=(Buffer("x", 1, "g", align=1), Buffer("y", 1, "h", align=1)),
    operations=(
        Operation("read"),
        Operation("start", group="h", synchronizes=True),
        Operation("meet", group="g", synchronizes=True),
        Operation("wait", ends=("start",)),
        Operation("push"),
    ),
    accesses=(Access("read", "x", remote=True), Access("push", "y", write=True, remote=True)),
    shared_groups=(("g", "h"),),
)
#: Nor does a call that handshakes, before it has ended.
WRITTEN_IN_FLIGHT = Problem(
    buffers=(Buffer("x", 1, "g", align=1),),
    operations=(
        Operation("read"),
        Operation("start", group="g", handshake=True),
        Operation("write"),
        Operation("wait", ends=("start",)),
    ),
    accesses=(
        Access("read", "x", remote=True),
        Access("start", "x"),
        Access("write", "x", write=True),
        Access("wait", "x"),
    ),
)
#: Byte 1 is first a part of what lies over two others, and last what a peer may still read.
BETWEEN_OTHERS = Problem(
    buffers=(
        Buffer("low", 1, "g", align=1, offset=0),
        Buffer("high", 1, "g", align=1, offset=2),
        Buffer("over", 3, "g", align=1, offset=0),
        Buffer("read", 1, "g", align=1, offset=1),
    ),
    operations=tuple(Operation(name) for name in ("low", "high", "over", "read")),
    accesses=(
        *(Access(name, name, write=True) for name in ("low", "high", "over")),
        Access("read", "read", remote=True),
    ),
)
#: From run to run a barrier behind the earlier use will do, unless it is another group's.
OF_ANOTHER_GROUP = Problem(
    buffers=(Buffer("x", 1, "h", align=1), Buffer("y", 1, "g", align=1)),
    operations=(
        *(Operation(name, "main") for name in ("a read y", "b write x", "c read x")),
        Operation("d write y", "side"),
    ),
    accesses=(
        Access("a read y", "y", remote=True),
        Access("b write x", "x", write=True),
        Access("c read x", "x", remote=True),
        Access("d write y", "y", write=True),
    ),
)
#: The barrier that x needs from run to run does for z, too, which has one of its own otherwise.
FROM_RUN_TO_RUN = Problem(
    buffers=tuple(Buffer(name, 1, "g", align=1) for name in "xyz"),
    operations=tuple(Operation(name) for name in ("read z", "read", "push z", "push x")),
    accesses=(
        Access("read z", "z"),
        Access("read", "x"),
        Access("read", "y"),
        Access("push z", "x"),
        Access("push z", "z", write=True, remote=True),
        Access("push x", "x", write=True, remote=True),
    ),
)
#: A release says nothing of bytes of another group, which the op touches, too.
ELSEWHERE = Problem(
    buffers=(Buffer("x", 1, "h", align=1), Buffer("y", 1, "g", align=1)),
    operations=(Operation("read"), Operation("meet", group="g", release=True)),
    accesses=(Access("meet", "x"), Access("read", "y", remote=True)),
    shared_groups=(("g", "h"),),
)


@MANY
@example(IN_FLIGHT)
@example(READ_IN_FLIGHT)
@example(MET_IN_FLIGHT)
@example(WRITTEN_IN_FLIGHT)
@example(BETWEEN_OTHERS)
@example(OF_ANOTHER_GROUP)
@example(ELSEWHERE)
@given(problems(pins=False))
def test_peers_are_synchronised_wherever_bytes_are_reused(problem):
    try:
        made = plan(problem)
    except PlanningError:
        assert problem.apart
        return
    made.verify()
    assert not unsynchronised(made)


@pytest.mark.parametrize(
    ("problem", "needed"),
    [
        (READ_IN_FLIGHT, [("read", "g"), ("write", "g")]),
        (MET_IN_FLIGHT, [("read", "h"), ("read", "g"), ("push", "h")]),
    ],
)
def test_a_wait_vouches_for_nothing_behind_its_start(problem, needed):
    """Nor does `verify` or the oracle let it."""
    made = plan(problem)
    assert [(b.before, b.group) for b in made.barriers] == needed
    fewer = evolve(made, barriers=made.barriers[:-1])  # not that behind the wait
    assert unsynchronised(fewer)
    with pytest.raises(VerificationError, match="pass from buffer 'x'"):
        fewer.verify()


@pytest.mark.further
@MANY
@example(FROM_RUN_TO_RUN)
@given(problems(groups=("g",), max_streams=1, constraints=False, pins=False))
def test_on_one_stream_and_over_one_group_each_barrier_is_needed(problem):
    made = plan(problem)
    for k in range(len(made.barriers)):
        assert unsynchronised(evolve(made, barriers=made.barriers[:k] + made.barriers[k + 1 :]))


@MANY
@given(problems(groups=("g",), remote=False, constraints=False, pins=False, aligns=(1,)))
def test_the_bound_is_the_heaviest_set(problem):
    made = plan(problem)
    sizes = {b.name: b.nbytes for b in problem.buffers}
    clashes = conflicts(problem)
    lowest = lowest_peak(sizes, clashes)
    assert heaviest_set(sizes, clashes) == made.lower_bound_bytes <= lowest <= made.peak_bytes
    assert made.optimal == (made.peak_bytes == made.lower_bound_bytes)


@SOME
@given(problems(groups=("g",), remote=False, constraints=False, pins=False, max_buffers=5))
def test_bounds_hold_with_alignments(problem):
    made = plan(problem)
    made.verify()
    sizes = {b.name: b.nbytes for b in problem.buffers}
    aligns = {b.name: b.align for b in problem.buffers}
    unit = min(aligns.values())
    rounded = {n: -(-s // unit) * unit for n, s in sizes.items()}
    lowest = lowest_peak(rounded, conflicts(problem), aligns)
    assert made.lower_bound_bytes <= lowest <= made.peak_bytes


@pytest.mark.further
@SOME
@given(problems(groups=("g",), remote=False, pins=False, max_buffers=5))
def test_bounds_hold_beside_persistent_buffers(problem):
    assume(not problem.together and not problem.apart)
    assume(not any(b.signal_pad for b in problem.buffers))
    made = plan(problem)
    made.verify()
    aligns = {b.name: b.align for b in problem.buffers}
    unit = min(aligns.values())
    rounded = {b.name: -(-b.nbytes // unit) * unit for b in problem.buffers}
    lowest = lowest_peak(rounded, conflicts(problem), aligns)
    assert made.lower_bound_bytes <= lowest <= made.peak_bytes


@pytest.mark.parametrize(("offset", "bound", "proof"), [(0, 4, "clique"), (6, 10, "pin")])
def test_a_pin_is_a_proof_where_nothing_else_is(offset, bound, proof):
    pinned = Buffer("b", 4, align=2, offset=offset)
    beside = Buffer("c", 2, align=2)
    made = plan(Problem([pinned, beside], [Operation("o"), Operation("p")], PINNED_ACCESSES))
    made.verify()
    (segment,) = made.segments
    assert (segment.lower_bound_bytes, segment.proof, segment.witness) == (bound, proof, ("b",))


@SOME
@given(interval_problems(max_buffers=7, max_time=6))
def test_few_intervals_are_packed_as_low_as_can_be(problem):
    made = plan(problem)
    made.verify()
    sizes = {b.name: b.nbytes for b in problem.buffers}
    assert made.peak_bytes == lowest_peak(sizes, conflicts(problem))


def shuffled(problem, random):
    streams = {}
    for op in problem.operations:
        streams.setdefault(op.stream, []).append(op)
    operations = []
    while streams:
        name = random.choice(sorted(streams))
        operations.append(streams[name].pop(0))
        if not streams[name]:
            del streams[name]

    def mixed(entries):
        entries = list(entries)
        random.shuffle(entries)
        return entries

    return Problem(
        buffers=mixed(problem.buffers),
        operations=operations,
        accesses=mixed(problem.accesses),
        edges=mixed(problem.edges),
        together=[tuple(mixed(p)) for p in mixed(problem.together)],
        apart=[tuple(mixed(p)) for p in mixed(problem.apart)],
        shared_groups=[tuple(mixed(g)) for g in problem.shared_groups],
    )


@MANY
@given(problems(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_listing(problem, random):
    other = shuffled(problem, random)
    assert other.to_json() == problem.to_json()
    try:
        made = plan(problem)
    except PlanningError as e:
        with pytest.raises(PlanningError, match=f"^{re.escape(str(e))}$"):
            plan(other)
        return
    again = plan(other)
    assert again.to_json() == made.to_json()
    assert again.fingerprint == made.fingerprint
