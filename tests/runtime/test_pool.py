"""Compiled graphs and eager sessions of the same ranks lie in one segment, also without FSDP2."""

from __future__ import annotations

import itertools

import pytest
import torch
from pool_programs import (
    OPTIONS,
    ROWS,
    WIDTH,
    differ,
    graph_of,
    graphs_of,
    inputs,
    iteration,
    late,
    own,
    users_of,
)
from ranks import pool_of

pytestmark = pytest.mark.ranks


two = pool_of(2, timeout=200.0)


def _all(rank, size, keeps=()):
    """Two backends and a session: who lies where, and whether their numbers are those of torch."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    group = dist.group.WORLD.group_name
    wanted = [[f(inputs(turn), turn, group) for f in (iteration, graphs_of)] for turn in range(8)]
    backends = [symmplan.backend(inner="eager", **OPTIONS) for _ in range(2)]
    graphs = [torch.compile(graph_of, backend=b, fullgraph=True, dynamic=False) for b in backends]
    seen, wrong = [], []
    for graph in graphs:
        wrong += differ(graphs_of(inputs(0), 0, group, [graph] * 2), wanted[0][1], "before")
        seen.append(users_of())
    with symmplan.eager(**OPTIONS) as session:
        for turn in range(6):
            late(rank, turn)
            held = iteration(inputs(turn), turn, group)
            if turn:  # nothing compiled runs while the session records
                both = graphs_of(inputs(turn), turn, group, graphs)
                wrong += differ(both, wanted[turn][1], ("graph", turn))
            wrong += differ(held, wanted[turn][0], ("session", turn))
            held = held if rank == 1 and turn in keeps else None
            session.step()
            del held
            seen.append(users_of())
        served = session.stats.served
    seen.append(users_of())
    for turn in (6, 7):
        late(rank, turn)
        both = graphs_of(inputs(turn), turn, group, graphs)
        wrong += differ(both, wanted[turn][1], ("behind", turn))
    needs = [b.stats.segment_bytes for b in backends]
    for backend in backends:
        backend.release()
        seen.append(users_of())
    return seen, wrong, needs, served


def test_two_backends_and_a_session_lie_in_one_segment(two):
    first, second = two.run(_all)
    assert first == second
    seen, wrong, needs, served = first
    assert wrong == []
    assert served
    graphs, session = ["compiled graphs"], ["eager session"]
    assert [users for _, users in seen[0]] == [graphs]
    assert seen[0][0][0] == needs[0]
    assert [users for _, users in seen[1]] == [graphs]
    ((nbytes, users),) = seen[-4]
    assert users == sorted(graphs + session)
    assert nbytes >= sum(needs)
    assert [users for _, users in seen[-3]] == [graphs]
    assert [users for _, users in seen[-2]] == [graphs]
    assert seen[-1] == []


def _crosses(rank, size):
    """A forward has saved what a backward reads; meanwhile others come, and the segment grows."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    import symmplan

    torch._dynamo.reset()
    group = dist.group.WORLD.group_name

    def whole(x, group):
        y = all_gather_tensor_autograd(x * 2.0, 0, group)
        return (y.sin() * y.cos()).sum()

    first, second = (symmplan.backend(inner="eager", **OPTIONS) for _ in range(2))
    graph = torch.compile(whole, backend=first, fullgraph=True, dynamic=False)
    other = torch.compile(graph_of, backend=second, fullgraph=True, dynamic=False)
    wrong, seen, moved = [], [], []
    for turn in range(4):
        x = inputs(turn)[0].requires_grad_()
        want = torch.autograd.grad(whole(x, group), x)
        late(rank, turn)
        loss = graph(x, group)
        rows = ROWS << turn  # larger each time
        z = inputs(turn, rows)[0]
        wrong += differ([other(z, group)], [graph_of(z, group)], ("between", turn))
        (shared,) = first._pool._shared.values()
        moved.append(any(lease.held for lease in shared.by_place.values()))
        late(rank, turn + 1)
        wrong += differ(torch.autograd.grad(loss, x), want, ("gradient", turn))
        seen.append(users_of())
    stats = first.stats
    wrong += [] if all(moved) else ["not moved"]
    for backend in (first, second):
        backend.release()
    return wrong, seen, stats.crossing_bytes, stats.evacuated, users_of()


def test_what_a_forward_saved_moves_with_the_segment(two):
    first, second = two.run(_crosses)
    assert first == second
    wrong, seen, crossing, evacuated, left = first
    assert wrong == []
    assert crossing
    assert evacuated == 0
    sizes = [nbytes for ((nbytes, _),) in seen]
    assert sizes == sorted({*sizes})  # one segment, and it grew each time
    assert left == []


def _unlike(rank, size):
    """Backends end on one rank before the other; the next parts lie at one offset all the same."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    group = dist.group.WORLD.group_name
    backends = [symmplan.backend(inner="eager", **OPTIONS) for _ in range(4)]
    wrong, offsets = [], []

    def run(i, turn):
        x = inputs(turn, ROWS)[0] + i
        late(rank, turn)
        got = torch.compile(graph_of, backend=backends[i], fullgraph=True, dynamic=False)(x, group)
        wrong.extend(differ([got], [graph_of(x, group)], (i, turn)))
        (arena,) = backends[i]._pool.arenas
        offsets.append([s.begin for s in arena.segments.values()])

    run(0, 0)
    run(1, 1)
    if rank == 0:
        backends[0].release()
    torch._dynamo.reset()
    run(2, 2)  # on rank 1 the first one's bytes are not free yet
    if rank == 1:
        backends[0].release()
    torch._dynamo.reset()
    run(3, 3)
    held = users_of()
    for backend in backends:
        backend.release()
    return wrong, offsets, held, users_of()


def test_a_part_is_free_once_it_is_on_all_ranks(two):
    first, second = two.run(_unlike)
    assert first[0] == second[0] == []
    assert first[1] == second[1]
    # The second made the segment grow; the third came while a part was free on one rank alone.
    assert first[1] == [[0], [0], [0], [4096]]
    assert len(first[2]) == len(second[2]) == 2
    assert first[3] == second[3] == []


def _busy(rank, size, why):
    """One that cannot move: who comes next gets a segment beside, and all is as it was."""
    from unittest import mock

    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    group = dist.group.WORLD.group_name
    first, second = (symmplan.backend(inner="eager", **OPTIONS) for _ in range(2))
    graph = torch.compile(graph_of, backend=first, fullgraph=True, dynamic=False)
    other = torch.compile(graph_of, backend=second, fullgraph=True, dynamic=False)
    x, y = inputs(0)
    wrong = differ([graph(x, group)], [graph_of(x, group)], "first")
    (shared,) = first._pool._shared.values()
    before = shared.arena
    if why == "no room":
        with mock.patch("symmplan.memory.pool._Hosts._has_room", return_value=False):
            got = other(y, group)
    elif rank == 1 or why == "it runs everywhere":  # as inside a run of it
        with shared.lock:
            got = other(y, group)
    else:
        got = other(y, group)
    wrong += differ([got], [graph_of(y, group)], "other")
    stayed = shared.arena is before
    for turn in range(3):
        late(rank, turn)
        x, y = inputs(turn)
        wrong += differ(
            [graph(x, group), other(y, group)], [graph_of(x, group), graph_of(y, group)], turn
        )
    seen = users_of()
    for backend in (first, second):
        backend.release()
    return wrong, stayed, seen, users_of()


@pytest.mark.all_cases
@pytest.mark.parametrize("why", ["it runs on one rank", "it runs everywhere", "no room"])
def test_who_cannot_move_stays_and_others_lie_beside(two, why):
    first, second = two.run(_busy, why)
    assert first == second
    wrong, stayed, seen, left = first
    assert wrong == []
    assert stayed
    assert len(seen) == 2
    assert left == []


def _failing(rank, size):
    """A session ends in an error on all ranks; a graph in the same segment runs on."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    group = dist.group.WORLD.group_name
    backend = symmplan.backend(inner="eager", **OPTIONS)
    graph = torch.compile(graph_of, backend=backend, fullgraph=True, dynamic=False)
    graph(inputs(0)[0], group)
    wrong = []
    together = []

    def diverges():
        with symmplan.eager(**OPTIONS) as session:
            for turn in range(4):
                x, _ = inputs(turn)
                own(x, group)
                together[:] = users_of()
                if turn == 2 and rank == 1:
                    own(x, group)  # once more than planned
                session.step()

    with pytest.raises(symmplan.errors.SymmplanError):
        diverges()
    for turn in range(4):
        late(rank, turn)
        x, _ = inputs(turn)
        got, want = graph(x, group), graph_of(x, group)
        wrong += differ([got], [want], turn)
    with symmplan.eager(**OPTIONS) as session:  # and so does the next session
        for turn in range(3):
            x, _ = inputs(turn)
            got = [t.clone() for t in own(x, group)]
            session.step()
    wrong += differ(got, own(x, group), "session")
    backend.release()
    return wrong, together, users_of()


def test_a_session_that_fails_breaks_nothing_of_the_others(two):
    first, second = two.run(_failing)
    for wrong, together, left in (first, second):
        assert wrong == []
        assert [users for _, users in together] == [["compiled graphs", "eager session"]]
        assert left == []


def _pinned(rank, size, holds):
    """Parameters live in the segment while others come; a rank may hold another view of one."""
    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    group = dist.group.WORLD.group_name
    weight = torch.nn.Parameter(torch.full((ROWS, WIDTH), 1.0 + rank))
    plain = torch.nn.Parameter(weight.detach().clone())

    class Whole(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            ops = torch.ops._c10d_functional
            whole = ops.wait_tensor(ops.all_gather_into_tensor(self.weight, 2, group))
            return whole[-len(x) :] * x

    options = {**OPTIONS, "collectives": "process group"}  # which need the input placed, too
    first = symmplan.backend(inner="eager", bind=True, **options)
    second = symmplan.backend(inner="eager", **OPTIONS)
    graph = torch.compile(Whole(weight), backend=first, fullgraph=True, dynamic=False)
    other = torch.compile(graph_of, backend=second, fullgraph=True, dynamic=False)
    wrong, addresses, seen = [], [], []
    view = None
    with torch.no_grad():
        for turn in range(5):
            x = inputs(turn)[0]
            late(rank, turn)
            wrong += differ([graph(x)], [Whole(plain)(x)], ("pinned", turn))
            z = inputs(turn, ROWS << max(0, turn - 1))[1]  # larger each time from the third on
            if holds and turn == 2 and rank == 1:
                view = weight.detach()
            wrong += differ([other(z, group)], [graph_of(z, group)], ("other", turn))
            weight.add_(0.5)
            plain.add_(0.5)
            addresses.append(weight.data_ptr())
            seen.append(users_of())
    kept, missed = first.stats.kept, first.stats.missed
    if view is not None:
        wrong += [] if torch.equal(view, weight) else ["view"]
        del view
    for backend in (first, second):
        backend.release()
    wrong += [] if torch.equal(weight, plain) else ["parameter"]
    # One after another: memory that was given back may be mapped at its address again.
    moves = sum(before != now for before, now in itertools.pairwise(addresses))
    return wrong, seen, moves, kept, missed, users_of()


@pytest.mark.parametrize("holds", [False, True])
def test_pinned_inputs_move_with_the_segment_unless_somebody_looks(two, holds):
    results = two.run(_pinned, holds)
    for wrong, seen, moves, kept, missed, left in results:
        assert wrong == []
        assert [users for _, users in seen[1]] == [["compiled graphs", "pinned inputs"]]
        if holds:
            assert len(seen[-1]) == 2
        else:
            assert [len(held) for held in seen] == [1] * 5
            assert moves >= 2
        assert kept == 1
        assert missed == 0
        assert left == []
    assert results[0][1] == results[1][1]
