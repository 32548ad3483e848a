"""What FSDP2 can do, one function each: ``name(rank, world)`` runs on a rank and returns `both`.

`test_fsdp.py` says what must come out.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from fsdp_models import Block, Net, Trace, batch, both, mesh, shard, train, train_step
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


def plain(rank, world):
    return both(lambda: shard(Net()), train, rank)


def mixed(rank, world, param, reduce, output):
    policy = MixedPrecisionPolicy(
        param_dtype=param, reduce_dtype=reduce, output_dtype=output, cast_forward_inputs=True
    )
    return both(lambda: shard(Net(), mp_policy=policy), train, rank)


def reshard(rank, world, after_forward):
    return both(lambda: shard(Net(), reshard_after_forward=after_forward), train, rank)


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


def accumulation(rank, world, sync, reshard_after):
    """Three micro-batches per step; only the last one reduces unless ``sync``."""

    def program(model, trace, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(4):
            for micro in range(3):
                last = micro == 2
                model.set_requires_gradient_sync(sync or last)
                model.set_reshard_after_backward(reshard_after or last)
                model.set_is_last_backward(last)
                loss = model(batch(10 * step + micro, rank)).pow(2).mean()
                loss.backward()
                trace.add("loss", loss)
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()

    return both(lambda: shard(Net()), program, rank)


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
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(4):
            losses = [model(batch(5 * step + i, rank)).pow(2).mean() for i in range(3)]
            sum(losses).backward()
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()

    return both(lambda: shard(Net()), program, rank)


def uneven_use(rank, world, orders):
    """Blocks are used in another order, twice, or not at all; the same on all ranks."""

    def program(model, trace, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step, order in enumerate(orders):
            model.order = list(order)
            train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


def evaluation(rank, world, mode, first):
    """Passes without gradients between training steps, and before the first."""
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]

    def program(model, trace, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(5):
            if first or step:
                for i in range(2):
                    with context():
                        trace.add("eval", model(batch(50 + i, rank)))
            train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


def inference_only(rank, world):
    def program(model, trace, rank):
        for step in range(12):
            with torch.no_grad():
                trace.add("eval", model(batch(step, rank)))

    return both(lambda: shard(Net()), program, rank)


def state_dict(rank, world):
    """Saved and loaded between steps, sharded and full."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    def program(model, trace, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
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
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(4):
            model(batch(step, rank)).pow(2).mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            trace.add("norm", norm.full_tensor())
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return both(lambda: shard(Net()), program, rank)


def explicit_unshard(rank, world, async_op):
    """The user unshards by hand, ahead of the forward pass."""

    def program(model, trace, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(4):
            handles = [m.unshard(async_op=async_op) for m in (model, model.blocks[1])]
            for handle in handles:
                if handle is not None:
                    handle.wait()
            train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)


def divide_factor(rank, world):
    """A factor of the user's own: a reduction that only the process group can do, or none."""

    def build():
        model = shard(Net(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(3.0)
        return model

    return both(build, train, rank)


def hybrid(rank, world):
    """HSDP: sharded over pairs, replicated over the pairs."""
    return both(lambda: shard(Net(), mesh=mesh(2, 2, names=("replicate", "shard"))), train, rank)


def hybrid_accumulation(rank, world):
    """HSDP that all-reduces only in the last micro-batch."""

    def program(model, trace, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(3):
            for micro in range(2):
                model.set_requires_all_reduce(micro == 1)
                model(batch(10 * step + micro, rank)).pow(2).mean().backward()
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()

    return both(lambda: shard(Net(), mesh=mesh(2, 2, names=("replicate", "shard"))), program, rank)


def partial_reshard(rank, world):
    """``reshard_after_forward=2``: backward gathers over pairs, forward over all four."""
    return both(lambda: shard(Net(), reshard_after_forward=2), train, rank)


def two_dimensions(rank, world):
    """Tensor parallelism inside, FSDP2 outside."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def build():
        both_dimensions = mesh(2, 2, names=("dp", "tp"))
        model = Net()
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, both_dimensions["tp"], plan)
        return shard(model, mesh=both_dimensions["dp"])

    # Ranks of one tensor-parallel group must see the same data.
    return both(build, lambda model, trace, rank: train(model, trace, rank // 2), rank)


def two_models(rank, world):
    """Two models whose steps interleave, with a plan each."""
    import symmplan

    def run(planned):
        torch.manual_seed(7)
        models = [shard(Net(blocks=2)), shard(Net(blocks=3))]
        handles = [
            symmplan.fsdp.apply(m, choose="placed", timeout=30.0) for m in models if planned
        ]
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in models]
        trace = Trace()
        for step in range(4):
            made = models[0](batch(step, rank))
            judged = models[1](made).pow(2).mean()
            judged.backward()
            for model, optimizer in zip(models, optimizers, strict=True):
                trace.grads(model, step)
                optimizer.step()
                optimizer.zero_grad()
        stats = [handle.stats for handle in handles]
        for handle in handles:
            handle.remove()
        return trace, stats

    from fsdp_models import differences

    (left, _), (right, stats) = run(False), run(True)
    return {
        "differences": differences(left, right),
        "placed": [s.placed for s in stats],
        "plain": [s.plain for s in stats],
        "staged": [s.staged for s in stats],
        "rendezvous": [s.rendezvous for s in stats],
    }


def random_program(rank, world, blocks, hidden, options, steps):
    """A random tree and a random schedule; see `test_fsdp_random.py`.

    Args:
        blocks: How each block is wrapped: ``"whole"``, ``"parts"``, ``"both"`` or ``"none"``.
        hidden: Width of each block.
        options: Arguments of ``fully_shard``.
        steps: For each step ``(order of blocks, micro-batches, sync all, evaluate)``.
    """

    def build():
        model = Net(blocks=0)
        model.blocks = nn.ModuleList(Block(hidden=h) for h in hidden)
        chosen = {**options, "mesh": mesh(world)}
        if chosen.pop("bf16", False):
            chosen["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block, how in zip(model.blocks, blocks, strict=True):
            if how in ("parts", "both"):
                fully_shard(block.up, **chosen)
            if how in ("whole", "both"):
                fully_shard(block, **chosen)
        return fully_shard(model, **chosen)

    def program(model, trace, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step, (order, micros, sync, evaluate) in enumerate(steps):
            model.order = list(order)
            if evaluate:
                with torch.no_grad():
                    trace.add("eval", model(batch(99, rank)))
            for micro in range(micros):
                model.set_requires_gradient_sync(sync or micro == micros - 1)
                loss = model(batch(10 * step + micro, rank)).float().pow(2).mean()
                loss.backward()
                trace.add("loss", loss)
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters(model)

    return both(build, program, rank)


def holder(rank, world, who, seconds):
    """On some ranks a thread keeps gathered buffers and gradients' inputs for a while."""
    import threading
    import time

    from symmplan.integrate.fsdp_comms import PlannedAllGather, PlannedReduceScatter

    def hold(tensor, expected):
        time.sleep(seconds)
        kept.append(expected is None or bool(torch.equal(tensor, expected)))

    kept: list[bool] = []
    threads: list[threading.Thread] = []

    def keep(call, index):
        def held(self, *args, **kwargs):
            result = call(self, *args, **kwargs)
            tensor = [*args, *kwargs.values()][index]
            thread = threading.Thread(target=hold, args=(tensor, tensor.clone()))
            thread.start()
            threads.append(thread)
            return result

        return held

    with contextlib.ExitStack() as stack:
        if rank in who:
            for kind, index in ((PlannedAllGather, 0), (PlannedReduceScatter, 1)):
                stack.callback(setattr, kind, "__call__", kind.__call__)
                kind.__call__ = keep(kind.__call__, index)
        result = both(lambda: shard(Net()), train, rank)
        for thread in threads:
            thread.join()
    result["kept"] = all(kept)
    dist.barrier()
    return result
