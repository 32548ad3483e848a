"""What FSDP2 can do, one function each: ``name(rank, world)`` runs on a rank and returns `both`.

`test_fsdp.py` says what must come out.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Block, Net, Trace, batch, both, mesh, shard, train, train_step
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


def plain(rank, world):
    return both(lambda: shard(Net()), train, rank)


def mixed(rank, world, param, reduce, output):
    inner = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    outer = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)

    def build():
        model = shard(Net(), root=False, mp_policy=inner)
        return fully_shard(model, mesh=mesh(world), mp_policy=outer)

    return both(build, train, rank)


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
        for step in range(16):
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
    return both(lambda: shard(Net(), reshard_after_forward=2), train, rank, close=1e-5)


def other_groups(rank, world):
    """Backward gathers over pairs at first, and over all ranks later."""

    def program(model, trace, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(6):
            if step == 3:
                model.set_reshard_after_forward(True)
            train_step(model, optimizer, trace, step, rank)

    return both(lambda: shard(Net(), reshard_after_forward=2), program, rank, close=1e-5)


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


def alone(rank, world):
    """One rank: FSDP2 asks for buffers and runs no collective."""
    import symmplan

    model = shard(Net())
    handle = symmplan.fsdp.apply(model, timeout=20.0)
    train(model, Trace(), rank, steps=3)
    told = (handle.plan, handle.stats.recorded, handle.stats.served, handle.stats.plain)
    handle.remove()
    return told


def two_models(rank, world):
    """Two models whose steps interleave, with a plan each."""
    import symmplan

    def run(planned):
        torch.manual_seed(7)
        models = [shard(Net(blocks=2)), shard(Net(blocks=3))]
        handles = [symmplan.fsdp.apply(m, choose="placed", timeout=30.0) for m in models if planned]
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
        "placed": [s.served for s in stats],
        "plain": [s.plain for s in stats],
        "staged": [s.copies for s in stats],
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


@contextlib.contextmanager
def flat():
    """FSDP2 as a torch has it in which parameter groups have other methods."""
    from symmplan import _compat_fsdp as fsdp2

    known = fsdp2.can_be_replaced
    fsdp2.can_be_replaced = lambda _: False
    try:
        yield
    finally:
        fsdp2.can_be_replaced = known


def in_flat_buffers(rank, world, name, *args):
    """The same with gathers in flat buffers."""
    with flat():
        return globals()[name](rank, world, *args)


@contextlib.contextmanager
def holding(keep):
    """``keep`` is given every buffer that symmplan handed out, once its collective is done.

    Args:
        keep: Called with the runtime and the buffer.
    """
    from symmplan.integrate.fsdp.comms import PlannedAllGather, PlannedReduceScatter

    def kept(call, name):
        def keeping(self, **kwargs):
            result = call(self, **kwargs)
            if result is not None:
                result.wait()
            if kwargs[name].is_cuda:
                torch.cuda.synchronize()
            keep(self._runtime, kwargs[name])
            return result

        return keeping

    with contextlib.ExitStack() as stack:
        for kind, name in (
            (PlannedAllGather, "output_tensor"),
            (PlannedReduceScatter, "input_tensor"),
        ):
            stack.callback(setattr, kind, "__call__", kind.__call__)
            kind.__call__ = kept(kind.__call__, name)
        yield


@contextlib.contextmanager
def gathered():
    """Whether the input of each flat gather in the plan was a part of its output.

    NCCL looks at both to decide what it runs, which must be the same on all ranks.
    """
    from symmplan.integrate.fsdp import comms

    within = []
    gathers = comms.gathers

    def noting(memory, plain, output, source, *args, **kwargs):
        begin = source.data_ptr() - output.data_ptr()
        within.append(0 <= begin < output.numel() * output.element_size())
        return gathers(memory, plain, output, source, *args, **kwargs)

    comms.gathers = noting
    try:
        yield within
    finally:
        comms.gathers = gathers


class Hoard:
    """Keeps buffers until so many others came, and then looks whether they are intact."""

    def __init__(self, count):
        self.count = count
        self.intact = []
        self._kept = []

    def keep(self, tensor):
        self._kept.append((tensor, tensor.clone()))
        if len(self._kept) > self.count:
            self._look()

    def end(self):
        while self._kept:
            self._look()

    def _look(self):
        self.intact.append(bool(torch.equal(*self._kept.pop(0))))


def holder(rank, world, who, late, threads):
    """On some ranks somebody keeps the buffers of some collectives longer than FSDP2 does.

    Args:
        who: Those ranks.
        late: Only once the plan is frozen.
        threads: A thread drops them after a while; else the program does, five collectives later,
            and looks whether they are intact.
    """
    import threading
    import time

    hoard = Hoard(5)
    running = []

    def keep(runtime, tensor):
        if rank not in who or (late and runtime.planning.plan is None):
            return
        if threads:
            running.append(threading.Thread(target=lambda t: time.sleep(0.01), args=(tensor,)))
            running[-1].start()
        else:
            hoard.keep(tensor)

    with holding(keep), gathered() as within:
        result = both(lambda: shard(Net()), train, rank)
        for thread in running:
            thread.join()
        hoard.end()
    result["intact"] = all(hoard.intact)
    result["gathered within"] = all(within)
    result["looked at"] = len(hoard.intact)
    dist.barrier()
    return result


def lingering(rank, world):
    """The process group holds on to its tensors for a while after a collective, as gloo may."""
    import threading
    import time

    running = []

    def linger(call):
        def lingering(self, **kwargs):
            result = call(self, **kwargs)
            tensors = [v for v in kwargs.values() if isinstance(v, torch.Tensor)]
            running.append(threading.Thread(target=lambda _: time.sleep(0.05), args=(tensors,)))
            running[-1].start()
            return result

        return lingering

    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as own

    with contextlib.ExitStack() as stack:
        for kind in (own.DefaultAllGather, own.DefaultReduceScatter):
            stack.callback(setattr, kind, "__call__", kind.__call__)
            kind.__call__ = linger(kind.__call__)
        result = both(lambda: shard(Net()), train, rank)
    for thread in running:
        thread.join()
    return result


def float8(rank, world):
    """Weights that are gathered as bytes with a scale, as float8 training does."""
    from fsdp_float8 import quantized

    def build():
        model = Net()
        for block in model.blocks:
            quantized(block.up)
        return shard(model)

    return both(build, train, rank)


def choice(rank, world):
    """What `choose="measure"` measured."""

    def look(handle):
        summary = handle.plan.summary()
        return [(c.op, c.nbytes, c.ranks, c.placed) for c in handle.choices], summary

    return both(lambda: shard(Net()), train, rank, look=look, choose="measure")


def ordinary(rank, world):
    """Everything as FSDP2 does it."""

    def look(handle):
        stats = handle.stats
        return stats.served, stats.plain, stats.segment_bytes, handle.plan.summary()

    return both(lambda: shard(Net()), train, rank, look=look, choose="ordinary")


def by_all_to_all(rank, world, prefetch):
    """Reduce-scatters as an all-to-all into a second placement and a local sum."""

    def look(handle):
        return [b.op for b in handle.plan.problem.buffers]

    def build():
        model = shard(Net())
        if prefetch:
            blocks = list(model.blocks)
            for block, after in itertools.pairwise(blocks):
                block.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([block])
        return model

    return both(build, train, rank, look=look, choose="copy engine")


@contextlib.contextmanager
def forced_kind(kind, rank):
    """A measurement in which torch's own way wins for one kind of collective, and no other."""
    from symmplan.integrate.fsdp import choice as fsdp_choice
    from symmplan.place import trials

    measure, seconds_of = fsdp_choice.measure, trials.seconds_of

    def forced(wanted, *args, **kwargs):
        ops = iter([trial.choice.op for trial in wanted])

        def timed(*args, **kwargs):
            ways, chosen = seconds_of(*args, **kwargs), next(ops) == kind
            # Ranks measure different times, as they do; the slowest counts.
            fast, slow = 1e-6 * (rank + 1), 5e-6
            return {w: fast if (w == "ordinary") == chosen else slow for w in ways}

        trials.seconds_of = timed
        return measure(wanted, *args, **kwargs)

    trials.forget()
    fsdp_choice.measure = forced
    try:
        yield
    finally:
        fsdp_choice.measure, trials.seconds_of = measure, seconds_of
        trials.forget()


def forced_choice(rank, world, kind):
    with forced_kind(kind, rank):
        return both(lambda: shard(Net()), train, rank, lambda h: h.plan.summary(), choose="measure")


def disagreement(rank, world):
    """Ranks record programs that differ: on one of them a module has another name."""
    import symmplan

    model = shard(Net(), root=False)
    if rank == 1:
        model.others = model.blocks
        del model.blocks
        object.__setattr__(model, "blocks", model.others)
    for parameter in [*model.inlet.parameters(), *model.outlet.parameters()]:
        parameter.requires_grad_(False)
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=20.0)
    try:
        train(model, Trace(), rank, steps=2)
    finally:
        handle.remove()


def lifecycle(rank, world):
    """Errors, freeze by hand, remove, apply again, and a model that just goes away."""
    import gc

    import symmplan
    from symmplan.errors import BackendError, CaptureError, PlanningError

    told = {}
    for name, error, act in (
        ("no fsdp", CaptureError, lambda: symmplan.fsdp.apply(nn.Linear(2, 2))),
        ("memory", BackendError, lambda: symmplan.fsdp.apply(shard(Net()), memory="tape")),
        ("choose", BackendError, lambda: symmplan.fsdp.apply(shard(Net()), choose="dice")),
        ("effort", PlanningError, lambda: symmplan.fsdp.apply(shard(Net()), effort="none")),
    ):
        with pytest.raises(error) as raised:
            act()
        told[name] = str(raised.value)
    model = shard(Net())
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=20.0)
    told["repr"] = repr(handle)
    told["plan"] = handle.plan
    with pytest.raises(CaptureError) as raised:
        symmplan.fsdp.apply(model)
    told["twice"] = str(raised.value)
    with pytest.raises(CaptureError) as raised:
        handle.freeze()
    told["too early"] = str(raised.value)
    train(model, Trace(), rank, steps=1)
    handle.freeze()
    handle.freeze()
    told["frozen"] = handle.stats.rendezvous
    train(model, Trace(), rank, steps=2)
    told["placed"] = handle.stats.served
    placed = handle.stats.served
    handle.remove()
    handle.remove()
    train(model, Trace(), rank, steps=1)
    told["after remove"] = handle.stats.served - placed
    again = symmplan.fsdp.apply(model, choose="placed", timeout=20.0)
    train(model, Trace(), rank, steps=3)
    told["again"] = again.stats.served
    from symmplan.memory.segment import _LIVE

    told["live"] = len(_LIVE._sorted[1])
    del model, again, handle
    gc.collect()
    told["live at end"] = len(_LIVE._sorted[1])
    dist.barrier()
    return told


def failing_step(rank, world):
    """A forward pass fails on all ranks in the middle, and training goes on."""

    def program(model, trace, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(5):
            if step == 2:
                model.order = [0, 7]  # there is no block 7
                with contextlib.suppress(IndexError):
                    model(batch(step, rank))
                model.order = [0, 1, 2]
            train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    return both(lambda: shard(Net()), program, rank)
