"""FSDP2's setters and other interfaces, one function each; see `test_fsdp_setters.py`."""

from __future__ import annotations

import contextlib
import tempfile

import torch
import torch.distributed as dist
from fsdp_models import DEVICE, Block, Net, Trace, batch, both, mesh, shard, train, train_step
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def changing(build, change, steps=8):
    """Train; ``change(model, step)`` before each step."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(steps):
            change(model, step)
            train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    return build, program


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


def reshard_forward(rank, world, root):
    def change(model, step):
        if step in (3, 6):
            model.set_reshard_after_forward(step == 6, recurse=not root)
        if root:
            model.set_reshard_after_forward(step % 2 == 0, recurse=False)

    return both(*changing(lambda: shard(Net()), change), rank)


def reshard_backward(rank, world, blocks):
    def change(model, step):
        if step in (3, 6):
            model.set_reshard_after_backward(step == 6)

    return both(*changing(lambda: shard(Net(blocks=blocks)), change), rank)


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
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters(model)

    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if reduce else MixedPrecisionPolicy()
    )
    return both(lambda: shard(Net(), mp_policy=policy), program, rank)


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
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters(model)

    return both(lambda: shard(Net(blocks=4)), program, rank)


def frozen_toggled(rank, world):
    def change(model, step):
        for i, block in enumerate(model.blocks):
            block.requires_grad_(step < 2 or (step + i) % 3 != 0)

    return both(*changing(lambda: shard(Net()), change), rank)


def tied_across(rank, world):
    """Two modules that share a weight are one group."""

    def build():
        model = Net(tied=True)
        for block in model.blocks:
            fully_shard(block, mesh=mesh(world))
        fully_shard([model.inlet, model.outlet], mesh=mesh(world))
        return fully_shard(model, mesh=mesh(world))

    return both(build, train, rank)


class Recomputed(Net):
    reentrant = True

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = self.inlet(x)
        for i in self.order:
            x = checkpoint(self.blocks[i], x, use_reentrant=self.reentrant)
        return self.outlet(x)


def recomputed(rank, world, reentrant, several):
    def program(model, trace, rank):
        model.reentrant = reentrant
        if not several:
            return train(model, trace, rank)
        optimizer = sgd(model)
        for step in range(4):
            losses = [model(batch(5 * step + i, rank)).pow(2).mean() for i in range(2)]
            sum(losses).backward()
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return trace.parameters(model)

    return both(lambda: shard(Recomputed()), program, rank)


def saved_to_disk(rank, world, full):
    """Model and optimizer through torch.distributed.checkpoint in the middle."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    def program(model, trace, rank):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = StateDictOptions(full_state_dict=full)
        with tempfile.TemporaryDirectory() as own:
            where = [own]
            dist.broadcast_object_list(where, 0)
            for step in range(6):
                if step == 5:
                    # between forward and backward nothing may change
                    loss = model(batch(step, rank)).pow(2).mean()
                    state = model.state_dict()
                    trace.add("there", state["blocks.0.up.weight"])
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                train_step(model, optimizer, trace, step, rank)
                if step == 2:
                    states = get_state_dict(model, optimizer, options=options)
                    kept = {"model": states[0], "optimizer": states[1]}
                    if not full:
                        dcp.save(kept, checkpoint_id=where[0])
                if step == 3:
                    if not full:
                        states = get_state_dict(model, optimizer, options=options)
                        kept = {"model": states[0], "optimizer": states[1]}
                        dcp.load(kept, checkpoint_id=where[0])
                    set_state_dict(
                        model,
                        optimizer,
                        model_state_dict=kept["model"],
                        optim_state_dict=kept["optimizer"],
                        options=options,
                    )
            dist.barrier()
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


def optimizers(rank, world, how):
    def program(model, trace, rank):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{how: True})
        for step in range(4):
            model(batch(step, rank)).pow(2).mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
            trace.add("norm", norm.full_tensor())
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


class Words(Net):
    """Begins with an embedding, which backward does not need."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 16)

    def forward(self, x):
        return super().forward(x + self.words((x[:, 0] * 7).long().abs() % 8))


def not_in_backward(rank, world, later):
    def build():
        model = Words()
        fully_shard(model.words, mesh=mesh(world))
        shard(model)
        model.words.set_unshard_in_backward(False)
        return model

    def change(model, step):
        if later:
            model.words.set_unshard_in_backward(step < 3)

    return both(*changing(build, change), rank)


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
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()

    return both(build, program, rank)


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


class Stop(BaseException):
    """Like KeyboardInterrupt."""


def interrupted(rank, world, where, index):
    """A step ends in the middle by an exception on all ranks, and is forgotten."""

    def program(model, trace, rank):
        optimizer = sgd(model)

        def stop(*_):
            raise Stop

        for step in range(6):
            if step in (3, 4):
                module = model.blocks[index]
                if where == "forward":
                    hook = module.down.register_forward_hook(stop)
                elif where == "before backward":
                    hook = module.down.register_full_backward_pre_hook(stop)
                else:
                    hook = module.up.register_full_backward_hook(stop)
                with contextlib.suppress(Stop):
                    model(batch(step, rank)).pow(2).mean().backward()
                hook.remove()
                model.reset_iter_state()
                optimizer.zero_grad()
            train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    return both(lambda: shard(Net(blocks=4)), program, rank)


def compiled(rank, world):
    def build():
        model = shard(Net())
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    return both(build, train, rank)


def grouped(rank, world):
    def build():
        model = Net(blocks=4)
        fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh(world))
        fully_shard([model.blocks[2], model.blocks[3]], mesh=mesh(world))
        return fully_shard(model, mesh=mesh(world))

    return both(build, train, rank)


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


def reduce_hook(rank, world):
    def build():
        model = shard(Net())
        for module in (model, *model.blocks):
            module.set_all_reduce_hook(lambda t: t.mul_(0.5))
        return model

    return both(build, train, rank)


def placements(rank, world):
    from torch.distributed.tensor import Shard

    def choose(p):
        return Shard(1) if p.dim() == 2 and p.size(0) >= p.size(1) else Shard(0)

    return both(lambda: shard(Net(), shard_placement_fn=choose), train, rank)


def uneven(rank, world):
    return both(lambda: shard(Net(dim=17)), train17, rank)


def train17(model, trace, rank):
    optimizer = sgd(model)
    for step in range(4):
        loss = model(batch(step, rank, dim=17)).pow(2).mean()
        loss.backward()
        trace.grads(model, step)
        optimizer.step()
        optimizer.zero_grad()


def in_backward_optimizer(rank, world):
    def program(model, trace, rank):
        each = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

        def step_now(p):
            each[p].step()
            each[p].zero_grad()

        for p in each:
            p.register_post_accumulate_grad_hook(step_now)
        for step in range(4):
            loss = model(batch(step, rank)).pow(2).mean()
            loss.backward()
            trace.add("loss", loss)
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


def moved(rank, world, how):
    def change(model, step):
        if step in (2, 4):
            if how == "to":
                model.to(DEVICE[0])
            elif how == "assign":
                state = {k: v.clone() for k, v in model.state_dict().items()}
                model.load_state_dict(state, assign=True)
            else:
                model.float()

    return both(*changing(lambda: shard(Net()), change), rank)


def autocast(rank, world):
    def program(model, trace, rank):
        with torch.autocast(DEVICE[0], torch.bfloat16):
            train(model, trace, rank)

    return both(lambda: shard(Net()), program, rank)


def input_gradients(rank, world):
    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(5):
            x = batch(step, rank).requires_grad_()
            (grad,) = torch.autograd.grad(model(x).pow(2).mean(), x)
            trace.add("grad", grad)
            train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


def discarded(rank, world):
    """Forward passes whose graph is thrown away or kept for long."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        kept = []
        for step in range(6):
            out = model(batch(70 + step, rank))
            if step in (2, 4):
                kept.append(out)
            del out
            train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)
        del kept

    return both(lambda: shard(Net()), program, rank)


def meta(rank, world):
    def build():
        with torch.device("meta"):
            model = Net()
        shard(model)
        model.to_empty(device=DEVICE[0])
        generator = torch.Generator(DEVICE[0]).manual_seed(3)
        for p in model.parameters():
            p.detach().to_local().normal_(0, 0.1, generator=generator)
        return model

    return both(build, train, rank)


def shared_context(rank, world):
    """Two roots with one communication context, one after the other, in one plan."""
    from torch.distributed.fsdp import share_comm_ctx

    def build():
        stages = [shard(Net(blocks=2)) for _ in range(2)]
        share_comm_ctx(stages)
        return nn.Sequential(*stages)

    return both(build, train, rank)


def groups_of_their_own(rank, world, changes):
    """Modules with two parameter groups: one over all ranks, one over pairs."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    def build():
        model = Net()
        pairs = mesh(2, 2, names=("outer", "inner"))
        everyone = mesh(world)
        infos = {True: FSDPMeshInfo(everyone, 0), False: FSDPMeshInfo(pairs["inner"], 0)}
        for block in model.blocks:
            ups = set(block.up.parameters())
            fully_shard(
                block,
                mesh=everyone,
                shard_placement_fn=lambda p, ups=ups: ShardPlacementResult(
                    Shard(0), infos[p in ups]
                ),
            )
        return fully_shard(model, mesh=everyone)

    def change(model, step):
        if changes and step in (3, 6):
            model.set_reshard_after_backward(step == 6)

    return both(*changing(build, change), rank, close=1e-5)


def alone(rank, world, what):
    """Rank 1 alone leaves a block out, takes another order, or needs no gradients of a block.

    All blocks are alike, so that sizes and placements fit.
    """
    import symmplan

    class Aside(Net):
        aside = False

        def forward(self, x):
            x = self.inlet(x)
            for i in self.order:
                y = self.blocks[i](x)
                x = x + y.detach() if self.aside and i == 1 else y
            return self.outlet(x)

    model = Aside()
    model.blocks = nn.ModuleList(Block() for _ in range(4))
    model.order = [0, 1, 2, 3]
    shard(model)
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=5.0)
    optimizer = sgd(model)
    try:
        for step in range(5):
            if rank == 1 and step == 3:
                model.order = {
                    "skip": [0, 2, 3],
                    "swap": [2, 1, 0, 3],
                    "twice": [0, 0, 1, 2, 3],
                }.get(what, model.order)
                model.aside = what == "no gradients"
            train_step(model, optimizer, Trace(), step, rank)
    finally:
        handle.remove()


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
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)
