"""What a user may do between and inside steps, in any order: acts, ``(name, *arguments)``.

`test_fsdp_random.py` draws them and says what must come out.
"""

from __future__ import annotations

import collections
import contextlib
import gc

import torch
from fsdp_models import DEVICE, Block, Net, Stop, Trace, batch, hooked, mesh, sgd, stop, update
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import symmplan
from symmplan.errors import SymmplanError


class Acted(Net):
    """Blocks that may be recomputed, between an embedding and a norm."""

    def __init__(self, hidden, tied):
        super().__init__(blocks=0, tied=tied)
        self.blocks = nn.ModuleList(Block(hidden=h) for h in hidden)
        self.words = nn.Embedding(8, 16)
        self.norm = nn.LayerNorm(16)
        self.order = list(range(len(hidden)))
        self.recompute = None

    def forward(self, x):
        x = self.inlet(x + self.words((x[:, 0] * 7).long().abs() % 8))
        for i in self.order:
            if self.recompute is None:
                x = self.blocks[i](x)
            else:
                x = checkpoint(self.blocks[i], x, use_reentrant=self.recompute)
        return self.outlet(self.norm(x))


def wrapped(model, world, wraps, options):
    """Shard a model.

    Args:
        wraps: How each block is wrapped: ``"whole"``, ``"parts"``, ``"both"`` or ``"none"``.
        options: ``bf16``; the others are those of ``fully_shard``.
    """
    chosen = {**options, "mesh": mesh(world)}
    if chosen.pop("bf16", False):
        chosen["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block, how in zip(model.blocks, wraps, strict=True):
        if how in ("parts", "both"):
            fully_shard(block.up, **chosen)
        if how in ("whole", "both"):
            fully_shard(block, **chosen)
    return fully_shard(model, **chosen)


def built(world, hidden, wraps, options):
    """An `Acted` model with blocks of these widths; ``tied`` beside the options of `wrapped`."""
    others = {name: value for name, value in options.items() if name != "tied"}
    return wrapped(Acted(hidden, options["tied"]), world, wraps, others)


class Actor:
    """Does acts to a model.

    Args:
        model: Sharded.
        rank: This rank.
        planned: Whether with symmplan.
        memory: Arguments of `symmplan.fsdp.apply`.
    """

    def __init__(self, model, rank, *, planned, **options):
        self.model = model
        self.sharded = [m for m in model.modules() if hasattr(m, "unshard")]
        self.rank = rank
        self.trace = Trace()
        self.handle = None
        self.done = 0
        self._counts = collections.Counter()
        self.optimizer = sgd(model)
        self._planned = planned
        self._options = options
        self._count = 0
        self._pending = []
        self._kept = []
        self._saved = None
        self.apply()

    def do(self, act):
        name, *arguments = act
        getattr(self, name)(*arguments)
        self.done += 1

    def end(self):
        """Let go of everything; how often what happened, over all handles."""
        self._pending.clear()
        self._kept.clear()
        self.remove()
        self._note()
        return dict(self._counts)

    def _note(self):
        if self.handle is not None:
            stats = self.handle.stats
            for name in ("served", "copies", "plain", "replans", "departures"):
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

    def evaluate(self, mode):
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
        with context():
            self.trace.add("eval", self.model(self._batch()))

    def discard(self):
        self._loss()

    def postpone(self):
        """Backward comes in a later act."""
        self._pending.append(self._loss())

    def catch_up(self):
        # FSDP2's gathers wait for what was queued before the last forward pass: not for an
        # optimizer that has run since then, whose parameters they would read at any moment.
        if DEVICE[0] == "cuda":
            torch.cuda.synchronize()
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
                getattr(self, act[0])(*act[1:])

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
            self.optimizer = sgd(self.model)

    # The handle.

    def apply(self):
        if self._planned and self.handle is None:
            self.handle = symmplan.fsdp.apply(self.model, **self._options)

    def remove(self):
        if self.handle is not None:
            try:
                self.handle.remove()
            except SymmplanError:
                self._counts["remove refused"] += 1
                return
            self._note()
            self.handle = None

    def freeze(self):
        if self.handle is not None:
            with contextlib.suppress(symmplan.errors.CaptureError):
                self.handle.freeze()
