"""Compiled graphs and eager sessions of devices on several hosts, in two levels.

python -m pytest -m gpu tests/gpu/test_hosts_graphs_gpu.py                 # four devices
SHARE_DEVICE=1 python -m pytest -m gpu tests/gpu/test_hosts_graphs_gpu.py  # four ranks on fewer
"""

from __future__ import annotations

import random
import time

import pytest
import torch
from devices import finish, needs_devices, ranks_on
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from one_sided_programs import one_sided_programs
from ranks import RankPool
from test_hosts_gpu import _of_two, _on_host
from test_right_numbers import EXAMPLES, PAUSES, SEEDS, _check, _compiled, _eager, _setup

pytestmark = [*needs_devices(4), pytest.mark.timeout(900)]
F = torch.ops._c10d_functional
#: Cycles for which a stream sleeps: long enough that a missing wait shows in the results.
_SLEEP = 5_000_000


@pytest.fixture(scope="module")
def four():
    """Two hosts of two ranks each."""
    with ranks_on(4, enter=_of_two, timeout=300.0) as ranks:
        ranks.run(_on_host, _of_two)  # who share a device had others when they met
        ranks.run(_setup)
        yield ranks
        RankPool.outcomes(ranks, finish)


def _late(rank, step):
    time.sleep(random.Random(100 * step + rank).choice([0.0, 0.0, 0.02]))
    if (rank + step) % 3 == 0:
        torch.cuda._sleep(_SLEEP)


def _overlapped(x, y, size, group):
    """Collectives under way beside products, whose inputs are dropped at once."""
    gathered = F.all_gather_into_tensor(x * 2, size, group)
    scattered = F.reduce_scatter_tensor(y + 1, "sum", size, group)
    between = (x * 3).relu() @ x.T  # may take the memory of what was given
    reduced = F.all_reduce(between, "sum", group)
    again = (y - 1).relu() + y
    gathered, scattered = F.wait_tensor(gathered), F.wait_tensor(scattered)
    second = F.wait_tensor(F.all_gather_into_tensor(scattered, size, group))
    same = F.wait_tensor(F.broadcast(second + 1, 0, group))
    return gathered + 1, second * 2, F.wait_tensor(reduced) + 3, again, same


def _given(rank, size, step, rows=512, columns=256):
    chance = torch.Generator("cuda").manual_seed(10 * step + rank)
    shape = {"generator": chance, "device": "cuda"}
    x = torch.randint(-2, 3, (rows, columns), **shape).float()
    return x, torch.randint(-2, 3, (rows * size, columns), **shape).float()


def _graphs(rank, size, inner, choose):
    """Wrong outputs of a compiled graph, how its collectives ran, reasons, and what was measured.

    The numbers are whole, so that the order of sums shows nowhere.
    """
    import torch.distributed as dist

    import symmplan

    group = dist.group.WORLD.group_name
    torch._dynamo.reset()
    backend = symmplan.backend(inner=inner, memory="cuda", choose=choose, timeout=120.0)
    compiled = torch.compile(_overlapped, backend=backend, fullgraph=True)
    wrong = []
    for step in range(6):
        _late(rank, step)
        given = _given(rank, size, step)
        found = [program(*given, size, group) for program in (compiled, _overlapped)]
        pairs = zip(*found, strict=True)
        wrong += [(step, i) for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    checked = backend.check(lambda: compiled(*_given(rank, size, 0), size, group))
    ran = sorted({(seen.planned.algorithm, seen.algorithm) for seen in checked.calls})
    reasons = {u.reason for p in backend.plans for u in p.unplanned}
    measured = sorted({tuple(sorted(c.seconds)) for c in backend.choices})
    placed = backend.stats.placed
    backend.release()
    return wrong, placed, ran, reasons, measured


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.first)])
def test_graphs_in_two_levels(four, inner):
    from symmplan.place.algorithms import ONE_HOST

    for wrong, placed, ran, reasons, _ in four.run(_graphs, inner, "placed"):
        assert not wrong
        assert placed >= 4
        assert ran == [("two-level", "two-level")]
        assert ONE_HOST in reasons  # of the broadcast


def _sessions(rank, size, how):
    """Calls of ``torch.distributed`` on one stream that are waited for on another."""
    import torch.distributed as dist

    import symmplan

    group = dist.group.WORLD.group_name
    wrong, side = [], torch.cuda.Stream()
    with symmplan.eager(memory="cuda", choose="placed", timeout=120.0) as session:

        def iteration(step):
            _late(rank, step)
            main = torch.cuda.current_stream()
            x, y = _given(rank, size, step)
            whole = torch.full((512 * size, 256), -1.0, device="cuda")
            part, total = torch.empty(512, 256, device="cuda"), x * 3
            works = []
            if how == "functional":
                whole = F.all_gather_into_tensor(x, size, group)
                part = F.reduce_scatter_tensor(y, "sum", size, group)
                total = F.all_reduce(total, "sum", group)
            else:
                works = [
                    dist.reduce_scatter_tensor(part, y, async_op=how != "blocking"),
                    dist.all_reduce(total, async_op=how != "blocking"),
                    dist.all_gather_into_tensor(whole, x, async_op=how != "blocking"),
                ]
            if how == "blocking":
                side.wait_stream(main)
            with torch.cuda.stream(side):
                for work in works:
                    if how != "blocking":
                        (work if how == "wait" else work.get_future()).wait()
                if how == "functional":
                    whole, part, total = map(F.wait_tensor, (whole, part, total))
                found = whole + 1, part * 2, total - 1
            main.wait_stream(side)
            every = [_given(r, size, step) for r in range(size)]
            sums = sum(b for _, b in every).view(size, 512, 256)
            wanted = (
                torch.cat([a for a, _ in every]) + 1,
                sums[rank] * 2,
                sum(3 * a for a, _ in every) - 1,
            )
            pairs = zip(found, wanted, strict=True)
            wrong.extend((step, i) for i, (a, b) in enumerate(pairs) if not torch.equal(a, b))
            del x, y, whole, part, total, works, found
            session.step()

        for step in range(6):
            iteration(step)
        checked = session.check(lambda: iteration(0))
        ran = sorted({(seen.planned.algorithm, seen.algorithm) for seen in checked.calls})
        return wrong, session.stats.served, ran


@pytest.mark.parametrize(
    "how", ["blocking", pytest.param("wait", marks=pytest.mark.first), "future", "functional"]
)
def test_sessions_in_two_levels(four, how):
    for wrong, served, ran in four.run(_sessions, how):
        assert not wrong
        assert served >= 5 * 3
        assert ran == [("two-level", "two-level")]


def test_graphs_measure_two_levels_beside_the_ordinary_way(four):
    first, *others = four.run(_graphs, "eager", "measure")
    for wrong, placed, *_ in (first, *others):
        assert not wrong
        assert placed == first[1]
    assert all(other[4] == first[4] for other in others)
    assert first[4] == [("ordinary", "two-level")]


def _replayed(rank, size):
    """Replays of a CUDA graph of a compiled program that differ from the program."""
    import torch.distributed as dist

    import symmplan

    group = dist.group.WORLD.group_name
    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", memory="cuda", choose="placed", timeout=120.0)
    compiled = torch.compile(_overlapped, backend=backend, fullgraph=True)
    given = _given(rank, size, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            compiled(*given, size, group)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = compiled(*given, size, group)
    wrong = []
    for step in range(1, 5):
        for tensor, new in zip(given, _given(rank, size, step), strict=True):
            tensor.copy_(new)
        graph.replay()
        pairs = zip(made, _overlapped(*given, size, group), strict=True)
        wrong += [(step, i) for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    torch.cuda.synchronize()
    dist.barrier()
    placed = backend.stats.placed
    del graph, made
    backend.release()
    return wrong, placed


def test_cuda_graphs_in_two_levels(four):
    for wrong, placed in four.run(_replayed):
        assert not wrong
        assert placed >= 4


MANY = settings(max_examples=EXAMPLES, deadline=None, phases=[Phase.generate])


def _eager_there(rank, size, *given):
    return _eager(rank, size, *given, device="cuda", memory="cuda")


def _compiled_there(rank, size, *given):
    return _compiled(rank, size, *given, device="cuda", memory="cuda")


@MANY
@given(data=st.data())
def test_random_eager_programs(four, data):
    program = data.draw(one_sided_programs(4))
    _check(four, _eager_there, program, "auto", data.draw(PAUSES), data.draw(SEEDS))


@MANY
@given(data=st.data())
def test_random_compiled_programs(four, data):
    program = data.draw(one_sided_programs(4, in_place=False))
    _check(four, _compiled_there, program, "auto", data.draw(PAUSES), data.draw(SEEDS))
