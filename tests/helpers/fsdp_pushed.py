"""Programs in which gradients are pushed: what changes their types, and which there are.

`drawn_pushed` draws them; else as in `fsdp_programs.py`.
"""

from __future__ import annotations

import contextlib
import gc

from attrs import evolve
from fsdp_models import Stop, stop
from fsdp_programs import Draw, drawn


class ReducingActs:
    """What a user may do about which gradients are reduced, and how."""

    def without(self, index, name, who=None):
        """A block does not use some parameters from now on; on rank ``who`` alone if told."""
        if who in (None, self.rank):
            self.model.blocks[index % len(self.model.blocks)].without = name

    def without_alone(self, index, who):
        """A rank alone does not use some parameters for a step, for which zeros are reduced."""
        block = self.model.blocks[index % len(self.model.blocks)]
        can = hasattr(self.model, "set_reduce_scatter_unused_params") and not block.without
        if can:
            self.model.set_reduce_scatter_unused_params(True)
            self.without(index, "gain", who)
        self.train()
        if can:
            self.model.set_reduce_scatter_unused_params(False)
            block.without = ""

    def uneven(self, who, others, more):
        """A rank has more micro-batches than the others, while all is unsharded.

        Each block runs once: FSDP2 gathers those again that repeat.
        """
        self.model.set_reshard_after_forward(False)
        self.model.order = list(range(len(self.model.parts)))
        count = others + more * (self.rank == who)
        for micro in range(count):
            last = micro == count - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)
            self.model.set_is_last_backward(last)
            self._loss().backward()
        self._step()

    def fail_reducing(self, moment):
        """A step ends while gradients are reduced: before the collective, or behind it."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        divide, count = collectives._div_if_needed, [0]

        def stopping(*args):
            count[0] += 1
            if count[0] > moment:
                stop()
            return divide(*args)

        collectives._div_if_needed = stopping
        try:
            with contextlib.suppress(Stop):
                self._loss().backward()
        finally:
            collectives._div_if_needed = divide
        if hasattr(self.model, "reset_iter_state"):
            self.model.reset_iter_state()
        gc.collect()
        self.optimizer.zero_grad()

    def divide(self, factor):
        for module in self.sharded:
            module.set_gradient_divide_factor(factor)

    def replicas(self, micros):
        """Only the last of several micro-batches is reduced over replicas."""
        for micro in range(micros):
            self.model.set_requires_all_reduce(micro == micros - 1)
            self._loss().backward()
        self._step()


class _Draw(Draw):
    def types(self):
        """Types of a block's parameters and of its sums."""
        usual = {}
        other = {"param": "float32", "reduce": None}
        narrow = {"param": "bfloat16", "reduce": "bfloat16"}
        return self.often(usual, other, narrow, {"param": "float16"}, share=0.7)

    def reduced(self, program):
        """What changes which gradients are reduced, and how."""
        return self.choice(
            [
                ("without", self.index(), self.choice(["", "gain", "down", "up"])),
                ("without", self.index(), self.choice(["", "gain", "down", "up"])),
                ("without_alone", self.index(), self.randrange(program.ranks)),
                ("train", self.randint(2, 3), False, self.flag()),
                ("train", self.randint(2, 3), True, self.flag()),
                ("uneven", self.randrange(program.ranks), self.randint(1, 2), 1),
                ("fail_reducing", self.randint(0, 9)),
                ("fail_reducing", self.randint(0, 9)),
                ("divide", self.choice([0.5, 4.0])),
                ("replicas", self.randint(2, 3)),
            ]
        )


def drawn_pushed(seed, ranks=None):
    """The program of a seed, in which gradients are mostly pushed, narrow ones more often."""
    program, draw = drawn(seed, ranks), _Draw(f"{seed} pushed")
    param, reduce = draw.choice(
        [("bfloat16", "float32")] * 3 + [("float16", "float32"), (None, None)]
    )
    units = tuple(evolve(unit, **draw.types()) for unit in program.units)
    acts = [act for act in program.acts if act[0] != ("autocast" if param else "")]
    in_backward = draw.flag(0.15)
    # Torch waits in vain where a rank alone ends a block's backward in another order, and refuses
    # gradients of two types in one module.
    alike = not any(unit.recompute or unit.frozen != "-" for unit in units)
    alike = alike and not any(act[0] in ("recompute", "learn") for act in acts)
    refused = () if alike else ("without_alone", "uneven")
    refused += ("clip",) if in_backward else ()
    acts = [act for act in acts if act[0] not in refused]
    for _ in range(draw.randint(1, 4)):
        act = draw.reduced(program)
        if act[0] not in refused:
            acts.insert(draw.randint(1, len(acts)), act)
    return evolve(
        program,
        param=param,
        reduce=reduce,
        units=units,
        acts=tuple(acts),
        choose=draw.choice(["push", "shared push", "shared push"]),
        capacity=draw.often(None, 4096, 12_000, 24_000, share=0.8),
        apart=draw.flag(0.2),
        in_backward=in_backward,
        # What stays unsharded has the values of its gather, as with reshard_after_forward=False.
        unsharded_modules=None if in_backward else program.unsharded_modules,
        hybrid=program.ranks == 4 and draw.flag(0.4),
    )
