"""Rows of a mixture of experts between CUDA devices: right by every algorithm."""

from __future__ import annotations

import pytest
import torch
from devices import needs_devices, pool_on
from expert_programs import (
    graph_overflows,
    graphs,
    missing_rank,
    no_synchronization,
    overflows,
    padded_calls,
    wider_rows,
    wrong_counts,
)
from test_moe import random_calls

pytestmark = [*needs_devices(), pytest.mark.all_cases]


pool = pool_on(2, timeout=110)


@pytest.mark.parametrize(
    ("seeds", "choose"),
    [
        (range(60), "push"),
        (range(60, 70), "measure"),
        pytest.param(range(70, 80), "ordinary", marks=pytest.mark.first),
        pytest.param(range(110, 120), "push", marks=pytest.mark.first),
        (range(80, 110), "symmetric"),
    ],
)
def test_rows_go_where_they_are_meant_to(pool, seeds, choose):
    first, *others = pool.run(random_calls, seeds, choose, "cuda")
    assert all(other == first for other in others)


def _streams(rank, world_size):
    """Calls on changing streams, each behind what made its rows, with a busy device between."""
    import symmplan

    device = torch.device("cuda", torch.cuda.current_device())
    side = [torch.cuda.Stream(device) for _ in range(2)]
    wrong = 0
    with symmplan.expert_parallel(max_tokens=4096, choose="push", timeout=60.0) as experts:
        counts = [1024 + 512 * r for r in range(world_size)]
        for number in range(40):
            stream = side[number % 2]
            rows = torch.full((sum(counts), 256), float(10 * number + rank), device=device)
            stream.wait_stream(torch.cuda.current_stream(device))
            routes = experts.routes(counts)
            with torch.cuda.stream(stream):
                if (number + rank) % 3 == 0:
                    torch.cuda._sleep(2_000_000)
                inside = experts.dispatch(rows, routes)
                outside = experts.combine(inside + 1, routes)
            torch.cuda.current_stream(device).wait_stream(stream)
            expected = torch.cat(
                [
                    torch.full((counts[rank], 256), 10.0 * number + s, device=device)
                    for s in range(world_size)
                ]
            )
            wrong += int(not torch.equal(inside, expected))
            wrong += int(not torch.equal(outside, rows + 1))
        torch.cuda.synchronize(device)
        assert experts.stats.served == 80
    return wrong


def test_calls_on_changing_streams(pool):
    assert pool.run(_streams) == [0, 0]


def _kernels(rank, world_size):
    """What runs on the device in one dispatch and its combine."""
    import symmplan

    device = torch.device("cuda", torch.cuda.current_device())
    with symmplan.expert_parallel(max_tokens=8192, choose="push", timeout=60.0) as experts:
        routes = experts.routes([4096] * world_size)
        rows = torch.randn(4096 * world_size, 1024, device=device, dtype=torch.bfloat16)
        experts.combine(experts.dispatch(rows, routes), routes)
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            experts.combine(experts.dispatch(rows, routes), routes)
            torch.cuda.synchronize(device)
    return [event.name for event in profile.events()]


def test_rows_are_copied_without_kernels(pool):
    for names in pool.run(_kernels):
        assert not [name for name in names if "SendRecv" in name or "AllToAll" in name], names
        assert [name for name in names if name.startswith("Memcpy")], names


@pytest.mark.parametrize("apart", [False, True], ids=["at_once", "apart"])
@pytest.mark.parametrize(
    ("seeds", "choose"),
    [
        (range(25), "symmetric"),
        (range(25, 30), "push"),
        pytest.param(range(30, 34), "auto", marks=pytest.mark.first),
    ],
)
def test_padded_rows_by_kernels(pool, seeds, choose, apart):
    first, *others = pool.run(padded_calls, seeds, choose, "cuda", apart)
    assert all(other == first for other in others)
    assert all(first)


@pytest.mark.parametrize("apart", [False, True], ids=["at_once", "apart"])
def test_kernels_in_a_graph_whose_routes_change(pool, apart):
    assert pool.run(graphs, range(8), apart) == [48, 48]


@pytest.mark.parametrize("apart", [False, True], ids=["at_once", "apart"])
def test_the_host_waits_for_nothing(pool, apart):
    assert pool.run(no_synchronization, apart) == [16, 16]


def test_kernels_write_nothing_that_does_not_fit(pool):
    assert pool.run(graph_overflows) == ["a rank gets 16 rows"] * 2
    for choose in ("symmetric", "push"):
        assert pool.run(overflows, choose, "cuda") == [["a rank gets 16 rows"] * 3] * 2


def test_kernels_see_counts_that_are_none(pool):
    assert pool.run(wrong_counts, "cuda") == [[(1,), (1,)]] * 2


def test_kernels_give_up_where_a_rank_does_not_come(pool):
    assert pool.run(missing_rank, "cuda") == [(1,), None]


def test_kernels_see_that_a_rank_alone_has_wider_rows(pool):
    first, last = pool.run(wider_rows, "cuda")
    assert first == [((1,), True)] * 2
    assert last == [((0,), True)] * 2
