"""FSDP2, a compiled graph and an eager session lie in one segment."""

from __future__ import annotations

import pytest
import torch
from held import segments_of_plans
from ranks import pool_of

pytestmark = pytest.mark.ranks

WIDTH, ROWS = 32, 8

two, four = pool_of(2, timeout=200.0), pool_of(4, timeout=200.0)


def _gathered(x, group):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x * 1.0, 2, group))


def _summed(x, group):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x * 1.0, "sum", group))


def _graph(x, group):
    """Two collectives in turn, as a graph."""
    return _summed(_gathered(x, group).sin(), group)[:ROWS] + x


def _program(sharded, graph, group, turn, step=lambda: None, *, keeps=False):
    """One iteration: calls of its own, and between them a graph and sharded modules.

    In the first these come behind it: torch runs no compiled code while a session records. Who
    ``keeps`` still has a tensor of the session when the iteration ends.
    """
    torch.manual_seed(1000 * turn + torch.distributed.get_rank())
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    found = []

    def others():
        between = graph(y, group)
        loss = sharded(between).square().mean()
        found.extend([between.clone(), loss.detach()])
        loss.backward()
        found.extend(p.grad.to_local().clone() for p in sharded.parameters())
        for p in sharded.parameters():
            p.grad = None

    mine = _gathered(x, group)
    if turn:
        others()
    found += [mine.clone(), _summed(x.cos() + mine[:ROWS], group).clone()]
    mine = mine if keeps else None
    step()
    del mine
    if not turn:
        others()
    return found


def _made(mesh):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _alike(a, b, size):
    """Sums of two have but one order."""
    return torch.equal(a, b) if size == 2 else torch.allclose(a, b, atol=1e-6)


def _all_three(rank, size, late, order="together", keeps=()):
    """Whether each iteration gives the bits that it gives without symmplan; and the segments."""
    import time

    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    mesh = dist.init_device_mesh("cpu", (size,))
    pairs = [dist.new_group([i, i + 1]) for i in range(0, size, 2)]
    pair = dist.group.WORLD if size == 2 else pairs[rank // 2]
    group = pair.group_name
    plain, model = _made(mesh), _made(mesh)
    want = [_program(plain, _graph, group, turn) for turn in range(7)]

    options = {"timeout": 60.0, "memory": "shm", "choose": "placed"}
    backend = symmplan.backend(inner="eager", **options)
    graph = torch.compile(_graph, backend=backend, fullgraph=True)
    graph(torch.zeros(ROWS, WIDTH), group)  # nothing is compiled inside a session
    handle = symmplan.fsdp.apply(model, **options)
    if order == "sharded first":  # planned before there is a session
        for turn in range(2):
            _program(model, graph, group, turn)
    differences, held = [], []
    with symmplan.eager(pair, **options) as session:
        for turn in range(7):
            if rank == late[turn % len(late)]:
                time.sleep(0.05)
            kept = rank == 1 and turn in keeps
            found = _program(model, graph, group, turn, session.step, keeps=kept)
            same = [_alike(a, b, size) for a, b in zip(found, want[turn], strict=True)]
            differences += [] if all(same) else [(turn, same)]
            held.append(
                [(s.nbytes, len({*s.groups}), sorted(s.users)) for s in segments_of_plans()]
            )
        stats = session.stats
        needs = (handle.plan.peak_bytes, session.plan.peak_bytes, backend.stats.segment_bytes)
    left = [sorted(s.users) for s in segments_of_plans()]
    behind = []
    for turn in range(2):  # the others go on
        found = _program(model, graph, group, turn)
        behind += [_alike(a, b, size) for a, b in zip(found, want[turn], strict=True)]
    handle.remove()
    backend.release()
    dist.barrier()
    return {
        "differences": differences,
        "held": held,
        "served": (stats.served, backend.stats.served, handle.stats.served),
        "copied": (backend.stats.evacuated, handle.stats.copies),
        "needs": needs,
        "left": left,
        "behind": all(behind),
        "end": len(segments_of_plans()),
    }


ALL = ["FSDP2", "compiled graphs", "eager session"]


@pytest.mark.parametrize("order", ["together", "sharded first"])
def test_fsdp2_a_graph_and_a_session_share_a_segment(two, order):
    """Also where one rank keeps a tensor of the session over the end of some iterations.

    The others run in the midst of all iterations of the session but the recorded one.
    """
    results = two.run(_all_three, (0, 1, 1, 0), order, (1, 2, 4))
    for found in results:
        assert found["differences"] == []
        ((nbytes, groups, users),) = found["held"][-1]
        assert users == ALL
        assert groups == 1
        assert nbytes == found["needs"][0]
        assert all(found["served"])
        assert found["copied"] == (0, 0)
        assert found["left"] == [ALL[:2]]
        assert found["behind"]
        assert found["end"] == 0
    assert results[0]["held"] == results[1]["held"]


@pytest.mark.further
@pytest.mark.parametrize("order", ["together", "sharded first"])
def test_a_session_of_other_ranks_stays_apart(four, order):
    """It comes and goes on some of the model's ranks alone."""
    results = four.run(_all_three, (0, 3, 1), order)
    for found in results:
        assert found["differences"] == []
        assert ALL[2:] in [users for *_, users in found["held"][-1]]
        assert found["end"] == 0


def _some_enter(rank, size):
    """Ranks 0 and 1 are in a session when FSDP2 plans on all ranks, before and behind its plan."""
    import contextlib

    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    mesh = dist.init_device_mesh("cpu", (size,))
    pair = dist.new_group([0, 1])
    options = {"timeout": 20.0, "memory": "shm", "choose": "placed"}
    plain, model = _made(mesh), _made(mesh)

    def program(sharded, turn, step):
        torch.manual_seed(1000 * turn + rank)
        x = torch.randn(ROWS, WIDTH)
        found = [_gathered(x, pair.group_name).clone()] if rank < 2 else []
        loss = sharded(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.to_local().clone() for p in sharded.parameters())]
        for p in sharded.parameters():
            p.grad = None
        step()
        return found

    want = [program(plain, turn, lambda: None) for turn in range(6)]
    handle = symmplan.fsdp.apply(model, **options)
    same = []

    def steps(turns, step):
        for turn in turns:
            found = program(model, turn, step)
            same.extend(_alike(a, b, size) for a, b in zip(found, want[turn], strict=True))

    inside = symmplan.eager(pair, **options) if rank < 2 else contextlib.nullcontext()
    with inside as session:
        steps(range(4), session.step if rank < 2 else lambda: None)
        served = session.stats.served if rank < 2 else 1
    steps(range(4, 6), lambda: None)
    planned = handle.plan is not None, handle.stats.served > 0
    handle.remove()
    dist.barrier()
    if rank < 2:
        dist.destroy_process_group(pair)
    return all(same), served > 0, planned, len(segments_of_plans())


@pytest.mark.further
def test_fsdp2_plans_where_some_ranks_are_in_a_session(four):
    assert four.run(_some_enter) == [(True, True, (True, True), 0)] * 4
