"""What FSDP2 is combined with: compilers, recomputation, optimizers, checkpoints, autocast, other
modules. `every_step` and `later` are as in `test_fsdp_setters.py`.
"""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    DEVICE,
    Net,
    batch,
    both,
    cases_of,
    changing,
    mesh,
    same,
    sgd,
    shard,
    train,
    train_step,
    update,
)
from ranks import pool_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=240.0)

USUAL, every_step = cases_of()
CHANGES, later = cases_of()


def compiled(rank, world, what, when, backend):
    """Blocks or the whole model are compiled before or after ``apply``, or once a plan is there.

    Args:
        what: ``"in place"``: each block by its ``compile``, inside FSDP2's hooks if that comes
            before ``fully_shard``. ``"model"``: the root.
        when: ``"before sharding"``, ``"before"``, ``"after"`` or ``"planned"``.
        backend: Of ``torch.compile``.
    """

    def compile_(model):
        for module in model.blocks if what == "in place" else (model,):
            module.compile(backend=backend)

    def build():
        torch.compiler.reset()
        model = Net(blocks=1 if backend == "inductor" else 3)
        if when == "before sharding":
            compile_(model)
        shard(model)
        if when == "before":
            compile_(model)
        return model

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(6):
            if (when, step) in (("after", 0), ("planned", 3)):
                compile_(model)
            train_step(model, optimizer, trace, step, rank)
            if step == 4:
                with torch.no_grad():
                    trace.add("eval", model(batch(99, rank)))
        trace.parameters(model)

    return both(build, program, rank)


@pytest.mark.further
@pytest.mark.parametrize("when", ["before sharding", "before", "after", "planned"])
@pytest.mark.parametrize("what", ["in place", "model"])
def test_compiled_modules(two, what, when):
    same(two.run(compiled, what, when, "aot_eager"), plain=0, copies=0)


@pytest.mark.further
def test_modules_compiled_by_inductor(two):
    same(two.run(compiled, "in place", "after", "inductor"), plain=0, copies=0)


@every_step()
def ignored(rank, world):
    """Some parameters are not FSDP2's."""

    def build():
        model = Net().to(DEVICE[0])  # FSDP2 moves only what it manages
        mine = {model.inlet.weight, *model.blocks[1].down.parameters()}
        shard(model, ignored_params=mine)
        for p in mine:
            p.requires_grad_(False)
        return model

    return both(build, train, rank)


@every_step()
def tiny(rank, world):
    """A parameter of which one rank has nothing."""

    class Scaled(Net):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.scale = nn.Parameter(torch.ones(1))
                block.register_forward_hook(lambda m, _, out: out * m.scale)

    return both(lambda: shard(Scaled()), train, rank)


@every_step(False)
@every_step(True)
def filled_later(rank, world, assign):
    """Made on the meta device; filled after ``apply``, as trainers do."""

    def build():
        with torch.device("meta"):
            return shard(Net())

    def program(model, trace, rank):
        if assign:
            state = {}
            torch.manual_seed(3)
            for name, p in model.named_parameters():
                empty = torch.empty_like(p, device=DEVICE[0])
                state[name] = torch.nn.init.uniform_(empty, -0.1, 0.1)
            model.load_state_dict(state, assign=True)
        else:
            model.to_empty(device=DEVICE[0])
            generator = torch.Generator(DEVICE[0]).manual_seed(3)
            for p in model.parameters():
                p.detach().to_local().normal_(0, 0.1, generator=generator)
        train(model, trace, rank)

    return both(build, program, rank)


@every_step()
def loss_scaled(rank, world):
    """Half precision with a gradient scaler, which looks at gradients and skips steps."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler(DEVICE[0], init_scale=2.0**20, growth_interval=2)
        for step in range(6):
            loss = model(batch(step, rank)).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            trace.add("loss", loss)
            trace.grads(model, step)
            scaler.step(optimizer)
            scaler.update()
            trace.add("scale", torch.tensor(scaler.get_scale()))
            optimizer.zero_grad()
        trace.parameters(model)

    policy = MixedPrecisionPolicy(torch.float16, torch.float16)
    return both(lambda: shard(Net(), mp_policy=policy), program, rank)


@every_step()
def used_twice(rank, world):
    """One module at two places of the model."""

    def build():
        model = shard(Net())
        model.blocks.append(model.blocks[0])
        model.order = [0, 1, 3, 2, 3]
        return model

    return both(build, train, rank)


@every_step()
def replicated(rank, world):
    """Modules that are only replicated, beside sharded ones."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    def build():
        model = Net().to(DEVICE[0])
        replicate(model.blocks[0], mesh=mesh(world))
        for block in list(model.blocks)[1:]:
            fully_shard(block, mesh=mesh(world))
        for p in (*model.inlet.parameters(), *model.outlet.parameters()):
            p.requires_grad_(False)
        return model

    return both(build, train, rank)


class Recomputed(Net):
    reentrant = True

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = self.inlet(x)
        for i in self.order:
            x = checkpoint(self.blocks[i], x, use_reentrant=self.reentrant)
        return self.outlet(x)


@every_step(True, False)
@every_step(False, False)
@every_step(False, True)
@later(True, True)
def recomputed(rank, world, reentrant, several):
    def program(model, trace, rank):
        model.reentrant = reentrant
        if not several:
            return train(model, trace, rank)
        optimizer = sgd(model)
        for step in range(4):
            losses = [model(batch(5 * step + i, rank)).pow(2).mean() for i in range(2)]
            sum(losses).backward()
            update(model, optimizer, trace, step)
        return trace.parameters(model)

    return both(lambda: shard(Recomputed()), program, rank)


@every_step(False)
@every_step(True)
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


@every_step("foreach")
@every_step("fused")
def optimizers(rank, world, how):
    def program(model, trace, rank):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{how: True})
        for step in range(4):
            model(batch(step, rank)).pow(2).mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
            trace.add("norm", norm.full_tensor())
            update(model, optimizer, trace, step)
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


@every_step()
def compiled_blocks(rank, world):
    def build():
        model = shard(Net())
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    return both(build, train, rank)


@every_step()
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


@every_step("to")
@every_step("assign")
def moved(rank, world, how):
    def change(model, step, trace, rank):
        if step in (2, 4):
            if how == "to":
                model.to(DEVICE[0])
            else:
                state = {k: v.clone() for k, v in model.state_dict().items()}
                model.load_state_dict(state, assign=True)

    return both(lambda: shard(Net()), changing(change, steps=8), rank)


@later()
def autocast(rank, world):
    def program(model, trace, rank):
        with torch.autocast(DEVICE[0], torch.bfloat16):
            train(model, trace, rank)

    return both(lambda: shard(Net()), program, rank)


@every_step()
def input_gradients(rank, world):
    def change(model, step, trace, rank):
        x = batch(step, rank).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).pow(2).mean(), x)
        trace.add("grad", grad)

    return both(lambda: shard(Net()), changing(change), rank)


@every_step()
def discarded(rank, world):
    """Forward passes whose graph is thrown away or kept for long."""
    kept = []

    def change(model, step, trace, rank):
        out = model(batch(70 + step, rank))
        if step in (2, 4):
            kept.append(out)

    def program(model, trace, rank):
        changing(change, steps=6)(model, trace, rank)
        kept.clear()

    return both(lambda: shard(Net()), program, rank)


@every_step()
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


@pytest.mark.parametrize(("program", "args"), USUAL)
def test_what_every_step_does(two, program, args):
    same(two.run(program, *args), plain=0, copies=0, replans=0)


@pytest.mark.further
@pytest.mark.parametrize(("program", "args"), CHANGES)
def test_what_changes_after_the_plan_was_made(two, program, args):
    same(two.run(program, *args))
