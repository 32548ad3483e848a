"""Which gathers run: those of plain FSDP2, whatever a rank does to its shards or parameters."""

from __future__ import annotations

import contextlib

import fsdp_models
import pytest
import torch
from fsdp_models import Block, Net, batch, mesh, same, sgd, shard, train_step
from test_fsdp import pool_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import symmplan
from symmplan.integrate.fsdp.parameter_storage import ParameterStorage

pytestmark = pytest.mark.ranks

two = pool_of(2)

BLOCKS = 4


@contextlib.contextmanager
def noted(log):
    """``log`` gets the number of bytes of each all-gather, flat or where parameters live."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as own

    gather, flat = ParameterStorage.gather, own.DefaultAllGather.__call__

    def gathering(placed):
        log.append(sum(output.nbytes for output in placed._outputs))
        gather(placed)

    def flatly(self, output_tensor, **kwargs):
        log.append(output_tensor.nbytes)
        return flat(self, output_tensor=output_tensor, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterStorage, "gather", gathering)
        patch.setattr(own.DefaultAllGather, "__call__", flatly)
        yield


def stepped(rank, world, options):
    """What the last of four steps gathers, plainly and planned."""
    logs = []

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(4):
            log = []
            with noted(log):
                train_step(model, optimizer, trace, step, rank)
        logs.append(log)
        trace.parameters(model)

    result = fsdp_models.both(lambda: shard(Net(BLOCKS)), program, rank, **options)
    return {**result, "logs": logs}


def test_every_gather_of_the_plain_program_runs_in_its_order(two):
    for result in same(two.run(stepped, {}), reordered=0, plain=0, copies=0, reused=0):
        plain, planned = result["logs"]
        assert len(plain) == 1 + 2 * BLOCKS
        assert planned == plain


@pytest.mark.parametrize(("live", "kept"), [(4, 2), (3, 0), (5, 4), (9, 4)])
def test_modules_that_are_to_stay_are_gathered_once(two, live, kept):
    """Besides the root's two blocks have bytes; of more the last ones stay."""
    options = {"unsharded_modules": live}
    for result in same(two.run(stepped, options), reordered=0, plain=0, copies=0, replans=0):
        plain, planned = result["logs"]
        assert planned == plain[: 1 + BLOCKS] + plain[1 + BLOCKS + kept :]
        assert result["stats"]["reused"] == 3 * kept  # the first step was recorded


class Clamped(nn.Linear):
    """Writes to its weight in forward, past everything that counts such writes."""

    def forward(self, x):
        self.weight.data.clamp_(-0.05, 0.05)
        return super().forward(x)


def clamped(rank, world):
    """Six linear layers that write to their weights."""

    def build():
        model = nn.Sequential(*(Clamped(16, 16) for _ in range(6)))
        for layer in model:
            fully_shard(layer, mesh=mesh(world))
        return fully_shard(model, mesh=mesh(world))

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(8):
            train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    return fsdp_models.both(build, program, rank)


def test_what_forward_writes_past_all_counters_is_gone_in_backward(two):
    same(two.run(clamped), reused=0)


def stays(rank, world):
    """What forward writes to the parameters of a module that stays is there in backward."""
    seen = []

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(4):
            model(batch(step, rank)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def build():
        model = shard(Net(BLOCKS))
        last = model.blocks[-1].up

        def write(module, _):
            module.weight.data.fill_(0.5)

        def look(module, _):
            seen.append(bool((module.weight == 0.5).all()))

        last.register_forward_pre_hook(write)
        last.register_full_backward_pre_hook(look)
        return model

    traces = fsdp_models.both(build, program, rank, unsharded_modules=5)
    return traces["stats"], seen


def test_more_live_gathers_are_reshard_after_forward_off_for_the_last_modules(two):
    for stats, seen in two.run(stays):
        assert stats["reused"] > 0
        assert seen == [False] * 4 + [False] + [True] * 3  # plainly; and planned from the second


def its_shard(model, rank):
    """Rank 0 alone scales a shard."""
    if rank == 0:
        with torch.no_grad():
            model.blocks[-1].up.weight.to_local().mul_(1.5)


def past_counters(model, rank):
    if rank == 0:
        model.blocks[-1].up.weight.to_local().data.mul_(1.5)


def one_element(model, rank):
    """A parameter of one element, whose other shards are empty."""
    with torch.no_grad():
        model.blocks[-1].scale.to_local().clamp_(0.5, 0.9)


def its_optimizer(model, rank):
    """Rank 0 alone steps another optimizer, of its own shards."""
    if rank == 0:
        shards = [p.to_local().detach() for p in model.blocks[-2].parameters()]
        for one in shards:
            one.grad = torch.ones_like(one)
        torch.optim.SGD(shards, lr=0.1, foreach=True).step()
        for one in shards:
            one.grad = None


def own_tensors(model, rank):
    """Of this rank alone: nothing may depend on it."""
    if rank == 0:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        torch.optim.SGD([weight], lr=0.1).step()


def everywhere(model, rank):
    for parameter in model.blocks[-1].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(model.blocks[-1].parameters(), lr=0.1, foreach=True)
    optimizer.step()
    optimizer.zero_grad()


class Scaled(Block):
    """Has a parameter of one element."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return super().forward(x) * self.scale


def scaled():
    model = Net(BLOCKS)
    model.blocks[-1] = Scaled()
    return shard(model)


def changed(rank, world, change, where):
    """A shard changes on some ranks in forward, or between forward and backward."""

    def now(model, rank):
        fsdp_models.synchronize()
        change(model, rank)
        fsdp_models.synchronize()

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(6):
            hook = None
            if where == "forward" and step > 2:
                block = model.blocks[1].up
                hook = block.register_forward_hook(lambda *_: now(model, rank))
            loss = model(batch(step, rank)).pow(2).mean()
            if where == "between" and step > 2:
                now(model, rank)
            if hook is not None:
                hook.remove()
            loss.backward()
            trace.add(f"{step}.loss", loss)
            fsdp_models.update(model, optimizer, trace, step)
        trace.parameters(model)

    return fsdp_models.both(scaled, program, rank)


CHANGES = [its_shard, past_counters, one_element, its_optimizer, own_tensors, everywhere]


@pytest.mark.parametrize("where", ["between", "forward"])
@pytest.mark.parametrize("change", CHANGES)
def test_shards_that_change_on_some_ranks_are_gathered_as_they_are(two, change, where):
    same(two.run(changed, change, where), copies=0, plain=0, reordered=0)


def evaluated(rank, world, what, live):
    """Passes without gradients between steps, and between micro-batches; the last unit stays.

    As in Accelerate's and torchtitan's layouts, where the last unit is not resharded after forward.
    """

    def build():
        model = Net(6)
        for i, block in enumerate(model.blocks):
            fully_shard(block, mesh=mesh(world), reshard_after_forward=i < 5)
        return fully_shard(model, mesh=mesh(world))

    def look(trace, model, step, passes):
        model.eval()
        context = torch.inference_mode() if what == "inference" else torch.no_grad()
        for turn in range(passes):
            with context if turn == 0 else torch.no_grad():
                trace.add(f"{step}.{turn}.eval", model(batch(50 + step + turn, rank)))
        model.train()

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(10):
            if what == "before" and step == 0:
                look(trace, model, step, 2)
            if what in ("between", "inference") and step in (3, 5, 8):
                look(trace, model, step, 1)
            if what == "generates" and step in (3, 6):
                look(trace, model, step, 5)
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss = model(batch(10 * step + micro, rank)).pow(2).mean()
                loss.backward()
                trace.add(f"{step}.{micro}.loss", loss)
                if what == "accumulates" and micro == 0 and step in (3, 6):
                    look(trace, model, step, 2)
            fsdp_models.update(model, optimizer, trace, step)
        trace.parameters(model)

    def end(handle):
        stats = handle.stats
        for_good = stats.plain, stats.copies
        return stats.flat, for_good

    return fsdp_models.both(build, program, rank, look=end, unsharded_modules=live)


EVALUATIONS = ["between", "inference", "generates", "accumulates", "before"]


@pytest.mark.parametrize(
    ("what", "live"),
    [
        *((what, None) for what in EVALUATIONS),
        *(pytest.param("between", live, marks=pytest.mark.further) for live in (3, 4, 5)),
    ],
)
def test_evaluation_costs_no_placement(two, what, live):
    for result in two.run(evaluated, what, live):
        assert result["differences"] == []
        assert result["looked"][0] == ()
        assert result["stats"]["replans"] <= 2
        assert result["stats"]["plain"] == 0


def later(rank, world, lists):
    """From the fourth step on blocks are prefetched three ahead, in forward or backward or both."""
    seen = []

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(12):
            blocks = list(model.blocks)
            for i, block in enumerate(blocks if step == 4 else ()):
                if "forward" in lists and i < 3:
                    block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 4])
                if "backward" in lists and i > 2:
                    block.set_modules_to_backward_prefetch(blocks[i - 3 : i][::-1])
            train_step(model, optimizer, trace, step, rank)
            if handles:
                stats = handles[0].stats
                late = sum(n for why, n in stats.reasons if "ahead of its time" in why)
                seen.append((late, stats.replans))
        trace.parameters(model)

    handles = []
    apply = symmplan.fsdp.apply

    def applied(*args, **kwargs):
        handles.append(apply(*args, **kwargs))
        return handles[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmplan.fsdp, "apply", applied)
        result = fsdp_models.both(lambda: shard(Net(6)), program, rank)
    return {**result, "seen": seen}


LISTS = [("forward",), ("backward",), ("forward", "backward")]


@pytest.mark.further
@pytest.mark.parametrize("lists", LISTS)
def test_longer_prefetch_lists_are_settled_at_once(two, lists):
    for result in two.run(later, lists):
        assert result["differences"] == []
        seen = result["seen"]
        assert seen[3] == (0, 0)
        assert seen[6] == seen[-1]
        assert seen[-1][1] <= 2


def kept_buffer(rank, world):
    """Somebody keeps the parameters' bytes over a plan: what is held is what is said."""
    told = []

    def program(model, trace, rank):
        optimizer = sgd(model)
        kept = []
        for step in range(8):
            blocks = list(model.blocks)
            for i, block in enumerate(blocks if step == 3 else ()):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 4])
            if step == 2:
                kept.append(model(batch(step, rank)))  # a graph that lives on has views
            if step == 6:
                kept.clear()
            train_step(model, optimizer, trace, step, rank)
            held = [s for s in symmplan.segments() if "FSDP2" in s.users]
            told.append((sum(s.nbytes for s in held), [s.name for s in held]))

    def look(handle):
        return handle.stats.segment_bytes, handle.plan.peak_bytes, handle.plan.unsharded_modules

    result = fsdp_models.both(lambda: shard(Net(6)), program, rank, look=look, unsharded_modules=4)
    return {**result, "told": told}


@pytest.mark.long
def test_what_is_held_is_what_is_reported(two):
    for result in two.run(kept_buffer):
        assert result["differences"] == []
        held, peak, live = result["looked"]
        assert live is not None
        nbytes, names = result["told"][-1]
        assert nbytes == held == peak
        assert len(names) == len(set(names)) == 1
