"""Recordings of FSDP2 steps to problems, and plans that are followed: no ranks needed."""

from __future__ import annotations

import gc
import threading
from collections import Counter

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from symmplan.capture.fsdp import Planned, problem_of
from symmplan.capture.fsdp_recording import Call, Key, Recording
from symmplan.integrate.fsdp.schedule import Schedule
from symmplan.memory.leased import lease_out
from symmplan.model import Algorithm, Requirement
from symmplan.planner import plan as plan_problem


def key(site, kind="all_gather", numel=64, *, backward=False):
    return Key(site, kind, numel, "float32", backward)


def record(*events):
    """A recording from ``"+a"`` (ask for a buffer), ``"a"`` (run) and ``"-a"`` (drop)."""
    recording = Recording()
    index = {}
    for event in events:
        name = event.lstrip("+-")
        if event[0] == "+":
            kind = "reduce_scatter" if name.isupper() else "all_gather"
            index[name] = recording.begin(key(name, kind), 256)
        elif event[0] == "-":
            recording.drop(index[name])
        else:
            recording.run(index[name], "world")
    return recording


RANKS = {"world": (0, 1, 2, 3), "pair": (0, 1), "other": (4, 5)}


def solve(*recordings, algorithm_of=lambda _: Algorithm("symmetric")):
    problem, stretches = problem_of(recordings, RANKS, algorithm_of)
    plan = plan_problem(problem)
    plan.verify()
    return plan, stretches


def _declared(monkeypatch, **changes):
    """Let the registry say something else of reduce-scatters."""
    from symmplan.capture import fsdp

    def spec_for(op, original=fsdp.spec_for):
        spec = original(op)
        return attrs.evolve(spec, **changes) if "reduce_scatter" in spec.op else spec

    monkeypatch.setattr(fsdp, "spec_for", spec_for)


def test_the_registry_says_what_must_be_symmetric(monkeypatch):
    steps = record("+a", "a", "-a", "+B", "B", "-B")
    whole = [b.op for b in solve(steps)[0].problem.buffers]
    assert whole == ["c10d::_allgather_base_", "c10d::_reduce_scatter_base_"]
    _declared(monkeypatch, requirements=())
    plan, ((gather, scatter),) = solve(steps)
    assert [b.op for b in plan.problem.buffers] == whole[:1]
    assert (gather.algorithm.name, scatter.algorithm.name) == ("symmetric", "ordinary")
    assert "not declared" in plan.unplanned[0].reason


def test_tenants_are_noted_once_between_two_events():
    recording = record("+a", "a")
    for number in (0, 1, 0, 1, 1):
        recording.tenant(number)
    recording.drop(0)
    recording.tenant(1)
    what = [("tenant", 0), ("tenant", 1), ("drop", 0), ("tenant", 1)]
    assert recording.events == [("begin", 0), ("run", 0), *what]


def test_the_registry_says_what_orders_ranks(monkeypatch):
    steps = record("+A", "A", "-A", "+B", "B", "-B")
    assert solve(steps)[0].barriers == ()
    early = [Requirement(where, enters=False) for where in ("output_tensor", "input_tensor")]
    _declared(monkeypatch, synchronizes=False, requirements=tuple(early))
    assert solve(steps)[0].barriers != ()


def test_buffers_that_are_never_live_together_share_bytes():
    plan, _ = solve(record("+a", "a", "+b", "b", "-a", "+C", "C", "-b", "-C"))
    assert plan.peak_bytes == plan.lower_bound_bytes == 2 * 256
    assert plan.barriers == ()
    assert [b.op for b in plan.problem.buffers] == [
        "c10d::_allgather_base_",
        "c10d::_allgather_base_",
        "c10d::_reduce_scatter_base_",
    ]


def test_buffers_that_no_collective_ran_on_are_not_planned():
    plan, stretches = solve(record("+a", "-a", "+b", "b", "-b"))
    assert list(plan.placements) == ["0001.forward.b.all_gather"]
    assert [[p.call.key.site for p in s] for s in stretches] == [["b"]]


def test_a_buffer_that_outlives_its_recording_shares_with_none():
    plan, _ = solve(record("+a", "a", "-a", "+b", "b", "-b", "+c", "c"))
    assert plan.peak_bytes == 2 * 256
    kept = plan.placements["0002.forward.c.all_gather"]
    assert all(
        p.end <= kept.offset or kept.end <= p.offset
        for name, p in plan.placements.items()
        if ".c." not in name
    )


def test_what_was_left_out_is_explained():
    plan, stretches = solve(
        record("+a", "a", "-a", "+B", "B", "-B"),
        algorithm_of=lambda call: (
            Algorithm("ordinary", "slow")
            if call.key.kind == "reduce_scatter"
            else Algorithm("symmetric")
        ),
    )
    (out,) = plan.unplanned
    assert (out.reason, out.where, out.nbytes) == ("slow", "input", 256)
    assert [p.buffer is None for p in stretches[0]] == [False, True]


def test_groups_inside_another_share_its_segment_and_others_do_not():
    recording = Recording()
    for site, group in (("a", "world"), ("b", "pair"), ("c", "other")):
        index = recording.begin(key(site), 256)
        recording.run(index, group)
        recording.drop(index)
    plan, _ = solve(recording)
    assert sorted(s.groups for s in plan.segments) == [("other",), ("pair", "world")]
    assert plan.peak_bytes == 2 * 256


def test_drops_survive_being_told_to_others():
    recording = record("+a", "a", "+b", "-a", "b", "+c", "c", "-c", "-b")
    drops = recording.drops()
    assert drops == [(3, 0), (6, 0), (6, 0)]
    again = recording.with_drops(drops)
    assert again.drops() == drops
    assert [e for e in again.events if e[0] != "drop"] == [
        e for e in recording.events if e[0] != "drop"
    ]
    cut = recording.with_drops([None, (4, 0), (99, 0)])
    assert cut.drops() == [None, (4, 0), None]


def test_drops_are_told_by_what_all_ranks_see():
    """Tenants run here and there only; what is without them is the same for all."""
    texts = ("+a", "a", "+b", "-a", "b", "-b")
    plain, hosting = record(*texts), Recording()
    for number, (what, index) in enumerate(plain.events):
        if what == "begin":
            hosting.begin(plain.collectives[index].key, plain.collectives[index].nbytes)
        else:
            hosting.events.append((what, index))
        hosting.tenant(number % 2)
    hosting.collectives[:] = plain.collectives
    drops = hosting.drops()
    assert [before for before, _ in drops] == [before for before, _ in plain.drops()]
    assert hosting.with_drops(drops).events == hosting.events
    latest = [max(a, b) for a, b in zip(drops, plain.drops(), strict=True)]
    there, here = (r.with_drops(latest) for r in (plain, hosting))
    assert there.events == [e for e in here.events if e[0] != "tenant"]
    assert solve(there)[0].fingerprint == solve(here)[0].fingerprint


def schedule(*stretches):
    """A schedule of sites, each stretch a text; capitals are left out of the plan."""
    recordings = []
    for stretch in stretches:
        recording = Recording()
        for site in stretch:
            index = recording.begin(key(site), 256)
            recording.run(index, "world")
            recording.drop(index)
        recordings.append(recording)
    plan, calls = solve(*recordings)
    return Schedule(plan, calls)


def follow(made, sites):
    """Index of each site's collective (None: unknown), and whether all came in order."""
    found, in_order = [], []
    for site in sites:
        counts = Counter()
        scheduled = made.follow(key(site), counts)
        found.append(None if scheduled is None else made.collectives.index(scheduled))
        in_order.append(scheduled is not None and not counts["reordered"])
    return found, in_order


def test_a_schedule_is_followed_again_and_again():
    collectives, in_order = follow(schedule("abcb"), "abcbabcb")
    assert collectives == [0, 1, 2, 3] * 2
    assert all(in_order)


@pytest.mark.parametrize(
    ("sites", "collectives", "in_order"),
    [
        ("acb", [0, 2, 3], [True, False, True]),  # one is skipped
        ("abab", [0, 1, 0, 1], [True, True, False, True]),  # broken off, begun again
        ("axbc", [0, None, 1, 2], [True, False, True, True]),  # one is unknown
        ("aaab", [0, 0, 0, 1], [True, False, False, True]),  # used three times
    ],
)
def test_divergences_go_on_from_where_the_program_is(sites, collectives, in_order):
    assert follow(schedule("abcb"), sites) == (collectives, in_order)


def test_the_newest_stretch_is_followed_first():
    made = schedule("ab", "acb")
    assert follow(made, "acbacb") == ([2, 3, 4] * 2, [True] * 6)
    assert follow(made, "ab")[0] == [2, 4]


@given(
    stretches=st.lists(st.text("abcd", min_size=1, max_size=6), min_size=1, max_size=3),
    sites=st.text("abcde", max_size=20),
)
def test_a_schedule_is_a_function_of_the_sequence(stretches, sites):
    """Two ranks that see the same collectives give the same answers, and the right ones."""
    one, other = schedule(*stretches), schedule(*stretches)
    known = set("".join(stretches))
    for site in sites:
        counts, counts_there = Counter(), Counter()
        scheduled = one.follow(key(site), counts)
        scheduled_there = other.follow(key(site), counts_there)
        assert counts == counts_there
        assert (scheduled is None) == (scheduled_there is None) == (site not in known)
        if scheduled is not None:
            assert scheduled.call == scheduled_there.call
            assert scheduled.place == scheduled_there.place
            assert scheduled.call.key.site == site


def test_what_is_left_out_has_no_place():
    call = Call(key("a"), 256, "world")
    plan, _ = solve(record("+b", "b", "-b"))
    made = Schedule(plan, [[Planned(call, None, algorithm=Algorithm("ordinary", "slow"))]])
    scheduled = made.follow(call.key, Counter())
    assert scheduled.place is None
    assert scheduled.algorithm.reason == "slow"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_leased_bytes_come_back_when_the_last_view_goes(dtype):
    segment = torch.zeros(1024, dtype=torch.uint8)
    came_back = []
    leased = lease_out(segment[256:768].view(dtype), lambda: came_back.append(1))
    assert leased.data_ptr() == segment.data_ptr() + 256
    assert leased.dtype == dtype
    view = leased.view(2, -1)[1]
    leased.fill_(1)
    assert segment[256:768].any()
    assert not segment[:256].any()
    del leased
    assert not came_back
    del view
    assert came_back == [1]


def test_leased_bytes_keep_their_memory():
    leased = lease_out(torch.full((1 << 16,), 7.0), lambda: None)
    gc.collect()
    assert bool((leased == 7.0).all())


def test_nothing_leased_is_back_at_once():
    came_back = []
    lease_out(torch.empty(0), lambda: came_back.append(1))
    assert came_back == [1]


def test_bytes_may_come_back_in_any_thread():
    came_back = []
    leased = [lease_out(torch.zeros(4), lambda: came_back.append(threading.get_ident()))]
    thread = threading.Thread(target=leased.clear)
    thread.start()
    thread.join()
    assert len(came_back) == 1


def test_a_tenant_shares_its_bytes_with_what_is_dead_while_it_runs():
    from types import SimpleNamespace

    from symmplan.integrate.fsdp.plans import _needs

    spec = SimpleNamespace(groups=("g",))
    segments = {"s0": SimpleNamespace(nbytes=4096, spec=spec, parent=None)}
    arena = SimpleNamespace(segments=segments, user="somebody")
    needs = _needs(3, SimpleNamespace(arena=arena, align=1024))
    recording = Recording()
    for _ in range(2):
        recording.tenant(3)
        index = recording.begin(Key("m", "all_gather", 64, "float32", False), 4096)
        recording.run(index, "g")
        recording.drop(index)
    problem, _ = problem_of([recording], {"g": (0, 1)}, tenants={3: needs})
    (mine,) = (b for b in problem.buffers if b.op == "somebody")
    assert (mine.name, mine.nbytes, mine.align) == ("tenant3.s0", 4096, 1024)
    plan = plan_problem(problem)
    plan.verify()
    theirs = [p for name, p in plan.placements.items() if name != mine.name]
    place = plan.placements[mine.name]
    assert not all(p.end <= place.offset or place.end <= p.offset for p in theirs)


def test_pushes_meet_first_where_nothing_else_makes_a_slot_free():
    """A slot twice in a row, and whatever comes behind a push that was never summed."""
    import torch.distributed as dist

    from symmplan.integrate.fsdp.push import Pushes
    from symmplan.model import Placement

    class Meeting:
        count = 0

        def enter(self, call, free=(), site=""):
            self.count += 1
            self.said = [free]

        def free_words(self):
            return self.said

    meeting, memory = Meeting(), torch.zeros(64, dtype=torch.uint8)
    pushes = Pushes([memory], meeting, 0, torch.device("cpu"))
    first, second = Placement("s", 0, 32), Placement("s", 32, 32)
    met = []
    for slot, sums in (
        (first, True),
        (second, True),
        (second, False),
        (first, True),
        (second, True),
    ):
        before = meeting.count
        pushes.send([torch.arange(4.0)], slot, torch.float32)
        met.append(meeting.count - before)
        if sums:
            output = torch.empty(4)
            pushes.reduce(output, dist.ReduceOp.SUM, torch.float32, pytest.fail)()
            assert output.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert met == [0, 0, 1, 1, 0]
