"""The algorithms by which FSDP2's collectives run: forced, ruled, measured, and agreed."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from fsdp_conditions import flat, forced, forced_algorithm, forced_kind
from fsdp_models import Net, Trace, batch, both, check, sgd, shard, train, train_step
from ranks import RankPool, pool_of
from test_fsdp import (
    accumulation,
    checkpointed,
    clipping,
    divide_factor,
    mixed,
    offload,
    plain,
    several_forwards,
    tied,
)
from test_fsdp_divergences import failing_step, uneven_use
from test_fsdp_setters import SEVERAL_TYPES, own_types, placements, uneven
from test_fsdp_user import in_backward_optimizer
from torch.distributed.fsdp import MixedPrecisionPolicy

pytestmark = pytest.mark.ranks

SKIPS = [(0, 2), (0, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)]
OTHER_ORDERS = [(0, 1, 2), (0, 1, 2), (2, 1, 0), (0, 0, 1), (0, 1, 2)]

two = pool_of(2)


@pytest.mark.parametrize(
    ("program", "args"),
    [
        (accumulation, (True, False)),
        (mixed, (torch.bfloat16, torch.bfloat16, None)),
        (mixed, (torch.bfloat16, torch.float32, None)),
        (mixed, (torch.float16, torch.float16, None)),
        (mixed, (torch.float32, torch.bfloat16, None)),
        (accumulation, (False, True)),
        (several_forwards, ()),
        (failing_step, ()),
        (uneven_use, (OTHER_ORDERS,)),
        (uneven_use, (SKIPS,)),
        (uneven, ()),
        (placements, ()),
        (offload, ()),
        (clipping, ()),
        (divide_factor, ()),
        (tied, ()),
        (checkpointed, (False,)),
        (in_backward_optimizer, ()),
        pytest.param(own_types, (None,), marks=SEVERAL_TYPES),
        pytest.param(own_types, (torch.float32,), marks=SEVERAL_TYPES),
    ],
)
@pytest.mark.parametrize("algorithm", ["push", "shared push"])
def test_pushes_in_all_kinds_of_programs(two, program, args, algorithm):
    for result in two.run(forced, algorithm, program, *args):
        assert result["differences"] == []
        assert result["stats"]["served"] > 0
        moved = (algorithm, args) == ("shared push", (OTHER_ORDERS,))
        assert result["stats"]["copies"] == 2 * moved  # somebody is in a slot


def late_sums(rank, world, blocks, algorithm):
    """A rank sums what was pushed to it long after it met its peers, who go on to push."""
    import time

    from symmplan.integrate.fsdp import push

    original, count = push.sum_rows, [0]

    def late(*args, **kwargs):
        count[0] += 1
        if rank == count[0] // 2 % world:
            time.sleep(0.02)
        original(*args, **kwargs)

    push.sum_rows = late
    try:
        with forced_algorithm(algorithm):
            return both(lambda: shard(Net(blocks=blocks)), train, rank)
    finally:
        push.sum_rows = original


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["push", "shared push"])
@pytest.mark.parametrize("blocks", [3, 4])
def test_nobody_pushes_over_what_a_peer_has_yet_to_sum(two, blocks, algorithm):
    """With an even and an odd number of reductions in a step."""
    for result in two.run(late_sums, blocks, algorithm):
        assert result["differences"] == []


def added(rank, world, dtypes, touched):
    """Micro-batches whose gradients are all reduced, and how many sums were added by us.

    Args:
        touched: What somebody does to gradients: nothing, ``"zeroed"``, ``"moved"`` elsewhere,
            ``"hooked"``; or of a model with a ``"frozen"`` weight.
    """
    from symmplan.integrate.fsdp import push

    originals, count, same = (push.sum_rows, push.sum_parts), [0], []

    def counting(original):
        def counted(*args, add):
            count[0] += add
            original(*args, add=add)

        return counted

    def build():
        model = Net()
        if touched == "frozen":
            model.blocks[0].up.weight.requires_grad_(False)
        return shard(model, mp_policy=MixedPrecisionPolicy(*dtypes))

    def program(model, trace, rank):
        optimizer = sgd(model)
        for block in model.blocks if touched == "hooked" else ():
            block.up.weight.register_post_accumulate_grad_hook(lambda p: trace.add("hook", p.grad))
        for step in range(4):
            before = {}
            for micro in range(3):
                loss = model(batch(10 * step + micro, rank)).float().pow(2).mean()
                loss.backward()
                trace.grads(model, step)
                grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                same.extend(grads[n] is g for n, g in before.items())
                before = grads
                for p in model.parameters() if touched == "moved" else ():
                    p.grad._local_tensor = p.grad._local_tensor.clone()
            optimizer.step()
            optimizer.zero_grad(set_to_none=touched != "zeroed")
        trace.parameters(model)

    push.sum_rows, push.sum_parts = map(counting, originals)
    try:
        with forced_algorithm("push"):
            result = both(build, program, rank)
    finally:
        push.sum_rows, push.sum_parts = originals
    return result, count[0], all(same)


WIDE = (torch.bfloat16, torch.float32)
NARROW = (torch.bfloat16, torch.bfloat16)
ADDED = [
    # In each of 4 steps two of three passes find gradients of 4 modules; there is a plan by then.
    (WIDE, "", 4 * 2 * 4),
    (WIDE, "zeroed", (3 * 3 + 2) * 4),
    (WIDE, "moved", 0),
    (WIDE, "hooked", 4 * 2 * 1),
    (WIDE, "frozen", 4 * 2 * 3),
    (NARROW, "", 4 * 2 * 4),
]


@pytest.mark.further
@pytest.mark.parametrize(("dtypes", "touched", "count"), ADDED)
def test_sums_are_added_to_gradients_where_these_lie_as_they_were_made(two, dtypes, touched, count):
    for result, counted, same in two.run(added, dtypes, touched):
        assert result["differences"] == []
        assert counted == count
        assert same


def slots(rank, world, dtype):
    """What the plan has for reductions in one dtype that are pushes where they can be."""

    def look(handle):
        problem = handle.plan.problem
        reduced = [b for b in problem.buffers if "_reduce_scatter_" in b.op]
        return sorted((b.where, b.persistent) for b in reduced)

    policy = MixedPrecisionPolicy(dtype, dtype)
    with forced_algorithm("push"):
        return both(lambda: shard(Net(), mp_policy=policy), train, rank, look=look)


def test_what_is_pushed_has_two_slots(two):
    """Half floats are divided before they are reduced, so they go another way."""
    for dtype in (torch.bfloat16, torch.float16):
        for result in two.run(slots, dtype):
            assert result["differences"] == []
            if dtype == torch.bfloat16:
                assert result["looked"] == [("slot (push)", True)] * 2
            else:
                assert not any("push" in where for where, _ in result["looked"])


def summed(rank, world, dtype, reduction):
    """An all-to-all and a local sum against the sum in 64 bits: the largest error, in roundings."""
    from symmplan.integrate.fsdp.ops import exchanges

    generator = torch.Generator().manual_seed(rank)
    source = torch.randn(world * 1000, generator=generator).to(dtype)
    received, output = torch.empty_like(source), source.new_empty(1000)
    op = getattr(dist.ReduceOp, reduction)
    act = exchanges(output, source, received, dist.group.WORLD, op)
    if act is None:
        return None
    act()
    parts = [torch.empty_like(source) for _ in range(world)]
    dist.all_gather(parts, source)
    mine = torch.stack([p.view(world, -1)[rank] for p in parts]).double()
    exact = mine.sum(0) / (world if reduction == "AVG" else 1)
    step = torch.finfo(dtype).eps * mine.abs().sum(0)
    return float(((output.double() - exact).abs() / step).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_16_bit_sums_are_rounded_once(dtype):
    roundings = 2.0 if dtype == torch.float32 else 0.51  # 32 bits: once for each of four ranks
    with RankPool(4) as four:
        for reduction in ("SUM", "AVG"):
            for error in four.run(summed, dtype, reduction):
                assert error <= roundings
        assert four.run(summed, dtype, "MAX") == [None] * 4


def ordinary(rank, world):
    """Everything as FSDP2 does it."""

    def look(handle):
        stats = handle.stats
        return stats.served, stats.plain, stats.segment_bytes, handle.plan.summary()

    return both(lambda: shard(Net()), train, rank, look=look, choose="ordinary")


def test_everything_stays_as_it_is_if_it_shall(two):
    for result in two.run(ordinary):
        assert result["differences"] == []
        placed, plain, segment_bytes, summary = result["looked"]
        assert (placed, segment_bytes) == (0, 0)
        assert plain == 3 * 11
        assert "choose='ordinary'" in summary


def choice(rank, world):
    """What `choose="measure"` measured."""

    def look(handle):
        summary = handle.plan.summary()
        return [(c.op, c.nbytes, c.ranks, c.placed) for c in handle.choices], summary

    return both(lambda: shard(Net()), train, rank, look=look, choose="measure")


@pytest.mark.long
def test_each_kind_and_size_is_measured_once(two):
    for result in two.run(choice):
        assert result["differences"] == []
        choices, summary = result["looked"]
        assert len(choices) == len(set(choices)) >= 4
        assert {kind for kind, *_ in choices} == {"all_gather", "reduce_scatter"}
        assert all(ranks == 2 for _, _, ranks, _ in choices)
        assert ("symmetric memory was not clearly faster" in summary) != all(c[-1] for c in choices)


def forced_choice(rank, world, kind):
    with forced_kind(kind, rank):
        return both(lambda: shard(Net()), train, rank, lambda h: h.plan.summary(), choose="measure")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "count"), [("reduce_scatter", 4), ("all_gather", 7)])
def test_what_is_slower_in_symmetric_memory_stays_out_of_the_plan(two, kind, count):
    results = two.run(forced_choice, kind)
    stats = check(results, plain=3 * count)
    assert stats["served"] == 3 * (11 - count)
    reason = "symmetric memory was not clearly faster: 500 us, against 200 us in torch's own way"
    assert stats["reasons"] == {reason: 3 * count}
    assert stats["segment_bytes"] == stats["lower_bound_bytes"]
    assert all(reason in r["looked"] for r in results)
    title = f"left out: none\nneed not be symmetric: {count}\n"
    assert all(title in r["looked"] for r in results)


def measured_again(rank, world):
    """A small block that the first step skipped is measured when it comes, while somebody holds
    two buffers of the first plan.
    """
    kept = []

    def look(handle):
        return [(c.op, c.nbytes) for c in handle.choices], [bool(torch.equal(*k)) for k in kept]

    def program(model, trace, rank):
        from symmplan.integrate.fsdp.comms import PlannedAllGather

        original = PlannedAllGather.__call__

        def keeping(self, **kwargs):
            result = original(self, **kwargs)
            if self._runtime.planning.plan is not None and len(kept) < 2:
                tensor = kwargs["output_tensor"]
                kept.append((tensor, tensor.clone()))
            return result

        optimizer = sgd(model)
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, PlannedAllGather, "__call__", original)
            PlannedAllGather.__call__ = keeping
            for step, order in enumerate([(1, 2), (1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)]):
                model.order = list(order)
                train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    with flat():
        return both(lambda: shard(Net()), program, rank, look=look, choose="measure")


def test_what_is_new_is_measured_while_others_hold_their_buffers(two):
    results = two.run(measured_again)
    assert results[0]["looked"][0] == results[1]["looked"][0]
    for result in results:
        assert result["differences"] == []
        choices, intact = result["looked"]
        assert result["stats"]["replans"] == 1
        assert len(choices) == len(set(choices))
        # Three blocks of three widths and the root: each has both kinds.
        assert len({nbytes for kind, nbytes in choices if kind == "all_gather"}) == 4
        assert intact == [True, True]


def failing_freeze(rank, world, where, build=lambda: shard(Net()), program=train):
    """One rank alone fails while the plan is made. How long this one waits, and its error."""
    import symmplan
    from symmplan.choose import trials
    from symmplan.integrate.fsdp import cases as fsdp_cases
    from symmplan.integrate.fsdp import step_plans

    trials.forget()

    def fails(*args, **kwargs):
        raise ArithmeticError(f"no luck in {where}")

    target = {
        "planning": (step_plans, "problem_of"),
        "measuring": (fsdp_cases, "gathers"),
    }[where]
    model = build()
    handle = symmplan.fsdp.apply(model, choose="measure", timeout=60.0)
    program(model, Trace(), rank, steps=1)
    original = getattr(*target)
    if rank == 1:
        setattr(*target, fails)
    try:
        handle.freeze()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(*target, original)
        handle.remove()
    return ""


@pytest.mark.parametrize("where", ["planning", "measuring"])
def test_a_rank_that_fails_alone_fails_all_ranks_at_once(two, where):
    """And leaves them in step: the next plan is made as if nothing had been."""
    peer, own = two.run(failing_freeze, where)
    assert own == f"ArithmeticError: no luck in {where}"
    assert "rank 1 failed: ArithmeticError: no luck" in peer
    for result in two.run(forced, "measure", plain):
        assert result["differences"] == []
