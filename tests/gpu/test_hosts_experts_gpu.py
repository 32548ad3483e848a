"""Rows of experts of devices on several hosts, in two levels: two hosts of two by NCCL_HOSTID.

python -m pytest -m gpu tests/gpu/test_hosts_experts_gpu.py                 # four devices
SHARE_DEVICE=1 python -m pytest -m gpu tests/gpu/test_hosts_experts_gpu.py  # four ranks on fewer
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from devices import finish, needs_devices, ranks_on
from expert_programs import late, padded_calls, raised
from ranks import RankPool

pytestmark = [*needs_devices(4), pytest.mark.all_cases]
SIZE = 4


def _of_two(rank):
    """Be a rank of a host of two."""
    os.environ["NCCL_HOSTID"] = f"host {rank // 2}"


def _on_host(rank, size):
    _of_two(rank)


@pytest.fixture(scope="module")
def four():
    """Two hosts of two ranks each."""
    with ranks_on(SIZE, enter=_of_two, timeout=240.0) as ranks:
        ranks.run(_on_host)  # who share a device had others when they met
        yield ranks
        RankPool.outcomes(ranks, finish)


def _device():
    return torch.device("cuda", torch.cuda.current_device())


class _Crossed:
    """Bytes of each message between hosts, while it is entered."""

    def __enter__(self):
        from symmplan.memory.meeting.device_hosts import DeviceCounterparts

        self.sizes, self._exchange = [], DeviceCounterparts.exchange

        def exchange(counterparts, output, source, *parts):
            self.sizes.append(source.nbytes)
            return self._exchange(counterparts, output, source, *parts)

        DeviceCounterparts.exchange = exchange
        return self.sizes

    def __exit__(self, *_):
        from symmplan.memory.meeting.device_hosts import DeviceCounterparts

        DeviceCounterparts.exchange = self._exchange


def _tokens(dice, rank, device):
    """Rows of which some are equal, and how many go to each rank; all ranks draw equally often."""
    width = dice.choice([(8,), (5,), (3, 7), (), (1030,)])
    dtype = dice.choice([torch.float32, torch.bfloat16, torch.float64])
    kinds, most = dice.choice([1, 5, 4000]), dice.choice([0, 3, 40, 900])
    tables = [[dice.choice([0, dice.randint(0, most)]) for _ in range(SIZE)] for _ in range(SIZE)]
    generator = torch.Generator().manual_seed(dice.randrange(2**31) + rank)
    kept = torch.randint(-9, 9, (kinds, *width), generator=generator).to(dtype)
    rows = kept[torch.randint(kinds, (sum(tables[rank]),), generator=generator)]
    return rows.to(device), tables[rank]


def _through(layer, rows, counts, rank, apart):
    """What comes to the experts, what comes back, and its gradient; work is between, if apart."""
    rows = rows.clone().requires_grad_()
    routes = layer.routes(counts)

    def moved(move, given):
        if not apart:
            return move(given, routes)
        pending = move(given, routes, async_op=True)
        busy = torch.ones(256, 256, device=rows.device)
        (busy @ busy).sum()
        return pending.wait()

    inside = moved(layer.dispatch, rows)
    back = moved(layer.combine, inside * (rank + 1))
    (back * back).sum().backward()
    return inside.detach(), back.detach(), rows.grad


def _routed(rank, size, seeds, apart):
    """Layers that differ from torch's own way; how many calls ran in two levels, and why not."""
    import torch.distributed as dist

    import symmplan

    device, wrong = _device(), []
    given = {"memory": "cuda", "max_tokens": 4000, "timeout": 60.0}
    group, slow = dist.group.WORLD, random.Random(rank)
    with (
        symmplan.expert_parallel(group, choose="two-level", **given) as ours,
        symmplan.expert_parallel(group, choose="ordinary", **given) as plain,
    ):
        for seed in seeds:
            rows, counts = _tokens(random.Random(seed), rank, device)
            late(slow, device)
            found = [_through(layer, rows, counts, rank, apart) for layer in (ours, plain)]
            pairs = zip(*found, strict=True)
            wrong += [seed for got, want in pairs if not torch.equal(got, want)]
        torch.cuda.synchronize()
        dist.barrier()
        return wrong, ours.stats.served, ours.stats.reasons


@pytest.mark.first
@pytest.mark.parametrize("apart", [False, True], ids=["at_once", "apart"])
def test_rows_move_over_hosts_as_in_torchs_own_way(four, apart):
    for wrong, served, reasons in four.run(_routed, range(40), apart):
        assert not wrong
        assert served == 4 * 40
        assert not reasons


def _streams(rank, size, apart):
    """Calls on changing streams, each behind what made its rows, with a busy device between."""
    import torch.distributed as dist

    import symmplan

    device, wrong = _device(), 0
    side = [torch.cuda.Stream(device) for _ in range(3)]
    main = torch.cuda.current_stream(device)
    counts = [256 + 128 * r for r in range(size)]
    given = {"memory": "cuda", "max_tokens": 4096, "choose": "two-level", "timeout": 60.0}
    with symmplan.expert_parallel(dist.group.WORLD, **given) as experts:
        for number in range(40):
            first, second = side[number % 3], side[(number + apart) % 3]
            tokens = torch.randint(-9, 9, (200, 256), device=device).float()
            rows = tokens[torch.randint(200, (sum(counts),), device=device)]
            rows[:, 0] = 10 * number + rank
            first.wait_stream(main)
            routes = experts.routes(counts)
            with torch.cuda.stream(first):
                if (number + rank) % 3 == 0:
                    torch.cuda._sleep(2_000_000)
                pending = experts.dispatch(rows, routes, async_op=bool(apart))
            second.wait_stream(first)
            with torch.cuda.stream(second):
                inside = pending.wait() if apart else pending
                outside = experts.combine(inside + 1, routes)
                filled = torch.full((8192, 256), -1.0, device=device)  # in what was let go
            main.wait_stream(second)
            for tensor in (inside, outside, filled):
                tensor.record_stream(main)
            came = torch.cat([torch.full((counts[rank],), 10.0 * number + s) for s in range(size)])
            wrong += int(not torch.equal(inside[:, 0], came.to(device)))
            wrong += int(not torch.equal(outside, rows + 1))
        torch.cuda.synchronize(device)
        assert experts.stats.served == 80
    return wrong


@pytest.mark.parametrize("apart", [0, 1], ids=["at_once", "apart"])
def test_calls_on_changing_streams(four, apart):
    assert four.run(_streams, apart) == [0] * SIZE


@pytest.mark.parametrize("apart", [False, True], ids=["at_once", "apart"])
def test_padded_rows_over_hosts(four, apart):
    """No kernels move them there, and the host waits for the routes."""
    first, *others = four.run(padded_calls, range(10), "two-level", "cuda", apart, "cuda")
    assert all(other == first for other in others)
    assert all(first)


def _measured(rank, size):
    """What was measured for two widths, what differs, and how many calls ran in two levels."""
    import torch.distributed as dist

    import symmplan

    device, wrong = _device(), 0
    with symmplan.expert_parallel(
        dist.group.WORLD, memory="cuda", max_tokens=1024, timeout=60.0
    ) as experts:
        for turn in range(6):
            width = (64, 1024)[turn % 2]
            rows = torch.arange(64.0 * size, device=device).view(-1, 1).repeat(1, width) + turn
            routes = experts.routes([64] * size)
            back = experts.combine(experts.dispatch(rows, routes) * 2, routes)
            wrong += int(not torch.equal(back, rows * 2))
        choices = [(sorted(c.seconds), c.algorithm) for c in experts.choices]
        placed = 6 * sum(algorithm == "two-level" for _, algorithm in choices)
        torch.cuda.synchronize()
        dist.barrier()
        return wrong, choices, experts.stats.served == placed, experts.stats.reasons


def test_two_levels_are_measured_beside_the_ordinary_way(four):
    first, *others = four.run(_measured)
    wrong, choices, as_chosen, reasons = first
    assert all(other == first for other in others)
    assert not wrong
    assert not reasons
    assert [measured for measured, _ in choices] == [["ordinary", "two-level"]] * 2
    assert as_chosen


def _doubled(rank, size):
    """Bytes of messages if each token goes to all ranks; of the tokens; rows that came."""
    import torch.distributed as dist

    import symmplan

    given = {"memory": "cuda", "max_tokens": 64 * size, "choose": "two-level", "timeout": 60.0}
    tokens = torch.randn(64, 256, device=_device(), dtype=torch.bfloat16)
    with symmplan.expert_parallel(dist.group.WORLD, **given) as layer, _Crossed() as crossed:
        routes = layer.routes([64] * size)
        inside = layer.dispatch(tokens.repeat(size, 1), routes)
        back = layer.combine(inside, routes)
        assert torch.equal(back, tokens.repeat(size, 1))
        return crossed, tokens.nbytes, len(inside)


def test_a_token_for_several_experts_of_a_host_crosses_once(four):
    for crossed, nbytes, rows in four.run(_doubled):
        ahead = (2 + 2 * 64) * 4  # how many to each host, and the places on the other side
        assert crossed == [ahead, nbytes, 2 * nbytes]
        assert rows == SIZE * 64


def _waits(rank, size):
    """How often the host waits for the device in a dispatch, and in its combine."""
    import warnings

    import torch.distributed as dist

    import symmplan

    given = {"memory": "cuda", "max_tokens": 64 * size, "choose": "two-level", "timeout": 60.0}
    rows, waits = torch.randn(64 * size, 256, device=_device()), []
    with symmplan.expert_parallel(dist.group.WORLD, **given) as layer:
        routes = layer.routes([64] * size)
        layer.combine(layer.dispatch(rows, routes), routes)
        for move in (layer.dispatch, layer.combine):
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    rows = move(rows, routes)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            waits.append(sum("synchronizing" in str(w.message) for w in caught))
        torch.cuda.synchronize()
        dist.barrier()
    return waits


def test_the_host_waits_once_in_a_dispatch_and_not_in_a_combine(four):
    assert four.run(_waits) == [[1, 0]] * SIZE


def _wrong(rank, size, choose):
    """One rank passes a row too few: what it raises, and whether its peers' rows came."""
    import torch.distributed as dist

    import symmplan

    device, found = _device(), []
    given = {"memory": "cuda", "max_tokens": 256, "choose": choose, "timeout": 60.0}
    with symmplan.expert_parallel(dist.group.WORLD, **given) as layer:
        for turn in range(4):
            rows = torch.full((8 * size, 16), 1.0 + rank, device=device)
            routes = layer.routes([8] * size)
            move = (layer.dispatch, layer.combine)[turn % 2]
            if rank == turn:
                error = raised(symmplan.errors.RunError, lambda: move(rows[1:], routes))  # noqa: B023
                found.append("are not those of the routes" in str(error))
            else:
                came = move(rows, routes)[:, 0].view(size, 8).amax(1).tolist()
                found.append(came == [0.0 if s == turn else s + 1.0 for s in range(size)])
        torch.cuda.synchronize()
        dist.barrier()
    return found


@pytest.mark.parametrize("choose", ["two-level", "ordinary"])
def test_peers_of_a_rank_with_wrong_rows_do_not_wait_for_it(four, choose):
    assert four.run(_wrong, choose) == [[True] * 4] * SIZE


def _alone(rank):
    """Be the only rank of a host."""
    os.environ["NCCL_HOSTID"] = f"host {rank}"


def _on_its_own(rank, size):
    _alone(rank)


def _unreached(rank, size):
    """Whether rows came, how many calls were placed, the reasons, and how many warnings."""
    import warnings

    import torch.distributed as dist

    import symmplan

    given = {"memory": "cuda", "max_tokens": 64, "timeout": 60.0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with symmplan.expert_parallel(dist.group.WORLD, **given) as layer:
            rows = torch.ones(4 * size, 8, device=_device())
            routes = layer.routes([4] * size)
            back = layer.combine(layer.dispatch(rows, routes), routes)
            right, stats = torch.equal(back, rows), layer.stats
    warned = sum(
        "symmplan.expert_parallel runs in torch's own way" in str(w.message) for w in caught
    )
    return right, stats.served, [reason for reason, _ in stats.reasons], warned


def test_one_rank_on_each_host_is_ordinary():
    why = "its ranks are on 2 hosts without NVLink between them, farther than memory='cuda' reaches"
    reason = f"no symmetric memory: {why}; two levels need several ranks on each host"
    with ranks_on(2, enter=_alone, timeout=240.0) as ranks:
        ranks.run(_on_its_own)
        for rank, found in enumerate(ranks.run(_unreached)):
            assert found == (True, 0, [reason], int(rank == 0))
        RankPool.outcomes(ranks, finish)
