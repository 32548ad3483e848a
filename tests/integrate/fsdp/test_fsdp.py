"""FSDP2 in planned placements: everything it can do, bit for bit as without symmplan.

Each program, ``name(rank, world)``, runs on a rank and returns `both`; the test behind it says
what must come out.
"""

from __future__ import annotations

import pytest
import torch
from fsdp_conditions import in_flat_buffers
from fsdp_models import (
    Net,
    Trace,
    batch,
    both,
    changing,
    check,
    mesh,
    quantized,
    sgd,
    shard,
    train,
    train_step,
    update,
)
from ranks import pool_of, run_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import symmplan

pytestmark = pytest.mark.ranks

two = pool_of(2)


def plain(rank, world):
    return both(lambda: shard(Net()), train, rank)


def test_every_collective_of_every_later_step_is_placed_in_one_segment(two):
    stats = check(two.run(plain))
    # 4 gathers in forward, 3 in backward (the root keeps its parameters), 4 reduce-scatters.
    assert stats["recorded"] == 11
    assert stats["served"] == 3 * 11
    assert stats["unshared_bytes"] > 2 * stats["segment_bytes"]


def mixed(rank, world, param, reduce, output):
    inner = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    outer = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)

    def build():
        model = shard(Net(), root=False, mp_policy=inner)
        return fully_shard(model, mesh=mesh(world), mp_policy=outer)

    return both(build, train, rank)


@pytest.mark.parametrize(
    ("param", "reduce", "output"),
    [
        (torch.bfloat16, None, None),
        (torch.bfloat16, torch.float32, None),
        (torch.float16, torch.float32, torch.float32),
        (None, torch.bfloat16, torch.bfloat16),
    ],
)
def test_mixed_precision(two, param, reduce, output):
    check(two.run(mixed, param, reduce, output))


def reshard(rank, world, after_forward):
    return both(lambda: shard(Net(), reshard_after_forward=after_forward), train, rank)


@pytest.mark.parametrize("after_forward", [True, False])
def test_reshard_after_forward(two, after_forward):
    check(two.run(reshard, after_forward))


def prefetch(rank, world, forward, backward):
    def build():
        model = shard(Net(blocks=4))
        blocks = list(model.blocks)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + forward])
            if backward:
                block.set_modules_to_backward_prefetch(blocks[max(0, i - backward) : i][::-1])
        return model

    return both(build, train, rank)


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (2, 0), (0, 2), (3, 3)])
def test_prefetch_lists(two, forward, backward):
    check(two.run(prefetch, forward, backward))


def accumulation(rank, world, sync, reshard_after):
    """Three micro-batches per step; only the last one reduces unless ``sync``."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(4):
            for micro in range(3):
                last = micro == 2
                model.set_requires_gradient_sync(sync or last)
                model.set_reshard_after_backward(reshard_after or last)
                model.set_is_last_backward(last)
                loss = model(batch(10 * step + micro, rank)).pow(2).mean()
                loss.backward()
                trace.add("loss", loss)
            update(model, optimizer, trace, step)

    return both(lambda: shard(Net()), program, rank)


@pytest.mark.parametrize("reshard_after", [True, False])
@pytest.mark.parametrize("sync", [True, False])
def test_gradient_accumulation(two, sync, reshard_after):
    check(two.run(accumulation, sync, reshard_after), reordered=None)


def frozen(rank, world):
    """One block has no gradient at all, others have some."""

    def build():
        model = Net(blocks=4)
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.weight.requires_grad_(False)
        model.inlet.requires_grad_(False)
        return shard(model)

    return both(build, train, rank)


def tied(rank, world):
    return both(lambda: shard(Net(tied=True)), train, rank)


def nested(rank, world):
    """Modules inside FSDP modules are FSDP modules, too."""

    def build():
        model = Net()
        for block in model.blocks:
            fully_shard(block.up, mesh=mesh(world))
        return shard(model)

    return both(build, train, rank)


def root_only(rank, world):
    return both(lambda: fully_shard(Net(), mesh=mesh(world)), train, rank)


def no_root(rank, world):
    """Only the blocks are sharded: each is a root of its own."""

    def build():
        model = shard(Net(), root=False)
        for parameter in [*model.inlet.parameters(), *model.outlet.parameters()]:
            parameter.requires_grad_(False)  # nobody reduces their gradients
        return model

    return both(build, train, rank)


def several_forwards(rank, world):
    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(4):
            losses = [model(batch(5 * step + i, rank)).pow(2).mean() for i in range(3)]
            sum(losses).backward()
            update(model, optimizer, trace, step)

    return both(lambda: shard(Net()), program, rank)


def state_dict(rank, world):
    """Saved and loaded between steps, sharded and full."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    def program(model, trace, rank):
        optimizer = sgd(model)
        saved = None
        for step in range(5):
            train_step(model, optimizer, trace, step, rank)
            if step == 1:
                saved = {k: v.clone() for k, v in model.state_dict().items()}
            if step == 2:
                full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
                for name, value in full.items():
                    trace.add(name, value)
            if step == 3:
                set_model_state_dict(model, saved)
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


def offload(rank, world):
    policy = CPUOffloadPolicy(pin_memory=False)
    return both(lambda: shard(Net(), offload_policy=policy), train, rank)


def clipping(rank, world):
    """Gradient clipping and an optimizer that steps inside backward."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(4):
            model(batch(step, rank)).pow(2).mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            trace.add("norm", norm.full_tensor())
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return both(lambda: shard(Net()), program, rank)


def divide_factor(rank, world):
    """A factor of the user's own: a reduction that only the process group can do, or none."""

    def build():
        model = shard(Net(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(3.0)
        return model

    return both(build, train, rank)


@pytest.mark.parametrize(
    "program",
    [
        frozen,
        tied,
        nested,
        root_only,
        no_root,
        several_forwards,
        state_dict,
        offload,
        clipping,
        divide_factor,
    ],
)
def test_kinds_of_models_and_steps(two, program):
    check(two.run(program))


def checkpointed(rank, world, outside):
    """Activation checkpointing inside FSDP modules or around them."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def build():
        model = Net()
        if outside:
            for block in model.blocks:
                fully_shard(block, mesh=mesh(world))
            model.blocks = nn.ModuleList(checkpoint_wrapper(b) for b in model.blocks)
            return fully_shard(model, mesh=mesh(world))
        model.blocks = nn.ModuleList(checkpoint_wrapper(b) for b in model.blocks)
        return shard(model)

    return both(build, train, rank)


@pytest.mark.parametrize("outside", [True, False])
def test_activation_checkpointing(two, outside):
    check(two.run(checkpointed, outside))


def explicit_unshard(rank, world, async_op):
    """The user unshards by hand, ahead of the forward pass."""

    def change(model, step, trace, rank):
        handles = [m.unshard(async_op=async_op) for m in (model, model.blocks[1])]
        for handle in handles:
            if handle is not None:
                handle.wait()

    return both(lambda: shard(Net()), changing(change, steps=4), rank)


@pytest.mark.parametrize("async_op", [True, False])
def test_unsharding_by_hand(two, async_op):
    check(two.run(explicit_unshard, async_op))


def evaluation(rank, world, mode, first):
    """Passes without gradients between training steps, and before the first."""
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]

    def change(model, step, trace, rank):
        if first or step:
            for i in range(2):
                with context():
                    trace.add("eval", model(batch(50 + i, rank)))

    return both(lambda: shard(Net()), changing(change), rank)


# Plain FSDP2 cannot train after an inference_mode pass that came first.
@pytest.mark.parametrize(
    ("mode", "first"), [("no_grad", True), ("no_grad", False), ("inference_mode", False)]
)
def test_evaluation_between_training_steps(two, mode, first):
    """A pass without gradients uses the forward part of the plan."""
    check(two.run(evaluation, mode, first), reordered=None)


def inference_only(rank, world):
    def program(model, trace, rank):
        for step in range(16):
            with torch.no_grad():
                trace.add("eval", model(batch(step, rank)))

    return both(lambda: shard(Net()), program, rank)


def test_a_program_without_gradients_is_planned_after_some_rounds(two):
    stats = check(two.run(inference_only), reordered=None)
    # The root stays unsharded, so a pass after the first one gathers 3 blocks.
    assert stats["recorded"] >= 8 * 4
    assert stats["recorded"] + stats["served"] == 4 + 15 * 3


def float8(rank, world):
    """Weights that are gathered as bytes with a scale, as float8 training does."""

    def build():
        model = Net()
        for block in model.blocks:
            quantized(block.up)
        return shard(model)

    return both(build, train, rank)


@pytest.mark.further
def test_weights_gathered_as_bytes_of_several_types(two):
    check(two.run(float8))


@pytest.mark.parametrize(
    ("program", "args"),
    [
        (plain, ()),
        (mixed, (torch.bfloat16, torch.float32, None)),
        (accumulation, (False, True)),
    ],
)
def test_where_parameters_cannot_be_placed_gathers_are_flat(two, program, args):
    stats = check(two.run(in_flat_buffers, program, *args))
    assert stats["served"] >= 3 * 11
    assert dict(stats["flat"]) == dict.fromkeys(
        ["model", "blocks.0", "blocks.1", "blocks.2"], "this torch's FSDP2 lacks what is replaced"
    )


def alone(rank, world):
    """One rank: FSDP2 asks for buffers and runs no collective."""
    model = shard(Net())
    handle = symmplan.fsdp.apply(model, timeout=20.0)
    train(model, Trace(), rank, steps=3)
    told = (handle.planned, handle.stats.recorded, handle.stats.served, handle.stats.plain)
    handle.remove()
    return told


def test_one_rank_needs_no_plan():
    assert run_ranks(alone, 1) == [(False, 0, 0, 0)]
