"""Weights with gathers of their own: what ``fsdp_pre_all_gather`` returns lies in placements."""

from __future__ import annotations

import pytest
import torch
from fsdp_models import (
    Net,
    Trace,
    batch,
    both,
    changing,
    check,
    same,
    sgd,
    shard,
    train,
    train_step,
)
from gathered_weights import Changing, Hidden, InBytes, Packed, weighted
from ranks import RanksFailed, pool_of
from torch.distributed.fsdp import MixedPrecisionPolicy

import symmplan

pytestmark = pytest.mark.ranks

two = pool_of(2)
three = pool_of(3)

KINDS = [InBytes, Packed]


def net(kind, blocks=3, frozen=False, **options):
    """Blocks of two layers, of which the first is gathered in its own way."""
    model = Net(blocks=blocks)
    for block in model.blocks:
        weighted(block.up, kind)
        if frozen:
            block.up.weight.requires_grad_(False)
    return shard(model, **options)


def trained(rank, world, kind, frozen=False, close=0.0):
    return both(lambda: net(kind, frozen=frozen), train, rank, close=close)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_weight_makes_of_its_shard_lies_in_a_placement(two, kind, frozen):
    stats = check(two.run(trained, kind, frozen))
    assert stats["flat"] == ()
    assert stats["served"] > 0


@pytest.mark.further
def test_shards_that_are_uneven(three):
    """Weights have 32, 48 and 64 rows."""
    for result in same(three.run(trained, InBytes, False, 1e-5)):
        assert result["stats"]["flat"] == ()
        assert result["stats"]["plain"] == 0


def as_types(rank, world, steps=6):
    """Parameters of three types in one module, one of them frozen."""

    def build():
        model = Net()
        for block in model.blocks:
            block.up.bias = torch.nn.Parameter(block.up.bias.detach().double(), False)
            block.steps = torch.nn.Parameter(torch.ones(steps, dtype=torch.float16), False)
            block.up.forward = lambda x, up=block.up: torch.nn.functional.linear(
                x, up.weight, up.bias.to(up.weight.dtype)
            )
        return shard(model)

    return both(build, train, rank)


def test_parameters_of_several_types_lie_in_one_placement(two):
    stats = check(two.run(as_types))
    assert stats["flat"] == ()


def mixed(rank, world, kind):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return both(lambda: net(kind, mp_policy=policy), train, rank)


@pytest.mark.further
@pytest.mark.parametrize("kind", KINDS)
def test_such_weights_beside_parameters_of_mixed_precision(two, kind):
    stats = check(two.run(mixed, kind))
    assert stats["flat"] == ()


def in_the_segment(rank, world):
    """Whether what modules compute with lies in symmetric memory, at one address."""
    model = net(InBytes)
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=20.0)
    seen = {}

    def hook(module, *_):
        weight = module.weight
        seen.setdefault(id(module), []).append((weight._data.data_ptr(), weight._scales.data_ptr()))

    train(model, Trace(), rank, steps=2)
    hooks = [block.up.register_forward_hook(hook) for block in model.blocks]
    hooks += [block.up.register_full_backward_pre_hook(hook) for block in model.blocks]
    train(model, Trace(), rank, steps=3)
    for each in hooks:
        each.remove()
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
    train(model, Trace(), rank, steps=2)  # in FSDP2's own memory again
    return inside, [(len(uses), len(set(uses))) for uses in seen.values()]


def test_modules_compute_with_the_bytes_of_the_segment(two):
    for inside, counts in two.run(in_the_segment):
        assert inside
        assert counts == [(6, 1)] * 3


def acts(rank, world, kind, what):
    """Steps between which something happens that moves parameters, or reads them elsewhere."""

    def change(model, step, trace, rank):
        blocks = list(model.blocks)
        if what == "unsharded by hand" and step in (2, 4):
            for block in reversed(blocks):
                block.unshard()
        if what == "prefetch" and step == 2:
            for i, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        if what == "kept" and step == 2:
            for block in blocks:
                block.set_reshard_after_forward(False)
        if what == "evaluation" and step in (1, 3):
            model.eval()
            with torch.no_grad():
                trace.add("eval", model(batch(step, rank)))
            model.train()
        if what == "inference" and step in (1, 3):
            with torch.inference_mode():
                trace.add("eval", model(batch(step, rank)))
        if what == "frozen" and step in (2, 4):
            blocks[1].requires_grad_(step == 4)

    return both(lambda: net(kind, blocks=4), changing(change, steps=6), rank)


ACTS = ["evaluation", "unsharded by hand", "prefetch", "kept", "inference", "frozen"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "what", [ACTS[0], ACTS[1], *(pytest.param(w, marks=pytest.mark.further) for w in ACTS[2:])]
)
def test_programs_in_which_such_weights_move(two, kind, what):
    same(two.run(acts, kind, what))


def accumulated(rank, world, kind, sync):
    """Several backward passes of a step, also of graphs that live at the same time."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(4):
            model.set_requires_gradient_sync(sync)
            losses = [model(batch(10 * step + i, rank)).pow(2).mean() for i in range(2)]
            losses[0].backward()
            model.set_requires_gradient_sync(True)
            losses[1].backward()
            train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    return both(lambda: net(kind), program, rank)


@pytest.mark.further
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sync", [False, True])
def test_graphs_that_live_at_one_time(two, kind, sync):
    same(two.run(accumulated, kind, sync))


def removed_between(rank, world, kind):
    """The handle is removed and applied again, and frozen between a forward and its backward."""
    traces = []
    for planned in (False, True):
        torch.manual_seed(7)
        model = net(kind)
        trace = Trace()
        traces.append(trace)
        optimizer = sgd(model)
        handle = None
        for step in range(8):
            if planned and step in (0, 4):
                handle = symmplan.fsdp.apply(model, choose="placed", timeout=20.0)
            loss = model(batch(step, rank)).pow(2).mean()
            if planned and step in (0, 5):
                handle.freeze()
            loss.backward()
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if planned and step in (3, 7):
                handle.remove()
        trace.parameters(model)
    left, right = traces
    return [n for (n, a), (_, b) in zip(left.items, right.items, strict=True) if not a.equal(b)]


@pytest.mark.parametrize("kind", [InBytes, pytest.param(Packed, marks=pytest.mark.further)])
def test_a_handle_that_comes_and_goes(two, kind):
    assert two.run(removed_between, kind) == [[], []]


def test_a_tensor_that_does_not_show_its_parts_is_gathered_flat(two):
    reason = "a parameter's tensor does not show what it consists of (__tensor_flatten__)"
    for result in two.run(trained, Hidden):
        assert result["differences"] == []
        assert dict(result["stats"]["flat"]) == {f"blocks.{i}": reason for i in range(3)}


def changes(rank, world):
    Changing.gathers = 0
    model = net(Changing, blocks=1)
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=20.0)
    try:
        train(model, Trace(), rank, steps=4)
    finally:
        handle.remove()


@pytest.mark.further
def test_tensors_of_other_types_than_before_are_an_error(two):
    with pytest.raises(RanksFailed, match="returns other tensors than before"):
        two.run(changes)
