"""What FSDP2 is combined with, one function each; see `test_fsdp_user.py`."""

from __future__ import annotations

import contextlib

import torch
from fsdp_models import DEVICE, Net, Trace, batch, both, differences, mesh, shard, train
from fsdp_models import train_step as step_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import symmplan


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


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
            step_of(model, optimizer, trace, step, rank)
            if step == 4:
                with torch.no_grad():
                    trace.add("eval", model(batch(99, rank)))
        trace.parameters(model)

    return both(build, program, rank)


class Stopping(Net):
    """A block's first half may raise, once it has run."""

    def __init__(self):
        super().__init__(blocks=4)
        self.at = None
        for i, block in enumerate(self.blocks):
            block.up.register_forward_hook(lambda *_, i=i: self.stop(i))

    def stop(self, index):
        if index == self.at:
            raise torch.OutOfMemoryError("no luck")


def out_of_memory(rank, world, kind, index):
    """Forward raises inside a block, on all ranks, and the next step goes on."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(6):
            if step in (0, 3):
                model.at = index
                context = torch.no_grad() if kind == "no_grad" else contextlib.nullcontext()
                with contextlib.suppress(torch.OutOfMemoryError), context:
                    model(batch(step, rank))
                model.at = None
                if kind == "smaller":  # the user's way out: a smaller batch
                    model(batch(step, rank)[:1]).pow(2).mean().backward()
                    trace.grads(model, step)
                optimizer.zero_grad()
            step_of(model, optimizer, trace, step, rank)
        trace.parameters(model)

    return both(lambda: shard(Stopping()), program, rank)


def out_of_memory_alone(rank, world):
    """Rank 1 alone fails in forward, and goes on with its next step."""
    model = shard(Stopping())
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=5.0)
    optimizer = sgd(model)
    try:
        for step in range(6):
            model.at = 1 if (rank, step) == (1, 3) else None
            with contextlib.suppress(torch.OutOfMemoryError):
                step_of(model, optimizer, Trace(), step, rank)
    finally:
        handle.remove()


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


def tiny(rank, world):
    """A parameter of which one rank has nothing."""

    class Scaled(Net):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.scale = nn.Parameter(torch.ones(1))
                block.register_forward_hook(lambda m, _, out: out * m.scale)

    return both(lambda: shard(Scaled()), train, rank)


def experts(rank, world):
    """Some modules are sharded over pairs, the others over all ranks."""

    def build():
        both_dimensions = mesh(2, 2, names=("outer", "inner"))
        model = Net()
        for block in model.blocks:
            fully_shard(block.up, mesh=both_dimensions["inner"], reshard_after_forward=False)
        return shard(model)

    # Sums over four ranks may be rounded otherwise.
    return both(build, train, rank, close=1e-5)


def exactly(rank, world, kind):
    """Over four ranks with the sums left to the process group: the same bits."""
    from fsdp_programs import forced_kind

    def build():
        if kind == "experts":
            both_dimensions = mesh(2, 2, names=("outer", "inner"))
            model = Net()
            for block in model.blocks:
                fully_shard(block.up, mesh=both_dimensions["inner"])
            return shard(model)
        if kind == "hybrid":
            both_dimensions = mesh(2, 2, names=("replicate", "shard"))
            return shard(Net(), mesh=both_dimensions, reshard_after_forward=1)
        return shard(Net(), reshard_after_forward=2)

    with forced_kind("reduce_scatter", rank):
        return both(build, train, rank, choose="measure")


def parts(rank, world):
    """Two parts of one model have a plan each."""

    def run(planned):
        torch.manual_seed(7)
        model = nn.Sequential(Net(blocks=2), Net(blocks=3))
        for part in model:
            shard(part, root=False)
        fully_shard(model, mesh=mesh(world))
        handles = [symmplan.fsdp.apply(p, choose="placed", timeout=30.0) for p in model if planned]
        trace = Trace()
        train(model, trace, rank, steps=5)
        stats = [handle.stats for handle in handles]
        for handle in handles:
            handle.remove()
        return trace, stats

    (left, _), (right, stats) = run(False), run(True)
    return {
        "differences": differences(left, right),
        "placed": [s.served for s in stats],
        "plain": [s.plain for s in stats],
    }


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


def loss_scaled(rank, world):
    """Half precision with a gradient scaler, which looks at gradients and skips steps."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

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


def used_twice(rank, world):
    """One module at two places of the model."""

    def build():
        model = shard(Net())
        model.blocks.append(model.blocks[0])
        model.order = [0, 1, 3, 2, 3]
        return model

    return both(build, train, rank)


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
