"""Programs of experts whose routes only the device knows; each value is known beforehand.

Rows are whole numbers, and each rank's expert multiplies by its number plus one, so all is exact.
"""

from __future__ import annotations

import functools
import random
import time

import pytest
import torch
from attrs import frozen
from held import segments_of_plans

import symmplan


@frozen
class Case:
    """One layer: rows of some shape on each rank, and who sends how many of them to whom."""

    table: list[list[int]]
    rows: list[torch.Tensor]  # of each rank, those that go nowhere included
    most: int

    def come(self, rank):
        """What a rank gets from its dispatch."""
        at = [sum(line[:rank]) for line in self.table]
        parts = [
            rows[begin : begin + line[rank]]
            for rows, begin, line in zip(self.rows, at, self.table, strict=True)
        ]
        there = torch.cat(parts)
        return torch.cat([there, there.new_zeros(self.most - len(there), *there.shape[1:])])

    def back(self, rank):
        """What a rank gets from its combine, and what its rows were multiplied with."""
        line, rows = self.table[rank], self.rows[rank]
        factors = [r + 1.0 for r, count in enumerate(line) for _ in range(count)]
        factors += [0.0] * (len(rows) - len(factors))
        factor = torch.tensor(factors, dtype=rows.dtype, device=rows.device)
        factor = factor.view(-1, *(1 for _ in rows.shape[1:]))
        return rows * factor, factor


def case(dice, ranks, rows, most, width, dtype, device):
    """Random counts: any, skewed, to one rank, none; never more than ``most`` to a rank."""
    kind = dice.choice(["any", "any", "few", "one", "none", "all"])
    table = []
    for _ in range(ranks):
        line, left = [0] * ranks, rows
        order = dice.sample(range(ranks), ranks)
        for to in order if kind != "one" else [dice.randrange(ranks)]:
            room = min(left, most - sum(other[to] for other in table))
            count = dice.randint(0, room) if kind in ("any", "few") else room
            count = 0 if kind == "none" or (kind == "few" and dice.random() < 0.7) else count
            line[to] = count
            left -= count
        table.append(line)
    generator = torch.Generator().manual_seed(dice.randrange(2**31))
    given = [
        torch.randint(-9, 9, (rows, *width), generator=generator).to(device, dtype)
        for _ in range(ranks)
    ]
    return Case(table, given, most)


def here(kind):
    """This rank's device."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )


def late(dice, device):
    """Be late, on the host or on the device."""
    seconds = dice.choice([0, 0, 0.002, 0.01])
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 1.8e9))
    else:
        time.sleep(seconds)


def layer(experts, rows, routes, rank, between=None):
    """Dispatch, the rank's expert, combine; with ``between`` both are started and waited for."""
    if between is None:
        inside = experts.dispatch(rows, routes)
        return inside, experts.combine(inside * (rank + 1), routes), []
    pending = experts.dispatch(rows, routes, async_op=True)
    beside = [between()]
    inside = pending.wait()
    pending = experts.combine(inside * (rank + 1), routes, async_op=True)
    beside.append(between())
    outside = pending.wait()
    assert pending.wait() is outside
    return inside, outside, beside


def _shared(weight):
    """What runs beside exchanges."""
    return (weight @ weight).sum()


def raised(kind, act):
    """What an act raises."""
    with pytest.raises(kind) as caught:
        act()
    return caught.value


def padded_calls(rank, world_size, seeds, choose, kind="cpu", apart=False, memory="auto"):
    """Layers with random routes, forward and backward; how often they were placed."""
    import torch.distributed as dist

    device, served = here(kind), []
    for seed in seeds:
        dice, slow = random.Random(seed), random.Random(7 * seed + rank)
        rows = dice.choice([1, 6, 40])
        most = rows + dice.choice([0, rows // 2, 2 * rows])
        given = {"memory": memory, "choose": choose, "timeout": 60.0}
        with symmplan.expert_parallel(max_tokens=most, **given) as experts:
            for _ in range(dice.randint(2, 4)):
                width = dice.choice([(8,), (3, 5), (64,), (1030,), ()])
                dtype = dice.choice([torch.float32, torch.float64, torch.bfloat16])
                now = case(dice, world_size, rows, most, width, dtype, device)
                mine = now.rows[rank].clone().requires_grad_()
                shared = torch.full((4, 4), 2.0, device=device, requires_grad=True)
                late(slow, device)
                routes = experts.routes(torch.tensor(now.table[rank], device=device), rows=rows)
                between = functools.partial(_shared, shared) if apart else None
                inside, outside, beside = layer(experts, mine, routes, rank, between)
                assert torch.equal(inside, now.come(rank)), seed
                expected, factor = now.back(rank)
                assert torch.equal(outside, expected), seed
                assert routes.received.tolist() == [line[rank] for line in now.table]
                late(slow, device)
                loss = (outside * 3).sum()
                sum([part.to(loss.dtype) for part in beside], loss).backward()
                assert torch.equal(mine.grad, (3 * factor).expand_as(mine)), seed
                if apart:
                    assert torch.equal(shared.grad, torch.full_like(shared, 2 * 2 * 8.0))
            experts.check()
            held = [s for s in segments_of_plans() if s.users]
            assert len(held) <= 1  # layers of all widths share it
            served.append(experts.stats.served)
    dist.barrier()
    return served


def _line(error):
    return str(error).splitlines()[0].rpartition(": ")[2]


def overflows(rank, world_size, choose, kind="cpu"):
    """More rows than a rank has room for, after a call that fits: texts of what each call raised.

    Nothing is written beyond the rows' place, and no rank waits for another.
    """
    import torch.distributed as dist

    device, texts = here(kind), []
    rows = torch.ones(8, 16, device=device)
    fits = torch.tensor([8 // world_size] * world_size, device=device)
    much = torch.tensor([8] + [0] * (world_size - 1), device=device)
    experts = symmplan.expert_parallel(max_tokens=8, choose=choose, timeout=30.0)
    routes = experts.routes(fits, rows=8)
    experts.combine(experts.dispatch(rows, routes), routes)
    segment = next(s for s in experts._slot.arena.segments.values())
    place = experts.plan.placements["rows"]
    dist.barrier()

    def exceeds():
        routes = experts.routes(much, rows=8)
        segment.tensor[place.offset : place.end] = 77
        inside = experts.dispatch(rows, routes)
        assert not inside.any()
        experts.check()

    texts.append(_line(raised(symmplan.errors.RunError, exceeds)))
    if kind == "cuda":
        torch.cuda.synchronize()
    untouched = segment.tensor[place.offset : place.end]
    assert bool((untouched == 77).all()) or choose != "symmetric"
    calls = (lambda: experts.routes(fits, rows=8), lambda: experts.dispatch(rows, routes))
    texts += [_line(raised(symmplan.errors.RunError, call)) for call in calls]
    experts.release()
    dist.barrier()
    return texts


def unseen(rank, world_size, kind="cpu"):
    """More rows than there is room for in the last call: the end of the block raises."""
    import torch.distributed as dist

    device = here(kind)
    rows = torch.ones(8, 16, device=device)
    much = torch.tensor([8] + [0] * (world_size - 1), device=device)

    def run():
        with symmplan.expert_parallel(max_tokens=8, choose="symmetric", timeout=30.0) as experts:
            routes = experts.routes(much * 0, rows=8)
            experts.dispatch(rows, routes)
            routes = experts.routes(much, rows=8)
            experts.dispatch(rows, routes)

    text = _line(raised(symmplan.errors.RunError, run))
    dist.barrier()
    return text


def one_without(rank, world_size, choose):
    """The last rank has no Triton: all ranks do without kernels."""
    import torch.distributed as dist

    from symmplan.integrate.moe import slot

    there = slot.has_kernels
    if rank == world_size - 1:
        slot.has_kernels = lambda device: False
    rows = torch.arange(8.0).view(8, 1)
    with symmplan.expert_parallel(max_tokens=8, choose=choose, timeout=30.0) as experts:
        routes = experts.routes([8 // world_size] * world_size, rows=8)
        back = experts.combine(experts.dispatch(rows, routes) + 1, routes)
        count = 8 // world_size * world_size
        assert torch.equal(back[:count], rows[:count] + 1)
        kernels = experts._slot.kernels
    slot.has_kernels = there
    dist.barrier()
    return kernels is None


def wrong_counts(rank, world_size, kind="cpu"):
    """The last rank counts rows that it does not have, or less than none; all ranks hear of it."""
    import torch.distributed as dist

    device, found = here(kind), []
    rows = torch.ones(8, 16, device=device)
    for wrong in ([9] + [0] * (world_size - 1), [-1] + [1] * (world_size - 1)):
        experts = symmplan.expert_parallel(max_tokens=16, choose="symmetric", timeout=30.0)
        try:
            good = [1] * world_size
            routes = experts.routes(torch.tensor(good, device=device), rows=8)
            experts.combine(experts.dispatch(rows, routes), routes)
            counts = wrong if rank == world_size - 1 else good

            def count(experts=experts, counts=counts):
                routes = experts.routes(torch.tensor(counts, device=device), rows=8)
                experts.dispatch(rows, routes)
                experts.check()

            found.append(raised(symmplan.errors.RunError, count).ranks)
        finally:
            experts.release()
        dist.barrier()
    return found


def missing_rank(rank, world_size, kind="cpu"):
    """The last rank makes no call; the others give up after a while, and name it."""
    import torch.distributed as dist

    device = here(kind)
    rows = torch.ones(8, 16, device=device)
    counts = torch.tensor([8 // world_size] * world_size, device=device)
    experts = symmplan.expert_parallel(max_tokens=16, choose="symmetric", timeout=2.0)
    routes = experts.routes(counts, rows=8)
    experts.combine(experts.dispatch(rows, routes), routes)
    missing = None
    if rank < world_size - 1:

        def waits():
            experts.dispatch(rows, routes)
            experts.check()

        missing = raised(symmplan.errors.PeerTimeoutError, waits).missing
    dist.barrier()
    experts.release()
    return missing


def wider_rows(rank, world_size, kind="cpu"):
    """The last rank alone passes wider rows; whose, by what each rank's errors say, and when.

    Ranks in shared memory compare their calls before they move anything.
    """
    import torch.distributed as dist

    device, found = here(kind), []
    counts = torch.tensor([8 // world_size] * world_size, device=device)
    for more in (2, 1.5):
        experts = symmplan.expert_parallel(max_tokens=16, choose="symmetric", timeout=20.0)
        routes = experts.routes(counts, rows=8)
        experts.dispatch(torch.ones(8, 64, device=device), routes)  # there is room for these
        rows = torch.ones(8, 16, device=device)
        experts.combine(experts.dispatch(rows, routes).new_zeros(16, 16), routes)
        wide = torch.ones(8, int(16 * more) if rank == world_size - 1 else 16, device=device)
        if kind == "cpu":  # as on devices, where only kernels meet
            experts._slot._algorithms[wide[0].nbytes, True] = "symmetric"

        def differs(experts=experts, wide=wide, routes=routes):
            experts.dispatch(wide, routes)
            experts.check()

        error = raised(symmplan.errors.RunError, differs)
        found.append((error.ranks, "rows of another size" in error.what))
        dist.barrier()
        experts.release()
    return found


def graphs(rank, world_size, seeds, apart):
    """Steps in a CUDA graph, forward and backward, whose routes change from replay to replay."""
    import torch.distributed as dist

    device, steps = here("cuda"), 0
    for seed in seeds:
        dice, slow = random.Random(seed), random.Random(7 * seed + rank)
        rows = dice.choice([6, 40, 500])
        most = rows + dice.choice([0, rows // 2, 2 * rows])
        width, dtype = (
            dice.choice([(8,), (3, 5), (1030,)]),
            dice.choice([torch.float32, torch.bfloat16]),
        )
        counts = torch.zeros(world_size, dtype=torch.int64, device=device)
        given = torch.zeros(rows, *width, dtype=dtype, device=device, requires_grad=True)
        shared = torch.full((64, 64), 1.0, device=device, requires_grad=True)
        between = functools.partial(_shared, shared) if apart else None
        with symmplan.expert_parallel(max_tokens=most, choose="symmetric", timeout=30.0) as experts:

            def step(experts=experts, counts=counts, given=given, between=between, rows=rows):
                routes = experts.routes(counts, rows=rows)
                inside, outside, beside = layer(experts, given, routes, rank, between)
                loss = (outside * 3).sum()
                loss = sum([part.to(loss.dtype) for part in beside], loss)
                return inside, outside, *torch.autograd.grad(loss, given)

            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(2):
                    step()
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = step()
            for number in range(6):
                now = case(dice, world_size, rows, most, width, dtype, device)
                counts.copy_(torch.tensor(now.table[rank]))
                with torch.no_grad():
                    given.copy_(now.rows[rank])
                late(slow, device)
                if number == 3:  # and by the way without the graph
                    found = step()
                else:
                    graph.replay()
                    found = made
                expected, factor = now.back(rank)
                wanted = now.come(rank), expected, (3 * factor).expand_as(given)
                for which, (got, want) in enumerate(zip(found, wanted, strict=True)):
                    assert torch.equal(got, want), (seed, number, which)
                steps += 1
            experts.check()
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
    return steps


def graph_overflows(rank, world_size):
    """A replay with more rows than there is room for: all ranks raise, and none hangs."""
    import torch.distributed as dist

    device = here("cuda")
    rows = torch.ones(8, 16, device=device)
    counts = torch.full((world_size,), 1, device=device)
    experts = symmplan.expert_parallel(max_tokens=8, choose="symmetric", timeout=30.0)

    def step():
        routes = experts.routes(counts, rows=8)
        inside = experts.dispatch(rows, routes)
        return inside, experts.combine(inside, routes)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside, _ = step()
    graph.replay()
    experts.check()
    counts.copy_(torch.tensor([8, *[0] * (world_size - 1)]))
    graph.replay()
    graph.replay()  # which nobody waits for
    text = _line(raised(symmplan.errors.RunError, experts.check))
    assert not inside.any()
    experts.release()
    dist.barrier()
    return text


def no_synchronization(rank, world_size, apart):
    """Steps in which torch refuses every wait of the host for the device."""
    device = here("cuda")
    rows = torch.ones(8, 16, device=device, requires_grad=True)
    shared = torch.ones(64, 64, device=device, requires_grad=True)
    between = functools.partial(_shared, shared) if apart else None
    with symmplan.expert_parallel(max_tokens=32, choose="symmetric", timeout=30.0) as experts:
        for number in range(4):
            counts = torch.full((world_size,), 1 + number % 2, device=device)
            mode = "error" if number else "default"
            torch.cuda.set_sync_debug_mode(mode)
            try:
                routes = experts.routes(counts, rows=8)
                _, outside, _ = layer(experts, rows, routes, rank, between)
                outside.sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return experts.stats.served


def kept_rows(rank, world_size, kind="cpu"):
    """Whether dispatched rows live until the backward: of a plain layer, of a checkpointed one."""
    import weakref

    from torch.utils.checkpoint import checkpoint

    device, found = here(kind), []
    with symmplan.expert_parallel(max_tokens=16, timeout=30.0) as experts:
        for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
            seen = []

            def run(x, seen=seen):
                routes = experts.routes(torch.tensor([4] * world_size, device=device), rows=12)
                inside = experts.dispatch(x, routes)
                seen.append(weakref.ref(inside.untyped_storage()))
                return experts.combine(torch.exp(inside * inside), routes)

            rows = torch.rand(12, 8, device=device, requires_grad=True)
            out = wrap(run, rows)
            found.append(seen[0]() is not None)
            out.sum().backward()
            valid = torch.arange(12, device=device) < 4 * world_size
            exact = torch.where(valid[:, None], 2 * rows * torch.exp(rows * rows), 0.0)
            torch.testing.assert_close(rows.grad, exact)
    return found
