"""FSDP2's unsharded parameters in placements: where they lie, and programs in which they move."""

from __future__ import annotations

import pytest
import torch
from fsdp_models import (
    Net,
    Trace,
    batch,
    both,
    changing,
    differences,
    same,
    sgd,
    shard,
    train,
    train_step,
    update,
)
from ranks import RankPool, pool_of
from test_fsdp import float8, offload
from test_fsdp_setters import placements, uneven
from test_fsdp_user import replicated
from torch.distributed.fsdp import MixedPrecisionPolicy

import symmplan

pytestmark = pytest.mark.ranks

BLOCKS = [f"blocks.{i}" for i in range(3)]

two = pool_of(2)


def addresses(rank, world):
    """Whether all parameters in use lie in symmetric memory, and how many addresses each has."""
    model = shard(Net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=20.0)
    seen = {}

    def note(name):
        def hook(module, *_):
            pointers = tuple(p.data_ptr() for p in module.parameters())
            seen.setdefault(name, []).append(pointers)

        return hook

    train(model, Trace(), rank, steps=2)
    for name, block in model.blocks.named_children():
        block.down.register_forward_hook(note(name))
        block.down.register_full_backward_pre_hook(note(name))
    train(model, Trace(), rank, steps=3)
    ranges = [
        (s.tensor.data_ptr(), s.tensor.data_ptr() + s.tensor.numel())
        for s in handle._runtime.memory.arena.segments.values()
    ]
    inside = all(
        any(begin <= p < end for begin, end in ranges)
        for uses in seen.values()
        for pointers in uses
        for p in pointers
    )
    handle.remove()
    return inside, {name: (len(uses), len(set(uses))) for name, uses in seen.items()}


def test_parameters_lie_in_the_segment_in_forward_and_backward(two):
    for inside, counts in two.run(addresses):
        assert inside
        assert counts == {str(block): (6, 1) for block in range(3)}


class Side(Net):
    """Three blocks; the second one's output may have no part in the loss."""

    def forward(self, x):
        x = self.blocks[0](self.inlet(x))
        side = self.blocks[1](x)
        if not self.order:
            side = side.detach()
        return self.outlet(self.blocks[2](x)) + side


def unused(rank, world, steps):
    """FSDP2 prefetches a block in backward that then is not used, in some steps."""

    def change(model, step, trace, rank):
        model.order = [] if step in steps else [0, 1, 2]

    return both(lambda: shard(Side()), changing(change, steps=6), rank)


@pytest.mark.parametrize("steps", [(2, 3), (0, 1, 2, 5)])
def test_a_prefetch_that_nobody_needs_does_no_harm(two, steps):
    same(two.run(unused, steps))


def frozen_between(rank, world):
    """The plan is frozen by hand between forward and backward: a graph has views."""
    traces, told = [], {}
    for planned in (False, True):
        torch.manual_seed(7)
        model = shard(Net())
        handle = symmplan.fsdp.apply(model, choose="placed", timeout=20.0) if planned else None
        trace = Trace()
        traces.append(trace)
        optimizer = sgd(model)
        for step in range(5):
            loss = model(batch(step, rank)).pow(2).mean()
            if handle is not None and step == 0:
                handle.freeze()
            loss.backward()
            trace.add("loss", loss)
            update(model, optimizer, trace, step)
        trace.parameters(model)
        if handle is not None:
            told["placed"] = handle.stats.served
            handle.remove()
    told["differences"] = differences(*traces)
    return told


def test_a_plan_that_is_frozen_before_backward_leaves_the_graph_right(two):
    for told in two.run(frozen_between):
        assert told["differences"] == []
        assert told["placed"] > 0


def kept_unsharded(rank, world):
    """All blocks are unsharded by hand at once, in one step, in another order than planned."""

    def change(model, step, trace, rank):
        for block in reversed(model.blocks if step == 2 else ()):
            block.unshard()

    return both(lambda: shard(Net(blocks=4)), changing(change), rank)


@pytest.mark.further
def test_parameters_that_are_needed_at_once_make_room(two):
    for result in same(two.run(kept_unsharded), replans=1):
        assert result["stats"]["flat"] == ()
        assert (
            "other modules' parameters were needed at the same time" in result["stats"]["reasons"]
        )
        assert result["stats"]["copies"] > 0


@pytest.mark.parametrize(
    ("program", "reasons"),
    [
        (unused, {}),
        (float8, {}),
        (offload, dict.fromkeys(["model", *BLOCKS], "its shards lie on the CPU")),
        (uneven, {}),
        (
            placements,
            dict.fromkeys(
                ["model", *BLOCKS], "a parameter is not sharded along its first dimension"
            ),
        ),
        (replicated, {"blocks.0": "its parameters are not sharded"}),
    ],
)
def test_the_handle_says_why_gathers_are_flat(two, program, reasons):
    arguments = [()] if program is unused else []
    for result in two.run(program, *arguments):
        assert result["differences"] == []
        assert dict(result["stats"]["flat"]) == reasons


def changed(rank, world, what):
    """From the third step on the program does something else."""

    def change(model, step, trace, rank):
        blocks = list(model.blocks)
        for i, block in enumerate(blocks if step == 2 else ()):
            if what == "keep":
                block.set_reshard_after_forward(False)
            elif what == "prefetch":
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
                block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])
        if what == "freeze" and step in (2, 4):
            blocks[1].requires_grad_(step == 4)

    return both(lambda: shard(Net(blocks=4)), changing(change, steps=6), rank)


@pytest.mark.parametrize("what", ["keep", "prefetch", "freeze"])
def test_programs_that_change(two, what):
    same(two.run(changed, what))


def views(rank, world):
    """The program keeps views of parameters that were resharded."""
    kept = []

    def program(model, trace, rank):
        up = model.blocks[1].up
        hook = up.register_forward_hook(lambda m, *_: kept.append(m.weight.detach()[:1]))
        train(model, trace, rank, steps=5)
        hook.remove()

    return both(lambda: shard(Net()), program, rank)


def test_views_that_the_program_keeps_do_no_harm(two):
    same(two.run(views))


def graphs(rank, world):
    """Graphs that are used twice, and that live across other passes."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(4):
            first = model(batch(step, rank)).pow(2).mean()
            with torch.no_grad():
                trace.add("between", model(batch(50 + step, rank)))
            first.backward(retain_graph=True)
            first.backward()
            update(model, optimizer, trace, step)
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


def test_graphs_that_live_across_passes(two):
    same(two.run(graphs))


def llama(rank, world, dim):
    """Two layers of a Llama, of any width."""
    from torch.distributed.fsdp import fully_shard

    from symmplan.bench.parts.llama import Llama

    def build():
        model = Llama(2, dim)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(1, 5, dim, generator=generator)
            loss = model(x).square().mean()
            loss.backward()
            trace.add(f"{step}.loss", loss)
            update(model, optimizer, trace, step)
        trace.parameters(model)

    return both(build, program, rank, close=1e-5)


@pytest.mark.parametrize("world", [3, 2, 5, 7])
def test_what_the_ranks_do_not_divide_is_gathered_in_place(world):
    """Of 12 rows in parts of two or three the last of 5 or 7 ranks have none."""
    with RankPool(world) as ranks:
        for result in ranks.run(llama, 48):
            assert result["differences"] == []
            assert result["stats"]["flat"] == ()
            assert result["stats"]["plain"] == 0


def deepened(rank, world, keeps):
    """Prefetch lists get longer after the plan was made. Put-off gathers and replans by step."""
    models, handle, seen, kept = [], None, [], []
    for planned in (False, True):
        torch.manual_seed(7)
        model = shard(Net(blocks=6))
        models.append((model, torch.optim.SGD(model.parameters(), lr=1e-2)))
        if planned:
            handle = symmplan.fsdp.apply(model, choose="placed", timeout=30.0)
    wrong = []
    for step in range(8):
        losses = []
        for model, optimizer in models:
            blocks = list(model.blocks)
            for i, block in enumerate(blocks if step == 3 else ()):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 4])
                block.set_modules_to_backward_prefetch(blocks[max(0, i - 3) : i][::-1])
            loss = model(batch(step, rank)).pow(2).mean()
            loss.backward()
            if keeps and step == 2:
                lives = model(batch(step, rank))
                kept += [lives] if rank == 0 else []
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        wrong += [] if torch.equal(*losses) else [step]
        late = sum(n for why, n in handle.stats.reasons if "ahead of its time" in why)
        seen.append((late, handle.stats.replans))
    for a, b in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        wrong += [] if torch.equal(a.to_local(), b.to_local()) else ["parameters"]
    handle.remove()
    return wrong, seen


@pytest.mark.further
def test_a_plan_follows_prefetch_lists_that_get_longer(two):
    for wrong, seen in two.run(deepened, False):
        assert wrong == []
        late, replans = zip(*seen, strict=True)
        assert late[2] == 0 < late[3]  # what is new has no room yet
        assert late[4] == late[-1]  # but from the next step on
        assert replans[2] == 0 < replans[-1] == replans[4]


@pytest.mark.further
def test_parameters_stay_while_a_rank_has_views_of_them(two):
    for wrong, seen in two.run(deepened, True):
        assert wrong == []
        assert seen[-1][0] > seen[3][0]


def replaced(rank, world, when):
    """Somebody counts the gathers by a method on FSDP2's class."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    original, calls = FSDPParamGroup.unshard, []

    def counted(self, *args, **kwargs):
        calls.append(self)
        return original(self, *args, **kwargs)

    found = []

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(5):
            if step == when:
                FSDPParamGroup.unshard = counted
            calls.clear()
            train_step(model, optimizer, trace, step, rank)
            found.append(len(calls))
        FSDPParamGroup.unshard = original

    return both(lambda: shard(Net()), program, rank), found


@pytest.mark.further
@pytest.mark.parametrize("when", [3, 0])
def test_methods_that_somebody_replaces_on_the_class_run(two, when):
    for result, calls in two.run(replaced, when):
        same([result])
        plain, planned = calls[:5], calls[5:]
        assert plain == planned
        assert bool(plain[when])
        assert set(dict(result["stats"]["flat"]).values()) == {"methods of its class were replaced"}
