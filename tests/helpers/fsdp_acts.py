"""What a user may do between and inside steps, in any order: acts, ``(name, *arguments)``.

`fsdp_programs.py` draws them, and `fsdp_machine.py` says what must come out.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import time

import torch
from fsdp_models import (
    DEVICE,
    Stop,
    Trace,
    batch,
    hooked,
    local,
    stop,
    synchronize,
    update,
)
from fsdp_pushed import ReducingActs
from fsdp_reads import ReadingActs
from torch import nn

import symmplan
from symmplan.errors import SymmplanError


class Actor(ReducingActs, ReadingActs):
    """Does acts to a model.

    Args:
        model: Sharded.
        rank: This rank.
        planned: Whether with symmplan.
        optimizer: Makes optimizers.
        apart: Whether symmplan is applied to each part, and not to the root.
        in_backward: Whether each parameter is updated as soon as it has its gradient.
        options: Arguments of `symmplan.fsdp.apply`.
    """

    def __init__(
        self,
        model,
        rank,
        *,
        planned,
        optimizer=torch.optim.SGD,
        apart=False,
        in_backward=False,
        **options,
    ):
        self.model = model
        self.sharded = [m for m in model.modules() if hasattr(m, "unshard")]
        self.rank = rank
        self.trace = Trace()
        self.handles = []
        self.done = 0
        self._counts = collections.Counter()
        self._optimizer = optimizer
        self.optimizer = optimizer(model.parameters(), lr=1e-2)
        self._planned = planned
        self._options = options
        self._count = 0
        self._pending = []
        self._kept = []
        self._held = {}
        self._saved = None
        self._apart = apart
        if in_backward:
            learning = [p for p in model.parameters() if p.requires_grad]
            for number, parameter in enumerate(learning):
                parameter.register_post_accumulate_grad_hook(
                    functools.partial(self._update, number)
                )
        self.apply()

    def do(self, act):
        self.do_inside(act)
        self.done += 1

    def do_inside(self, act):
        """A part of an act."""
        name, *arguments = act
        getattr(self, name)(*arguments)

    def end(self):
        """Let go of everything; how often what happened, over all handles."""
        self._pending.clear()
        self._kept.clear()
        self._held.clear()
        self.remove()
        self._note()
        return dict(self._counts)

    def _note(self):
        for handle in self.handles:
            stats = handle.stats
            for name in ("served", "copies", "plain", "replans", "reordered"):
                self._counts[name] += getattr(stats, name)
            self._counts.update(dict(stats.reasons))
            self._counts.update(why for _, why in stats.flat)

    def _batch(self):
        self._count += 1
        return batch(self._count, self.rank)

    def _loss(self):
        loss = self.model(self._batch()).float().pow(2).mean()
        self.trace.add("loss", loss)
        return loss

    def _hooked(self, where, index, hook):
        return hooked(self.model.blocks[index % len(self.model.blocks)], where, hook)

    def _update(self, number, parameter):
        self.trace.add(f"{self._count}.{number}.grad", parameter.grad)
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=1e-2)
        parameter.grad = None

    def _step(self):
        update(self.model, self.optimizer, self.trace, self._count)

    # Steps.

    def train(self, micros=1, sync=True, reshard=True):
        for micro in range(micros):
            last = micro == micros - 1
            self.model.set_requires_gradient_sync(sync or last)
            self.model.set_reshard_after_backward(reshard or last)
            self.model.set_is_last_backward(last)
            self._loss().backward()
        self._step()

    def several(self, forwards):
        sum(self._loss() for _ in range(forwards)).backward()
        self._step()

    def evaluate(self, mode, times=1, training=True):
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
        self.model.train(training)
        with context():
            for _ in range(times):
                self.trace.add("eval", self.model(self._batch()))
        self.model.train()

    def accumulate(self, micros, act):
        """Gradients of several batches are summed, and something is done between them."""
        for micro in range(micros):
            self.model.set_requires_gradient_sync(micro == micros - 1)
            self._loss().backward()
            if micro < micros - 1:
                self.do_inside(act)
        self._step()

    def around(self, acts):
        """Acts between a forward pass and its backward pass."""
        loss = self._loss()
        for act in acts:
            self.do_inside(act)
        loss.backward()
        self._step()

    def discard(self):
        self._loss()

    def postpone(self):
        """Backward comes in a later act."""
        self._pending.append(self._loss())

    def catch_up(self):
        synchronize()
        while self._pending:
            self._pending.pop().backward()
        self._step()

    def input_gradient(self):
        x = self._batch().requires_grad_()
        (grad,) = torch.autograd.grad(self.model(x).float().pow(2).mean(), x)
        self.trace.add("grad", grad)

    def twice(self):
        loss = self._loss()
        loss.backward(retain_graph=True)
        loss.backward()
        self._step()

    def fail(self, where, index):
        """A step ends in the middle, and is forgotten."""
        with self._hooked(where, index, stop), contextlib.suppress(Stop):
            self._loss().backward()
        if hasattr(self.model, "reset_iter_state"):
            self.model.reset_iter_state()
        gc.collect()
        self.optimizer.zero_grad()

    def inside(self, where, index, act):
        """An act in the middle of a step."""
        told = []

        def hook(*_):
            if not told:
                told.append(None)
                self.do_inside(act)

        with self._hooked(where, index, hook):
            self.train()

    def cross(self, index, other):
        """A block calls another one in the middle of its forward pass."""
        blocks = self.model.blocks

        def hook(_, inputs, output):
            return output + blocks[other % len(blocks)](output)

        block = blocks[index % len(blocks)]
        if block is blocks[other % len(blocks)]:
            return
        handle = block.down.register_forward_hook(hook)
        self.train()
        handle.remove()

    def clip(self):
        self._loss().backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.trace.add("norm", norm.full_tensor())
        self._step()

    def autocast(self):
        with torch.autocast(DEVICE[0], torch.bfloat16):
            self.train()

    # What the model is.

    def order(self, order):
        self.model.order = [i % len(self.model.blocks) for i in order]

    def recompute(self, how):
        self.model.recompute = how

    def learn(self, index, on):
        self.model.blocks[index % len(self.model.blocks)].requires_grad_(on)

    def after_forward(self, on, recurse):
        self.model.set_reshard_after_forward(on, recurse=recurse)

    def prefetch(self, forward, backward):
        blocks = [b for b in self.model.blocks if b in self.sharded]
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + forward])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - backward) : i][::-1])

    def lists(self, index, forward, backward):
        """One module gets prefetch lists of its own, whatever is in them."""
        module, count = self.sharded[index % len(self.sharded)], len(self.sharded)
        module.set_modules_to_forward_prefetch([self.sharded[i % count] for i in forward])
        module.set_modules_to_backward_prefetch([self.sharded[i % count] for i in backward])

    def in_backward(self, index, on):
        self.sharded[index % len(self.sharded)].set_unshard_in_backward(on)

    # Parameters.

    def unshard(self, index, wait):
        handle = self.sharded[index % len(self.sharded)].unshard(async_op=True)
        if wait:
            handle.wait()

    def unshard_all(self, backwards, wait):
        """As before generating text with whole parameters."""
        for module in self.sharded[::-1] if backwards else self.sharded:
            handle = module.unshard(async_op=True)
            if wait:
                handle.wait()

    def reshard_all(self):
        for module in self.sharded:
            module.reshard()

    def reshard(self, index):
        self.sharded[index % len(self.sharded)].reshard()

    def look(self, index, keep_on):
        """Read whole parameters; one rank may keep a view of them."""
        module = self.sharded[index % len(self.sharded)]
        module.unshard()
        for p in module.parameters(recurse=False):
            self.trace.add("whole", p)
            if self.rank == keep_on:
                self._kept.append(p.detach()[:1])
        module.reshard()

    def save(self):
        self._saved = {k: v.clone() for k, v in self.model.state_dict().items()}

    def load(self, assign):
        if self._saved is not None:
            self.model.load_state_dict(
                {k: v.clone() for k, v in self._saved.items()}, assign=assign
            )
            self.optimizer = self._optimizer(self.model.parameters(), lr=1e-2)

    # What ranks may do alone, and to shards.

    def alone(self, rank, act):
        if self.rank == rank:
            self.do_inside(act)

    def nap(self, milliseconds):
        time.sleep(milliseconds / 1000)

    def _shards(self, index):
        """Those that the optimizer has of one module, or about as many."""
        shards = self.optimizer.param_groups[0]["params"]
        return [p for i, p in enumerate(shards) if i // 5 == index % -(-len(shards) // 5)]

    def write(self, index, how, factor):
        """Write to shards, or to the parameters of a block as they are now."""
        synchronize()
        shards = self._shards(index)
        if how == "whole":
            shards = list(self.model.blocks[index % len(self.model.blocks)].parameters())
        if how == "foreach":
            with torch.no_grad():
                torch._foreach_mul_(shards, factor)
            shards = []
        for shard in shards:
            if how == "no_grad":
                with torch.no_grad():
                    shard.mul_(factor)
            else:
                (local(shard.detach()) if how == "local" else shard.data).mul_(factor)
        synchronize()

    def clamp(self, index, how):
        """A parameter of one element, of which one rank has a shard, is clamped."""
        synchronize()
        for shard in self.optimizer.param_groups[0]["params"]:
            if shard.numel() == 1:
                most = 0.5 + index / 8
                if how == "data":
                    shard.data.clamp_(max=most)
                else:
                    with torch.no_grad():
                        shard.clamp_(max=most)
        synchronize()

    def extra_step(self, index):
        """Another optimizer steps."""
        synchronize()
        shards = self._shards(index)
        before = [shard.grad for shard in shards]
        for shard in shards:
            shard.grad = shard.detach().clone()
        torch.optim.SGD(shards, lr=0.25).step()
        for shard, grad in zip(shards, before, strict=True):
            shard.grad = grad
        synchronize()

    def litter(self, index):
        """What the next forward pass makes, and views of a parameter, wait for the collector."""
        block = self.model.blocks[index % len(self.model.blocks)]

        def hook(_, inputs, output):
            handle.remove()
            cycle = [output, inputs, block.down.weight.detach()]
            cycle.append(cycle)

        handle = block.down.register_forward_hook(hook)

    def collect(self):
        gc.collect()

    # The handle.

    def apply(self):
        if not self._planned or self.handles:
            return
        parts = self.model.parts if self._apart else [self.model]
        for part in parts:
            if any(hasattr(m, "unshard") for m in part.modules()):
                self.handles.append(symmplan.fsdp.apply(part, **self._options))

    def remove(self):
        try:
            for handle in self.handles:
                handle.remove()
        except SymmplanError:
            self._counts["remove refused"] += 1
            return
        self._note()
        self.handles.clear()

    def anew(self):
        """Undo what symmplan does, and ask for it again; it does not follow who holds views."""
        self._held.clear()
        self.remove()
        self.apply()

    def sleep(self, wakes):
        """Between steps; what was asked for in the midst of one is refused on all ranks."""
        for handle in self.handles:
            try:
                handle.sleep()
                self._counts["slept"] += 1
            except SymmplanError:
                self._counts["sleep refused"] += 1
            if wakes:
                handle.wake()

    def freeze(self):
        for handle in self.handles:
            with contextlib.suppress(symmplan.errors.CaptureError, symmplan.errors.ReleasedError):
                handle.freeze()
