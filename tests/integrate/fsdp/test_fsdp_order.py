"""A rank that skips, repeats or reorders a module: all ranks say where each of them is."""

from __future__ import annotations

import random
import re

import pytest
import torch
import torch.distributed as dist
from ranks import pool_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import symmplan
from symmplan.errors import RunError

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=200.0)

#: So many programs are one test.
PROGRAMS = 20
_SAID = re.compile(
    r"ranks [01] and [01] make different calls on segment '\w+': "
    r"rank 0 in module '([\w.]+)' at (\S+):(\d+); rank 1 in module '([\w.]+)' at (\S+):(\d+)$"
)


class Layers(nn.Module):
    """Layers in an order that is given with each batch."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x, order):
        for number in order:
            x = self.layers[number](x).relu()
        return x


def drawn(seed):
    """``(layers, the odd rank, in which step it differs, its order)``."""
    choice = random.Random(seed)
    count, odd, step = choice.randint(3, 6), choice.randint(0, 1), choice.randint(2, 4)
    order, at = list(range(count)), choice.randrange(count - 1)
    what = choice.choice(("skip", "repeat", "reorder"))
    if what == "skip":
        del order[at]
    elif what == "repeat":
        order.insert(at, at)
    else:
        order[at], order[at + 1] = order[at + 1], order[at]
    return count, odd, step, order


def one_differs(rank, world, seeds):
    """What this rank is told in each program."""
    told = []
    for seed in seeds:
        count, odd, step, order = drawn(seed)
        torch.manual_seed(seed)
        model = Layers(count)
        mesh = dist.init_device_mesh("cpu", (world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        handle = symmplan.fsdp.apply(model, choose="placed", timeout=100.0)
        try:
            for turn in range(step + 1):
                differs = rank == odd and turn == step
                model(torch.ones(2, 8), order if differs else range(count)).sum().backward()
            told.append("")
        except RunError as error:
            told.append(str(error))
            handle.remove()
        dist.barrier()
    return told


@pytest.mark.further
@pytest.mark.parametrize("block", range(200 // PROGRAMS))
def test_ranks_that_call_modules_in_other_orders_name_them_and_their_lines(two, block):
    seeds = range(block * PROGRAMS, (block + 1) * PROGRAMS)
    for seed, told in zip(seeds, zip(*two.run(one_differs, seeds), strict=True), strict=True):
        _, odd, _, order = drawn(seed)
        first = next(i for i, n in enumerate([*order, None]) if n != i)
        called = {1 - odd: first, odd: order[first]}
        for text in told:
            found = _SAID.search(text.splitlines()[0] if text else "")
            assert found, (seed, order, text)
            where = [f"layers.{called[rank]}" for rank in (0, 1)]
            assert [found[1], found[4]] == where, (seed, text)
            assert {found[2], found[5]} == {__file__}
            assert text.index("at " + __file__) < text.index("expected symmplan::"), text
