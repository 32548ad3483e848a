"""Rows of a mixture of experts on real ranks: random routes, late ranks, overflow, faults."""

from __future__ import annotations

import random

import pytest
import torch
from expert_programs import here, late
from held import segments_of_plans
from ranks import RankPool

import symmplan
from symmplan.choose.tuning_table import Table, TuningRow
from symmplan.errors import BackendError, OptionError, OutOfSharedMemoryError, RunError

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module", params=[2, 3])
def pool(request):
    with RankPool(request.param, timeout=180.0) as ranks:
        yield ranks


def _table(dice, ranks, most):
    """Who sends how many rows to whom: even, uneven, mostly none, all to one, nobody anything."""
    kind = dice.choice(["any", "any", "few", "one", "none", "even"])
    table = [[dice.randrange(most + 1) for _ in range(ranks)] for _ in range(ranks)]
    if kind == "few":
        table = [[n if dice.random() < 0.3 else 0 for n in row] for row in table]
    elif kind == "one":
        chosen = dice.randrange(ranks)
        table = [[sum(row) if r == chosen else 0 for r in range(ranks)] for row in table]
    elif kind == "none":
        table = [[0] * ranks for _ in range(ranks)]
    elif kind == "even":
        table = [[most] * ranks for _ in range(ranks)]
    return table


def _layer(experts, rows, counts, rank):
    """Each rank's expert multiplies its rows by its number plus one, exactly."""
    routes = experts.routes(counts)
    inside = experts.dispatch(rows, routes)
    return routes, inside, experts.combine(inside * (rank + 1), routes)


def random_calls(rank, world_size, seeds, choose="auto", kind="cpu"):
    """Layers of random widths and types with random routes; each value is known beforehand."""
    import torch.distributed as dist

    device = here(kind)
    replans = []
    for seed in seeds:
        dice, slow = random.Random(seed), random.Random(7 * seed + rank)
        rests = random.Random(f"{seed} rests")
        bound = dice.choice([1, 5, 40])
        with symmplan.expert_parallel(max_tokens=bound, choose=choose, timeout=30.0) as experts:
            for iteration in range(dice.randint(2, 5)):
                if rests.random() < 0.3:
                    had, choices = experts.stats, experts.choices
                    experts.sleep()
                    assert not any(s.users for s in segments_of_plans())
                    if rests.random() < 0.5:
                        experts.wake()
                        woken = experts.stats.segment_bytes  # a cached segment may be larger
                        assert (woken > 0) is (had.segment_bytes > 0)
                        assert woken <= had.segment_bytes
                        assert not experts.asleep
                        assert experts.choices == choices
                widths = [dice.choice([(8,), (3, 5), (64,), ()]) for _ in range(2)]
                dtype = dice.choice([torch.float32, torch.float64, torch.bfloat16])
                outputs, expected, inputs = [], [], []
                for number, width in enumerate(widths):
                    table = _table(dice, world_size, dice.choice([0, 1, 9, 30]))
                    generator = torch.Generator().manual_seed(seed * 1000 + iteration * 10 + number)
                    all_rows = [
                        torch.randint(-9, 9, (sum(row), *width), generator=generator).to(
                            device, dtype
                        )
                        for row in table
                    ]
                    rows = all_rows[rank].clone().requires_grad_()
                    late(slow, device)
                    counts = table[rank] if number else torch.tensor(table[rank])
                    routes, inside, outside = _layer(experts, rows, counts, rank)
                    assert [list(row) for row in routes.table] == table
                    parts = [
                        all_rows[s][sum(table[s][:rank]) :][: table[s][rank]]
                        for s in range(world_size)
                    ]
                    assert torch.equal(inside, torch.cat(parts)), (seed, iteration, number)
                    factors = torch.tensor(
                        [r + 1.0 for r in range(world_size) for _ in range(table[rank][r])]
                    )
                    factors = factors.to(device, dtype).view(-1, *(1 for _ in width))
                    outputs.append(outside)
                    inputs.append(rows)
                    expected.append((all_rows[rank], factors))
                late(slow, device)
                weights = [(o.detach() * 0 + i + 2) for i, o in enumerate(outputs)]
                sum((o * w).sum() for o, w in zip(outputs, weights, strict=True)).backward()
                for out, rows, weight, (given, factors) in zip(
                    outputs, inputs, weights, expected, strict=True
                ):
                    assert torch.equal(out, given * factors), (seed, iteration)
                    assert torch.equal(rows.grad, weight * factors), (seed, iteration)
            held = [s for s in segments_of_plans() if s.users]
            assert len(held) <= 1
            replans.append((experts.stats.replans, experts.max_tokens))
        assert not any(s.users for s in segments_of_plans())
    dist.barrier()
    return replans


@pytest.mark.parametrize(
    ("seeds", "choose"),
    [(range(12), "auto"), (range(12, 20), "measure"), (range(20, 24), "ordinary")]
    + [
        pytest.param(range(at, at + 60), "auto", marks=pytest.mark.slow)
        for at in range(100, 400, 60)
    ],
)
def test_rows_go_where_they_are_meant_to(pool, seeds, choose):
    first, *others = pool.run(random_calls, seeds, choose)
    assert all(other == first for other in others)
    assert choose != "auto" or any(count for count, _ in first)  # nothing is, where that is fastest


def _used(rank, world_size):
    """An exchange is under way; or one rank has a captured graph. Then all of it can go."""
    with symmplan.expert_parallel(max_tokens=8, timeout=30.0) as experts:
        routes, rows = experts.routes([1] * world_size), torch.full((world_size, 4), float(rank))
        pending = experts.dispatch(rows, routes, async_op=True)
        with pytest.raises(RunError, match="while an exchange is under way"):
            experts.sleep()
        inside = pending.wait()
        experts._slot._captured = rank == 0
        with pytest.raises(RunError, match="a captured CUDA graph has addresses"):
            experts.sleep()
        experts._slot._captured = False
        experts.sleep()
        asleep = experts.asleep, experts.stats.segment_bytes
        return asleep, torch.equal(experts.combine(inside, routes), rows), experts.asleep


def test_experts_that_are_used_do_not_sleep(pool):
    assert pool.run(_used) == [((True, 0), True, False)] * pool.world_size


def _grows_on_one(rank, world_size):
    """Only what the last rank gets outgrows the plan; all ranks plan again, once."""
    import logging

    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("symmplan").addHandler(handler)
    experts = symmplan.expert_parallel(max_tokens=4 * world_size, timeout=30.0)
    found = []
    for count in (4, 4, 9, 9, 3):
        counts = [4] * (world_size - 1) + [count]
        rows = torch.full((sum(counts), 6), float(rank))
        _, inside, outside = _layer(experts, rows, counts, rank)
        assert torch.equal(inside[:, 0], torch.arange(world_size).repeat_interleave(counts[rank]))
        assert torch.equal(outside[-1], torch.full((6,), float(rank * world_size)))
        found.append((experts.stats.replans, experts.max_tokens))
    stats = experts.stats
    (segment,) = segments_of_plans()
    experts.plan.verify()
    experts.release()
    logging.getLogger("symmplan").removeHandler(handler)
    return found, told, stats.served, stats.rendezvous, segment.users, segment.nbytes


def test_overflow_on_one_rank_is_planned_again_by_all(pool):
    size = pool.world_size
    most = 1 << (9 * size - 1).bit_length()
    for found, told, served, rendezvous, users, nbytes in pool.run(_grows_on_one):
        assert found == [(0, 4 * size)] * 2 + [(1, most)] * 3
        assert len(told) == 1
        assert f"a rank gets {9 * size} rows" in told[0]
        assert (served, rendezvous, users) == (10, 2, ("expert parallel",))
        assert most * 24 <= nbytes < 2 * most * 24  # one slot, and signals


def _faults(rank, world_size):
    """What one rank does wrong all ranks hear of, and go on."""
    experts = symmplan.expert_parallel(max_tokens=64, timeout=30.0)
    texts = []
    good = [2] * world_size
    for wrong in ([1] * (world_size + 1), [-1] * world_size, [0.5] * world_size):
        with pytest.raises(RunError, match="counts of rank 1 are not valid") as caught:
            experts.routes(wrong if rank == 1 else good)
        texts.append(caught.value.ranks)
    rows = torch.arange(2.0 * world_size).view(-1, 1) + 100 * rank
    _, before, _ = _layer(experts, rows, good, rank)
    wide, narrow = rows.repeat(1, 4096), rows[:, :0]
    for number in range(5):
        routes = experts.routes(good)
        wrong = (rows.double(), rows[1:], "rows", wide, narrow)[number % 5]
        given = wrong if rank == 1 else rows
        with pytest.raises(RunError) as caught:
            experts.dispatch(given, routes)
        texts.append(str(caught.value).splitlines()[0])
        _, after, _ = _layer(experts, rows, good, rank)
        assert torch.equal(before, after)
    experts.release()
    with pytest.raises(symmplan.errors.ReleasedError):
        experts.routes(good)
    return texts


def test_what_one_rank_does_wrong_fails_on_all(pool):
    for rank, texts in enumerate(pool.run(_faults)):
        assert texts[:3] == [(1,)] * 3
        for number, text in enumerate(texts[3:]):
            mine = ("are not those of the routes", "rows are a str")
            is_mine = rank == 1 and number % 5 in (1, 2)
            assert (mine[number % 5 - 1] if is_mine else "make different calls") in text


def _no_room(rank, world_size, where):
    """Symmetric memory fails on one rank: all rows go in torch's way, with one warning."""
    import warnings

    from symmplan.memory.backends import shm

    class Full(shm.ShmBackend):
        def allocate(self, *args, **kwargs):
            if where == "allocate":
                raise OutOfSharedMemoryError("no room", fix="make some")
            return super().allocate(*args, **kwargs)

        def rendezvous(self, *args):
            if where == "rendezvous":
                raise BackendError("no way", fix="make one")
            super().rendezvous(*args)

    original = shm.ShmBackend
    if rank == 1:
        shm.ShmBackend = Full
    experts = symmplan.expert_parallel(max_tokens=64, timeout=30.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            rows = torch.arange(3.0 * world_size).view(-1, 1) + 100 * rank
            _, _, outside = _layer(experts, rows, [3] * world_size, rank)
            factors = torch.arange(1.0, world_size + 1).repeat_interleave(3).view(-1, 1)
            assert torch.equal(outside, rows * factors)
    shm.ShmBackend = original
    stats = experts.stats
    experts.release()
    told = [text for w in said if (text := str(w.message)).startswith("symmplan")]
    return told, stats.plain, stats.served, stats.reasons


@pytest.mark.parametrize("where", ["allocate", "rendezvous"])
def test_without_room_on_one_rank_all_go_torchs_algorithm(pool, where):
    why = {"allocate": "no room", "rendezvous": "no way"}[where]
    results = pool.run(_no_room, where)
    (said,) = [text for told, *_ in results for text in told]
    assert f"rank 1: {why}" in said
    for _, plain, served, reasons in results:
        assert (plain, served) == (6, 0)
        assert reasons == ((f"no symmetric memory: rank 1: {why}", 6),)


def _concurrent(rank, world_size):
    """Inside a compiled function, where the graph ends, and inside an eager session."""
    import torch.distributed as dist

    torch._dynamo.reset()
    experts = symmplan.expert_parallel(max_tokens=64, timeout=30.0)
    backend = symmplan.backend(inner="eager", timeout=30.0)

    def model(rows, counts):
        hidden = rows * 2
        routes = experts.routes(counts)
        inside = experts.dispatch(hidden, routes)
        return experts.combine(torch.relu(inside) + 1, routes) * 3

    compiled = torch.compile(model, backend=backend)
    for number in range(3):
        counts = [(number + r + rank) % 3 for r in range(world_size)]
        rows = torch.randn(sum(counts), 4)
        expected = (torch.relu(rows * 2) + 1) * 3
        torch.testing.assert_close(compiled(rows, counts), expected)
    with symmplan.eager(timeout=30.0) as session:
        for number in range(3):
            counts = [(number + r) % 3 for r in range(world_size)]
            rows = torch.randn(sum(counts), 4)
            torch.testing.assert_close(model(rows, counts), (torch.relu(rows * 2) + 1) * 3)
            total = torch.full((8,), float(rank + number))
            dist.all_reduce(total)
            assert total[0] == sum(r + number for r in range(world_size))
            session.step()
        assert session.stats.placed
    dist.barrier()
    experts.release()
    backend.release()


@pytest.mark.further
def test_beside_graphs_and_sessions(pool):
    pool.run(_concurrent)


def _by_table(rank, world_size, path):
    """How many calls are served, and what was measured."""
    with symmplan.expert_parallel(max_tokens=4 * world_size, choose=path, timeout=30.0) as experts:
        rows = torch.arange(4.0 * world_size).view(-1, 1).repeat(1, 8) + rank
        routes = experts.routes([4] * world_size)
        assert torch.equal(experts.combine(experts.dispatch(rows, routes), routes), rows)
        return experts.stats.served, experts.choices


@pytest.mark.further
def test_a_table_says_how_rows_move(pool, tmp_path):
    size = pool.world_size
    nbytes = 4 * size * 32
    far = TuningRow("all_to_all", size, nbytes, "ordinary", {"ordinary": 1.0, "two-level": 2.0})
    rows = {
        TuningRow("all_to_all", size, nbytes, "ordinary"): 0,
        TuningRow("all_to_all", size, nbytes, "push"): 2,
        TuningRow("all_to_all", size, nbytes, "symmetric"): 2,
        TuningRow("all_to_all", size, 100 * nbytes, "ordinary"): 2,
        far: 2,
    }
    for number, (row, served) in enumerate(rows.items()):
        path = tmp_path / f"{number}.json"
        path.write_text(Table("shm", (row,)).to_json())
        assert pool.run(_by_table, str(path)) == [(served, ())] * size


@pytest.mark.parametrize("given", [0, -3, 2.5, True])
def test_bounds_that_are_none(given):
    with pytest.raises(OptionError, match="max_tokens is"):
        symmplan.expert_parallel(max_tokens=given)
