"""Programs on a device that is full: one allocation of symmplan's fails on one rank.

`test_full.py` says what must come out. Every allocation that symmplan's sources make is counted, as
the program comes to it: tensors by whatever function of torch, segments and the peers' views of
them, their control areas, and communicators. No list of places names them, so a new one counts.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from pathlib import Path

import budget_programs
import torch
import torch.distributed as dist
from fsdp_conditions import Hoard, flat, holding
from fsdp_models import Net, batch, sgd, shard, update
from gathered_weights import InBytes, weighted
from held import segments_of_plans
from torch._guards import detect_fake_mode
from torch.distributed.fsdp import MixedPrecisionPolicy

import symmplan

_OURS = str(Path(symmplan.__file__).parent)
#: Functions and methods of torch that make memory.
_FACTORIES = "empty zeros ones full empty_like zeros_like empty_strided tensor arange stack cat"
_METHODS = "clone to contiguous reshape float new_empty new_zeros"
#: What makes memory that is no tensor's.
_SEAMS = (
    ("symmplan.memory.backends.shm", "create"),
    ("symmplan.memory.backends.shm", "map_file"),
    ("symmplan.memory.backends.shm", "open_peer"),
    ("symmplan.torch_private.nccl", "copy_engine_group"),
)

#: What a program without symmplan allocates as well, and as much.
_ITS_OWN = {"integrate/moe/dispatcher.py:start", "integrate/fsdp/comms.py:otherwise"}


class Full:
    """Counts allocations, and lets one fail.

    Args:
        at: Which one, counted from 0; None for none.

    Attributes:
        places: Where the allocations were made, as ``file:function``.
    """

    def __init__(self, at=None):
        self.at = at
        self.places = []

    @property
    def failed(self):
        """Where the one that failed was to be made; None if the program did not come to it."""
        came = self.at is not None and self.at < len(self.places)
        return self.places[self.at] if came else None

    def comes(self, place):
        """An allocation is made."""
        self.places.append(place)
        if len(self.places) - 1 == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. no luck today")

    def _counted(self, original):
        @functools.wraps(original)
        def make(*args, **kwargs):
            code, made = sys._getframe(1).f_code, original(*args, **kwargs)
            if code.co_filename.startswith(_OURS) and _has_bytes(made, args):
                place = f"{code.co_filename[len(_OURS) + 1 :]}:{code.co_name}"
                if place not in _ITS_OWN:
                    self.comes(place)
            return made

        return make

    def _seam(self, original, name):
        @functools.wraps(original)
        def make(*args, **kwargs):
            self.comes(name)
            return original(*args, **kwargs)

        return make

    @contextlib.contextmanager
    def watching(self):
        """Inside, allocations count."""
        with contextlib.ExitStack() as stack:

            def replace(owner, name, new):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, new)

            for name in _FACTORIES.split():
                replace(torch, name, self._counted(getattr(torch, name)))
            for name in _METHODS.split():
                replace(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))
            for path, name in _SEAMS:
                owner = sys.modules[path]
                replace(owner, name, self._seam(getattr(owner, name), f"{path}.{name}"))
            yield self


def _has_bytes(made, args):
    """Whether a tensor has bytes, and none of the one it was made of."""
    if made.is_meta or detect_fake_mode(made) is not None or not made.nbytes:
        return False
    if not args or not isinstance(args[0], torch.Tensor):
        return True
    return made.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()


def fsdp(rank, world, choose, **options):
    """See `budget_programs.fsdp`."""
    result = budget_programs.fsdp(rank, world, choose, **options)
    return {**result, "wrong": result["differences"], **result["stats"]}


def mixed(rank, world, choose):
    """The same, with gradients that are wider than they are reduced in."""
    narrow = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)
    return fsdp(rank, world, choose, build=lambda: shard(Net(), mp_policy=narrow))


def widening(rank, world, choose):
    """Narrow gradients that become wider, and a module that is new, so that all plan again."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(7):
            model.order = [0, 2] if step < 2 else [0, 1, 2]
            for last in (False, True) if step > 3 else (True,):
                model.set_requires_gradient_sync(last)
                loss = model(batch(10 * step + last, rank)).float().pow(2).mean()
                loss.backward()
            update(model, optimizer, trace, step)
        trace.parameters(model)

    def build():
        return shard(Net(), mp_policy=policy)

    return fsdp(rank, world, choose, build=build, program=program)


def weights(rank, world, choose):
    """Weights that say by themselves how they are gathered."""

    def build():
        model = Net()
        for block in model.blocks:
            weighted(block.up, InBytes)
        return shard(model)

    return fsdp(rank, world, choose, build=build)


def kept(rank, world, choose):
    """The same with flat buffers, of which one rank keeps some longer than it did at first."""
    hoard = Hoard(3 if rank else 1 << 20)
    with flat(), holding(lambda runtime, buffer: runtime.schedule and hoard.keep(buffer)):
        result = fsdp(rank, world, choose)
    hoard.end()
    result["wrong"] += [] if all(hoard.intact) else ["a kept buffer was written"]
    return result


def session(rank, world, choose):
    """See `budget_programs.eager`."""
    return budget_programs.eager(rank, world, [None], choose)


def compiled(rank, world, choose):
    """See `budget_programs.compiled`."""
    return budget_programs.compiled(rank, world, [None], choose)


def experts(rank, world, choose):
    """Rows go to experts and come back, with gradients; in which steps they came back wrong."""
    wrong = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with symmplan.expert_parallel(max_tokens=4, choose=choose, timeout=20.0) as layer:
            for step in range(4):
                counts = [(rank + step + peer) % 3 + step for peer in range(world)]
                rows = torch.arange(8.0 * sum(counts)).view(-1, 8) + 100 * rank + step
                rows.requires_grad_()
                routes = layer.routes(counts)
                back = layer.combine(layer.dispatch(rows, routes) * (rank + 1), routes)
                factors = torch.tensor([p + 1.0 for p in range(world) for _ in range(counts[p])])
                back.backward(torch.full_like(back, 2.0))
                right = torch.equal(back.detach(), rows.detach() * factors[:, None])
                right &= torch.equal(rows.grad, factors[:, None].expand_as(rows) * 2)
                wrong += [] if right else [step]
            stats = layer.stats
    return {
        "wrong": wrong,
        "served": stats.served,
        "plain": stats.plain,
        "reasons": dict(stats.reasons),
        "warned": [str(w.message) for w in said if "symmplan" in str(w.message)],
        "held": len(segments_of_plans()),
    }


def crossing(rank, world, choose):
    """Forward twice before backward, so that what the first saved steps aside."""
    del choose
    torch._dynamo.reset()

    def run(body):
        found = []
        for step in range(3):
            pairs = [budget_programs._inputs(rank, 2 * step + i) for i in range(2)]
            for _, weight in pairs:
                weight.requires_grad_()
            results = [body(*pair) for pair in pairs]
            for result in reversed(results):
                result.square().mean().backward()
            found += [x for r, (_, w) in zip(results, pairs, strict=True) for x in (r, w.grad)]
        return found

    want = run(torch.compile(budget_programs._collectives, backend="eager"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        backend = symmplan.backend("eager", choose="placed", timeout=20.0)
        found = run(torch.compile(budget_programs._collectives, backend=backend))
        stats = backend.stats
        backend.release()
    wrong = [i for i, pair in enumerate(zip(want, found, strict=True)) if not torch.equal(*pair)]
    return {"wrong": wrong, **budget_programs._reported(stats, backend.plans, said)}


PROGRAMS = {
    "FSDP2": fsdp,
    "mixed": mixed,
    "widening": widening,
    "weights": weights,
    "kept": kept,
    "compiled": compiled,
    "crossing": crossing,
    "session": session,
    "experts": experts,
}


def full(rank, world, name, choose, which):
    """A program with each of some allocations failing in turn, on one rank and then another."""
    found = []
    for at in which:
        fault = Full(None if at is None or rank != at % world else at)
        dist.barrier()
        with fault.watching():
            result = PROGRAMS[name](rank, world, choose)
        found.append({**result, "failed": fault.failed, "places": fault.places})
    return found
