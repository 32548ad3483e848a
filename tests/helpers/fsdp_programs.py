"""Random FSDP2 programs: a `Program` is a frozen value that prints as code; `drawn` draws one.

`built` makes the model. What runs a program, and judges it, is in `fsdp_machine.py`.
"""

from __future__ import annotations

import functools
import random
import re

import attrs
import torch
from attrs import evolve, frozen
from fsdp_models import DEVICE, DIM
from gathered_weights import InBytes, weighted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


@frozen
class Unit:
    """A residual block.

    Attributes:
        hidden: Its width.
        wrap: What of it is an FSDP module: ``"whole"``, ``"parts"``, ``"both"`` or ``"none"``.
        reshard: ``reshard_after_forward``; None as the program's.
        recompute: ``use_reentrant`` of a checkpoint around it; None for none.
        frozen: Parameters that do not learn: those whose names begin so; ``"-"`` for none.
        tied: Whether both linear layers have one weight, which needs a ``hidden`` of `DIM`.
        writes: Its forward pass clips its weights: ``"data"``, past autograd; ``"no_grad"``.
        dropout: How much is dropped.
        own: Whether its first weight says by itself how it is gathered.
        param: Type of its gathered parameters; as `Program.param`, or ``""`` for that one.
        reduce: Type in which its gradients are reduced, likewise.
    """

    hidden: int = DIM
    wrap: str = "whole"
    reshard: bool | int | None = None
    recompute: bool | None = None
    frozen: str = "-"
    tied: bool = False
    writes: str = ""
    dropout: float = 0.0
    own: bool = False
    param: str | None = ""
    reduce: str | None = ""


@frozen
class Program:
    """A model, how it is trained, and how symmplan is asked to work.

    Attributes:
        ranks: How many run it.
        units: The blocks.
        acts: Methods of `fsdp_acts.Actor` with their arguments, in order.
        stages: ``(first, last)``: these blocks, one after the other, are in one more FSDP module.
        reshard: ``reshard_after_forward``.
        param: Type of gathered parameters, None for their own.
        reduce: Type in which gradients are reduced, None for theirs.
        tied: Whether first and last layer have one weight.
        hybrid: Whether two groups of ranks hold the same shards (of an even number of ranks).
        optimizer: A class of `torch.optim`.
        choose: As for `symmplan.fsdp.apply`; ``"table"`` for a file.
        unsharded_modules: As there.
        capacity: As there.
        flat: Whether gathers are in flat buffers.
        hold: ``(rank, count)``: who keeps the buffers of so many collectives.
        late: ``(rank, milliseconds)``: who sleeps up to so long before and behind blocks.
        apart: Whether symmplan is applied to each part of the model, and not to its root.
        in_backward: Whether each parameter is updated as soon as it has its gradient.
        debug: Whether races are looked for.
    """

    ranks: int
    units: tuple[Unit, ...]
    acts: tuple[tuple, ...]
    stages: tuple[tuple[int, int], ...] = ()
    reshard: bool | int = True
    param: str | None = None
    reduce: str | None = None
    tied: bool = False
    hybrid: bool = False
    optimizer: str = "SGD"
    choose: str = "placed"
    unsharded_modules: int | None = None
    capacity: int | None = None
    flat: bool = False
    hold: tuple[int, int] = (0, 0)
    late: tuple[tuple[int, float], ...] = ()
    apart: bool = False
    in_backward: bool = False
    debug: bool = False

    def __str__(self) -> str:
        """As code, without what is as usual."""
        return _code(self)


def _code(value):
    if attrs.has(type(value)):
        given = [(f, getattr(value, f.name)) for f in attrs.fields(type(value))]
        said = [f"{f.name}={_code(v)}" for f, v in given if v != f.default]
        return f"{type(value).__name__}({', '.join(said)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_code, value))}{',' * (len(value) == 1)})"
    return repr(value)


# Drawing.

_CHOOSE = ("placed", "push", "shared push", "copy engine", "ordinary", "measure", "auto", "table")
_OF_BLOCKS = 6  # indices are taken modulo how many blocks there are


class Draw(random.Random):
    """What programs are made of."""

    def often(self, usual, *others, share=0.5):
        """``usual`` with that probability, else one of the others."""
        return usual if self.random() < share else self.choice(others)

    def flag(self, share=0.5):
        return self.random() < share

    def index(self):
        return self.randrange(_OF_BLOCKS)

    def unit(self):
        hidden = self.choice([16, 8, 32, 17, 5])
        return Unit(
            hidden=hidden,
            wrap=self.often("whole", "parts", "both", "none", share=0.7),
            reshard=self.often(None, False, True, share=0.85),
            recompute=self.often(None, False, True, share=0.8),
            frozen=self.often("-", "", "up", "gain", share=0.85),
            tied=hidden == DIM and self.flag(0.2),
            writes=self.often("", "data", "no_grad", share=0.9),
            dropout=self.often(0.0, 0.2, share=0.9),
        )

    def written(self):
        """Somebody writes to shards."""
        how = self.choice(["data", "no_grad", "local", "foreach"])
        write = ("write", self.index(), how, self.choice([0.5, 1.25]))
        return self.choice([write, write, ("extra_step", self.index())])

    def alone(self, ranks):
        """What one rank does while the others go on."""
        others = [("litter", self.index()), ("collect",), ("nap", 5)]
        act = self.choice([self.written(), self.written(), *others])
        return ("alone", self.randrange(ranks), act)

    def lists(self):
        """Prefetch lists."""
        deep, none = self.randint(0, 3), (0, 0)
        few = [self.index() for _ in range(self.randint(0, 2))]
        return self.choice(
            [
                ("prefetch", deep, 0),
                ("prefetch", 0, deep),
                ("prefetch", self.randint(0, 2), self.randint(0, 2)),
                ("prefetch", *none),
                ("lists", self.index(), tuple(few), ()),
                ("lists", self.index(), (), tuple(few)),
            ]
        )

    def inside(self, ranks):
        """What may also happen in the middle of a pass."""
        return self.choice(
            [
                self.alone(ranks),
                self.alone(ranks),
                self.alone(ranks),
                self.written(),
                self.written(),
                ("write", self.index(), "whole", 0.5),
                ("clamp", self.index(), self.choice(["data", "no_grad"])),
                self.lists(),
                self.lists(),
                ("unshard", self.index(), self.flag()),
                ("unshard_all", self.flag(), self.flag()),
                ("freeze",),
                ("anew",),
                ("after_forward", self.flag(), self.flag()),
            ]
        )

    def anywhere(self, ranks):
        """What may also happen between passes."""
        inside = self.inside(ranks)
        return self.choice([inside] * 6 + [("look", self.index(), self.randrange(5)), ("save",)])

    def middle(self, ranks):
        """What may happen between a forward pass and its backward pass."""
        return self.choice(
            [
                self.alone(ranks),
                self.alone(ranks),
                self.written(),
                self.lists(),
                self.anywhere(ranks),
                self.anywhere(ranks),
                self.evaluation(),
                self.evaluation(),
            ]
        )

    def evaluation(self):
        mode = self.choice(["no_grad", "no_grad", "inference"])
        return ("evaluate", mode, self.randint(1, 3), self.flag())

    def between(self, ranks):
        """What may happen between steps."""
        where = self.choice(["forward", "before backward", "backward"])
        order = tuple(self.index() for _ in range(self.randint(0, 5)))
        return self.choice(
            [
                ("train",),
                ("train",),
                ("train", self.randint(1, 3), self.flag(), self.flag()),
                ("accumulate", self.randint(2, 3), self.evaluation()),
                ("several", self.randint(2, 3)),
                ("around", tuple(self.middle(ranks) for _ in range(self.randint(1, 2)))),
                ("around", tuple(self.middle(ranks) for _ in range(self.randint(1, 2)))),
                self.evaluation(),
                self.evaluation(),
                ("discard",),
                ("postpone",),
                ("catch_up",),
                ("input_gradient",),
                ("twice",),
                ("clip",),
                ("autocast",),
                ("fail", where, self.index()),
                ("inside", where, self.index(), self.inside(ranks)),
                ("order", order),
                ("recompute", self.choice([None, True, False])),
                ("learn", self.index(), self.flag()),
                ("reshard", self.index()),
                ("reshard_all",),
                ("load", self.flag()),
                *(self.anywhere(ranks) for _ in range(5)),
                *(self.lists() for _ in range(3)),
            ]
        )


def drawn(seed, ranks=None):
    """The program of a seed; on 2, 3 and 4 ranks in turn.

    Blocks that call others (`Actor.cross`) are not drawn: of those some are refused.
    """
    program, draw = _drawn(seed, ranks), Draw(f"{seed} sleeps")
    acts = list(program.acts)
    for _ in range(draw.choice([0, 0, 1, 3])):
        acts.insert(draw.randrange(len(acts)), ("sleep", draw.flag()))
    return evolve(program, acts=tuple(acts))


def _drawn(seed, ranks):
    draw = Draw(seed)
    ranks = ranks or 2 + seed % 3
    units = tuple(draw.unit() for _ in range(draw.choice([4, 3, 5, 2, 1, 6])))
    if draw.flag(0.25):  # the layout of some trainers
        units = (*units[:-1], evolve(units[-1], wrap="whole", reshard=False))
    stages = ()
    if len(units) > 2 and draw.flag(0.25):
        first = draw.randrange(len(units) - 1)
        stages = ((first, draw.randrange(first, len(units))),)
    param = draw.often(None, "bfloat16", "float16", share=0.6)
    # Pushes do not round summands of float16 to bfloat16 before they sum.
    other = () if param == "float16" else ("bfloat16",)
    usual = [("train",)] * draw.randint(1, 2)
    if draw.flag(0.3):
        usual = [("prefetch", draw.randint(0, 2), draw.randint(0, 2)), *usual]
    body = [draw.between(ranks) for _ in range(draw.randint(3, 10))]
    # What plain FSDP2 refuses, for all that follows.
    reentrant = ("recompute", True) in body or any(unit.recompute for unit in units)
    refused = ("autocast" if param else "", "input_gradient" if reentrant else "")
    body = [act for act in body if act[0] not in refused]
    program = Program(
        ranks=ranks,
        units=units,
        acts=(*usual, *body, ("train",), ("train",)),
        stages=stages,
        reshard=draw.often(True, False, share=0.8),
        param=param,
        reduce=draw.often(None, "float32", *other, share=0.6),
        tied=draw.flag(0.3),
        hybrid=ranks == 4 and draw.flag(0.15),
        optimizer=draw.choice(["SGD", "AdamW"]),
        choose=draw.often(*_CHOOSE, share=0.4),
        unsharded_modules=draw.often(None, 1, 2, 3, 5, share=0.6),
        capacity=draw.often(None, 4096, 12_000, 24_000, 1 << 20, share=0.75),
        flat=draw.flag(0.15),
        hold=draw.often((0, 0), (0, 4), (1, 1), (1, 4), share=0.8),
        late=tuple((rank, draw.choice([1.0, 3.0])) for rank in range(ranks) if draw.flag(0.25)),
    )
    if ranks == 4 and not program.hybrid and draw.flag(0.1):
        program = evolve(program, reshard=2)  # in groups of two
    if draw.flag(0.25):
        owns = [not unit.writes and draw.flag(0.7) for unit in units]
        units = tuple(evolve(unit, own=own) for unit, own in zip(units, owns, strict=True))
        program = evolve(program, units=units)
    if program.unsharded_modules is not None and _writes(program):
        # More of them stay as with `reshard_after_forward=False`: what is written is seen later.
        alone = ("order", ()) in program.acts or all(unit.wrap == "none" for unit in units)
        return evolve(program, unsharded_modules=None if alone else 1)
    return program


def _writes(program):
    """Whether shards may be written between a module's gathers."""
    writing = re.compile(r"'(write|clamp|extra_step|load|postpone)'")
    return any(unit.writes for unit in program.units) or bool(writing.search(repr(program.acts)))


class _Block(nn.Module):
    """See `Unit`."""

    def __init__(self, unit):
        super().__init__()
        self.up = nn.Linear(DIM, unit.hidden)
        self.down = nn.Linear(unit.hidden, DIM)
        self.gain = nn.Parameter(torch.ones(1))
        if unit.tied:
            self.down.weight = self.up.weight
        elif unit.own:
            weighted(self.up, InBytes)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(unit.frozen))
        self._unit = unit
        self.without = ""

    def forward(self, x):
        if self._unit.writes == "data":
            self.up.weight.data.clamp_(-0.05, 0.05)
        elif self._unit.writes:
            with torch.no_grad():
                self.up.weight.clamp_(-0.05, 0.05)
        up, down, gain = self.up, self.down, self.gain
        x = x.to(gain.dtype)
        x = x.detach() if self.without == "up" else x
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.without != "up"):
            y = torch.tanh(up(x))
        y = nn.functional.dropout(y, self._unit.dropout, self.training)
        if self.without == "down":
            return x + gain * y.mean(-1, keepdim=True)
        return x + down(y) if self.without == "gain" else x + gain * down(y)


class _Stage(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks, run):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._run = [run]

    def forward(self, x):
        for block in self.blocks:
            x = self._run[0](block, x)
        return x


class Model(nn.Module):
    """The blocks of a program between an embedding and a norm.

    Attributes:
        blocks: All of them.
        order: Which of its parts, a block or a stage each, run in a forward pass.
        recompute: Whether all blocks are checkpointed, as `Unit.recompute`; None as they say.
    """

    def __init__(self, program):
        super().__init__()
        self.inlet = nn.Linear(DIM, DIM, bias=False)
        self.words = nn.Embedding(8, DIM)
        blocks = [_Block(unit) for unit in program.units]
        parts = list(blocks)
        for first, last in program.stages:
            parts[first : last + 1] = [_Stage(blocks[first : last + 1], self._run)]
        self.parts = nn.ModuleList(parts)
        self.norm = nn.LayerNorm(DIM)
        self.outlet = nn.Linear(DIM, DIM, bias=False)
        if program.tied:
            self.outlet.weight = self.inlet.weight
        self.order = list(range(len(parts)))
        self.recompute = None

    @property
    def blocks(self):
        return [m for m in self.parts.modules() if isinstance(m, _Block)]

    def _run(self, block, x):
        how = block._unit.recompute if self.recompute is None else self.recompute
        return block(x) if how is None else checkpoint(block, x, use_reentrant=how)

    def forward(self, x):
        x = self.inlet(x + self.words((x[:, 0] * 7).long().abs() % 8))
        for i in self.order:
            part = self.parts[i % len(self.parts)]
            x = part(x) if isinstance(part, _Stage) else self._run(part, x)
        return self.outlet(self.norm(x.to(self.norm.weight.dtype)))


@functools.cache
def mesh_of(ranks, *, hybrid):
    if hybrid:
        names = ("replicate", "shard")
        return init_device_mesh(DEVICE[0], (2, ranks // 2), mesh_dim_names=names)
    return init_device_mesh(DEVICE[0], (ranks,))


def built(program):
    """The model of a program, sharded."""
    model = Model(program).to(DEVICE[0])

    def policy(*types):
        return MixedPrecisionPolicy(*(None if t is None else getattr(torch, t) for t in types))

    usual = policy(program.param, program.reduce)
    options = {"mesh": mesh_of(program.ranks, hybrid=program.hybrid), "mp_policy": usual}
    for block in model.blocks:
        unit = block._unit
        types = [
            getattr(program if getattr(unit, name) == "" else unit, name)
            for name in ("param", "reduce")
        ]
        options["mp_policy"] = policy(*types)
        own = program.reshard if unit.reshard is None else unit.reshard
        modules = [block.up, block.down] if unit.wrap in ("parts", "both") and not unit.tied else []
        modules += [block] if unit.wrap in ("whole", "both") else []
        for module in modules:
            fully_shard(module, reshard_after_forward=own, **options)
    options["mp_policy"] = usual
    for part in model.parts:
        if isinstance(part, _Stage):
            fully_shard(part, reshard_after_forward=program.reshard, **options)
    return fully_shard(model, reshard_after_forward=program.reshard, **options)
