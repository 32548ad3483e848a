"""FSDP2's setters and other interfaces of its modules: the same bits as without symmplan.

A program is marked with the cases in which it runs, and what must come out: `every_step` for what
the plan has from the start, `later` for what changes after it was made.
"""

from __future__ import annotations

import pytest
import torch
from fsdp_models import (
    Block,
    Net,
    Words,
    batch,
    both,
    cases_of,
    changing,
    mesh,
    needs,
    same,
    sgd,
    shard,
    train,
    train_step,
    update,
)
from ranks import pool_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

pytestmark = pytest.mark.ranks

two = pool_of(2)

SEVERAL_TYPES = needs("param_dtype_override_fn", MixedPrecisionPolicy)
#: FSDP2 reduces in what a parameter's ``grad_dtype`` says, where the policy says nothing.
GRADIENT_TYPES = needs("_has_grad_dtype_override", torch.Tensor)

USUAL, every_step = cases_of()
CHANGES, later = cases_of()


@every_step()
def policies(rank, world):
    def build():
        model = Net()
        kinds = [
            MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
            MixedPrecisionPolicy(torch.float16, torch.float32, output_dtype=torch.float32),
            MixedPrecisionPolicy(None, torch.bfloat16),
        ]
        own = model.blocks[0]
        own.up.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        for block, policy in zip(model.blocks, kinds, strict=True):
            fully_shard(block, mesh=mesh(world), mp_policy=policy)
        return fully_shard(
            model,
            mesh=mesh(world),
            mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32),
        )

    return both(build, train, rank)


@every_step(None, marks=SEVERAL_TYPES)
@every_step(torch.float32, marks=SEVERAL_TYPES)
def own_types(rank, world, reduce):
    """Modules whose parameters are gathered in several types; gradients are reduced in one."""

    class Scaled(Block):
        def __init__(self, dim, hidden):
            super().__init__(dim, hidden)
            self.scale = nn.Parameter(torch.rand(dim, 1, 1) + 0.5)

        def forward(self, x):
            return super().forward(x) * self.scale.flatten()

    def build():
        model = Net()
        model.blocks = nn.ModuleList(Scaled(16, 32) for _ in range(3))
        model.outlet.register_forward_pre_hook(lambda m, args: (args[0].to(m.weight.dtype),))
        policy = MixedPrecisionPolicy(
            torch.bfloat16,
            reduce,
            param_dtype_override_fn=lambda p: p.dtype if p.dim() == 3 else None,
        )
        return shard(model, mp_policy=policy)

    return both(build, train, rank)


@every_step(slice(1, None, 2), torch.float32, "push", marks=GRADIENT_TYPES)
@every_step(slice(1, None, 2), torch.float32, "placed", marks=GRADIENT_TYPES)
@every_step(slice(None), torch.float32, "push", marks=GRADIENT_TYPES)
@every_step(slice(None, None, 2), None, "push", marks=GRADIENT_TYPES)
def gradient_types(rank, world, which, dtype, choose):
    """Some parameters in bfloat16 have gradients in another type, or in any that comes."""

    def build():
        model = Net().bfloat16()
        for parameter in list(model.parameters())[which]:
            parameter.grad_dtype = dtype
        return shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))

    return both(build, changing(lambda *_: None), rank, choose=choose)


@later(False)
@later(True)
def reshard_forward(rank, world, root):
    def change(model, step, trace, rank):
        if step in (3, 6):
            model.set_reshard_after_forward(step == 6, recurse=not root)
        if root:
            model.set_reshard_after_forward(step % 2 == 0, recurse=False)

    return both(lambda: shard(Net()), changing(change, steps=8), rank)


@later(3)
@later(4)
def reshard_backward(rank, world, blocks):
    def change(model, step, trace, rank):
        if step in (3, 6):
            model.set_reshard_after_backward(step == 6)

    return both(lambda: shard(Net(blocks=blocks)), changing(change, steps=8), rank)


@later(True, False)
@later(False, False)
@later(False, True)
def unsynced_later(rank, world, reshard_after, reduce):
    """Accumulation without sync that begins after the plan was made."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(7):
            micros = 3 if step >= 3 else 1
            for micro in range(micros):
                last = micro == micros - 1
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(reshard_after or last)
                model.set_is_last_backward(last)
                loss = model(batch(10 * step + micro, rank)).float().pow(2).mean()
                loss.backward()
                trace.add("loss", loss)
            update(model, optimizer, trace, step)
        trace.parameters(model)

    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if reduce else MixedPrecisionPolicy()
    )
    return both(lambda: shard(Net(), mp_policy=policy), program, rank)


@later()
def unsynced_while_others_leave(rank, world):
    """Blocks are unsharded by hand all at once between two micro-batches of which only the
    second one reduces.
    """

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(5):
            model.set_requires_gradient_sync(False)
            model(batch(10 * step, rank)).pow(2).mean().backward()
            if step == 2:
                for block in reversed(model.blocks):
                    block.unshard()
            model.set_requires_gradient_sync(True)
            model(batch(10 * step + 1, rank)).pow(2).mean().backward()
            update(model, optimizer, trace, step)
        trace.parameters(model)

    return both(lambda: shard(Net(blocks=4)), program, rank)


@later()
def frozen_toggled(rank, world):
    def change(model, step, trace, rank):
        for i, block in enumerate(model.blocks):
            block.requires_grad_(step < 2 or (step + i) % 3 != 0)

    return both(lambda: shard(Net()), changing(change, steps=8), rank)


@every_step()
def tied_across(rank, world):
    """Two modules that share a weight are one group."""

    def build():
        model = Net(tied=True)
        for block in model.blocks:
            fully_shard(block, mesh=mesh(world))
        fully_shard([model.inlet, model.outlet], mesh=mesh(world))
        return fully_shard(model, mesh=mesh(world))

    return both(build, train, rank)


@every_step(False)
@later(True)
def not_in_backward(rank, world, changes):
    """The embedding at the beginning, which backward does not need."""

    def build():
        model = Words()
        fully_shard(model.words, mesh=mesh(world))
        shard(model)
        model.words.set_unshard_in_backward(False)
        return model

    def change(model, step, trace, rank):
        if changes:
            model.words.set_unshard_in_backward(step < 3)

    return both(build, changing(change, steps=8), rank)


@every_step()
def from_process_group(rank, world):
    def build():
        model = shard(Net())
        for module in (model, *model.blocks):
            module.set_allocate_memory_from_process_group_for_comm(True)
        return model

    return both(build, train, rank)


class Described(Net):
    def describe(self, x):
        return self.forward(x) * 2


@later()
def other_method(rank, world):
    def build():
        model = shard(Described())
        model.blocks[0].again = lambda x: x
        register_fsdp_forward_method(model, "describe")
        return model

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(5):
            loss = model.describe(batch(step, rank)).pow(2).mean()
            loss = loss + (model(batch(step + 50, rank)).mean() if step % 2 else 0)
            loss.backward()
            trace.add("loss", loss)
            update(model, optimizer, trace, step)

    return both(build, program, rank)


@later(True)
@later(False)
def by_hand(rank, world, planned_too):
    """Parameters are gathered to be read, and resharded without a forward pass."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(6):
            if planned_too or step >= 3:
                handles = [b.unshard(async_op=True) for b in model.blocks]
                for i, (block, handle) in enumerate(zip(model.blocks, handles, strict=True)):
                    if i != 1:
                        handle.wait()
                        for p in block.parameters():
                            trace.add("whole", p)
                        block.reshard()
            train_step(model, optimizer, trace, step, rank)
            if step == 4:
                model.unshard()
                for p in model.parameters(recurse=False):
                    trace.add("whole", p)
                model.inlet.weight.detach()
                model.reshard()
                model.reshard()
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


@every_step()
def grouped(rank, world):
    def build():
        model = Net(blocks=4)
        fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh(world))
        fully_shard([model.blocks[2], model.blocks[3]], mesh=mesh(world))
        return fully_shard(model, mesh=mesh(world))

    return both(build, train, rank)


@every_step("set_force_sum_reduction_for_comms", True)
@every_step(
    "set_separate_reduce_scatter_group", True, marks=needs("set_separate_reduce_scatter_group")
)
@every_step(
    "set_reduce_scatter_max_input_buffers", 2, marks=needs("set_reduce_scatter_max_input_buffers")
)
def scatter_settings(rank, world, name, value):
    def build():
        model = shard(Net())
        if name in ("set_force_sum_reduction_for_comms", "set_gradient_divide_factor"):
            for module in (model, *model.blocks):
                getattr(module, name)(value)
        else:
            getattr(model, name)(value)
        return model

    return both(build, train, rank)


@every_step(marks=needs("set_reduce_scatter_unused_params"))
def unused_here(rank, world):
    """Ranks use different parameters; zeros are reduced for the others."""

    class Either(Block):
        def forward(self, x):
            return x + (self.up(x)[:, :16] if rank == self.who else self.down(torch.cat([x, x], 1)))

    def build():
        model = Net()
        model.blocks = nn.ModuleList(Either(16, 32) for _ in range(3))
        for block in model.blocks:
            block.who = 1
        shard(model)
        model.set_reduce_scatter_unused_params(True)
        return model

    return both(build, train, rank)


@every_step()
def reduce_hook(rank, world):
    def build():
        model = shard(Net())
        for module in (model, *model.blocks):
            module.set_all_reduce_hook(lambda t: t.mul_(0.5))
        return model

    return both(build, train, rank)


@every_step()
def placements(rank, world):
    from torch.distributed.tensor import Shard

    def choose(p):
        return Shard(1) if p.dim() == 2 and p.size(0) >= p.size(1) else Shard(0)

    return both(lambda: shard(Net(), shard_placement_fn=choose), train, rank)


@every_step()
def uneven(rank, world):
    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(4):
            loss = model(batch(step, rank, dim=17)).pow(2).mean()
            loss.backward()
            update(model, optimizer, trace, step)

    return both(lambda: shard(Net(dim=17)), program, rank)


@later()
def shared_context(rank, world):
    """Two roots with one communication context, one after the other, in one plan."""
    from torch.distributed.fsdp import share_comm_ctx

    def build():
        stages = [shard(Net(blocks=2)) for _ in range(2)]
        share_comm_ctx(stages)
        return nn.Sequential(*stages)

    return both(build, train, rank)


@every_step(marks=needs("set_manual_backward_finalization"))
def finalized(rank, world):
    """The caller ends backward passes."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        model.set_manual_backward_finalization(True)
        for step in range(5):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss = model(batch(10 * step + micro, rank)).pow(2).mean()
                loss.backward()
                trace.add("loss", loss)
            model.finalize_backward()
            update(model, optimizer, trace, step)
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


@pytest.mark.parametrize(("program", "args"), USUAL)
def test_what_every_step_does(two, program, args):
    same(two.run(program, *args), plain=0, copies=0, replans=0)


@pytest.mark.parametrize(("program", "args"), CHANGES)
def test_what_changes_after_the_plan_was_made(two, program, args):
    same(two.run(program, *args))
