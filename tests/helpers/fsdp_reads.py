"""Programs that read whole parameters past FSDP2's hooks: where it has freed them, it raises.

`drawn_reading` draws them; else as in `fsdp_programs.py`.
"""

from __future__ import annotations

import contextlib

import torch
from attrs import evolve
from fsdp_programs import Draw, drawn
from torch import nn


class ReadingActs:
    """What a user may do that reads unsharded parameters when FSDP2 does not know of it."""

    @contextlib.contextmanager
    def _linear(self):
        """Blocks do not use their gains: torch would read freed ones, and crash."""
        before = [block.without for block in self.model.blocks]
        for block in self.model.blocks:
            block.without = "gain"
        yield
        for block, without in zip(self.model.blocks, before, strict=True):
            block.without = without

    def _weight(self, index):
        """A block, and its first weight while it is whole; None if it is made of others."""
        block = self.model.blocks[index % len(self.model.blocks)]
        return block, lambda: block.up.weight if type(block.up.weight) is nn.Parameter else None

    def _read(self, name, weight):
        x = self._batch().to(weight.dtype)
        self.trace.add(name, x @ weight.t())

    def penalty(self, again, whole):
        """A gradient of a gradient, perhaps more of the same graph, and while all is unsharded."""
        x = self._batch().requires_grad_()
        self.model.set_reshard_after_backward(not whole)
        with self._linear():
            loss = self.model(x).float().pow(2).mean()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            self.trace.add("force", grad)
            self.model.set_reshard_after_backward(True)
            grad.float().pow(2).mean().backward(retain_graph=again)
            if again:
                loss.backward()
        self._step()

    def inner(self, index):
        """A loss of what is inside a block, alone."""
        found = []
        block = self.model.blocks[index % len(self.model.blocks)]
        handle = block.up.register_forward_hook(lambda *args: found.append(args[-1]))
        with self._linear():
            self._loss()
            handle.remove()
            if found and found[0].requires_grad:
                found[0].float().pow(2).mean().backward()
        self._step()

    def in_place(self, index, factor):
        """A block returns a view, which is changed behind it."""
        block = self.model.blocks[index % len(self.model.blocks)]
        first = block.register_forward_hook(lambda *args: args[-1].view(-1, 16), prepend=True)
        last = block.register_forward_hook(lambda *args: args[-1].mul_(factor))
        with self._linear():
            self._loss().backward()
        first.remove()
        last.remove()
        self._step()

    def keep(self, index):
        """A hook keeps a weight, which is read behind the forward pass."""
        kept = []
        block, weight = self._weight(index)
        handle = block.up.register_forward_hook(lambda *_: kept.append(weight()))
        loss = self._loss()
        handle.remove()
        if kept and kept[0] is not None:
            self._read("kept", kept[0].detach())
        loss.backward()
        self._step()

    def hold(self, index):
        """A view of a block's weight is held over steps."""
        block, weight = self._weight(index)
        held = self._held

        def hook(*_):
            if weight() is not None:
                held[block] = weight().detach()[:2]

        handle = block.up.register_forward_hook(hook)
        self._loss()
        handle.remove()

    def read_inside(self, index):
        """Such a view is read while its block runs."""
        block, _ = self._weight(index)

        def hook(*_):
            if block in self._held:
                self._read("held", self._held[block])

        handle = block.up.register_forward_hook(hook)
        self.train()
        handle.remove()

    def read(self, index):
        """Such a view is read now."""
        block, _ = self._weight(index)
        if block in self._held:
            self._read("held", self._held[block])

    def let_go(self):
        self._held.clear()


class _Draw(Draw):
    def reads(self):
        index = self.index()
        return self.choice(
            [
                [("penalty", self.flag(0.3), False)],
                [("after_forward", False, True), ("penalty", self.flag(0.3), True)],
                [("inner", index)],
                [("in_place", index, 0.5)],
                [("keep", index)],
                [("hold", index), ("train",), ("read_inside", index)],
                [("hold", index), ("read_inside", index), ("read", index)],
                [("hold", index), ("let_go",)],
                [("twice",)],
                [("cross", index, self.index())],
            ]
        )

    def kept(self):
        """What leaves parameters unsharded."""
        return self.choice(
            [
                [("after_forward", False, True)],
                [("after_forward", False, self.flag())],
                [("unshard_all", self.flag(), True)],
                [("train", 1, True, False)],
                [("unshard", self.index(), True)],
            ]
        )


def drawn_reading(seed, ranks=None):
    """The program of a seed that reads parameters past FSDP2's hooks.

    Plain FSDP2 ends many of them: then symmplan must end them there, too.
    """
    program, draw = drawn(seed, ranks), _Draw(f"{seed} reading")
    acts = list(program.acts)
    head, body = acts[:2], acts[2:]
    body = draw.sample(body, min(len(body), draw.randint(2, 5)))
    for _ in range(draw.randint(1, 3)):
        at = draw.randint(0, len(body))
        body[at:at] = [*(draw.kept() if draw.flag(0.6) else []), *draw.reads()]
    reentrant = ("recompute", True) in body or any(unit.recompute for unit in program.units)
    body = [act for act in body if not (reentrant and act[0] == "penalty")]
    return evolve(
        program,
        acts=(*head, *body, ("train",)),
        reshard=draw.often(program.reshard, False, share=0.6),
        # Who keeps more unsharded than plain FSDP2 reads what that has freed.
        unsharded_modules=None,
        param=draw.often(None, program.param, share=0.7),
    )
