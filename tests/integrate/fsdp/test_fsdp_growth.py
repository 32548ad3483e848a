"""Evaluations, and `unshard()` by hand: how large plans become, and how many there are."""

from __future__ import annotations

import random

import pytest
import torch
from fsdp_acts import Actor
from fsdp_models import DIM, Block, both, changing, shard
from fsdp_programs import Program, Unit, built
from ranks import pool_of

pytestmark = pytest.mark.ranks

two = pool_of(2)

#: What is no training; whatever it leaves unsharded.
OUTSIDE = [
    ("evaluate", "no_grad"),
    ("evaluate", "no_grad", 2),
    ("evaluate", "inference"),
    ("unshard_all", False, True),
    ("unshard_all", True, False),
    ("reshard_all",),
    ("unshard", 0, True),
    ("unshard", 2, False),
    ("reshard", 1),
    ("look", 1, -1),
]


def drawn(seed):
    """A model, and acts between its steps."""
    draw = random.Random(seed)
    units = [Unit(hidden=draw.choice((8, 16)), wrap=draw.choice(("whole", "whole", "parts")))]
    units += [Unit(hidden=8, reshard=draw.choice((None, None, False))) for _ in range(4)]
    between = [draw.choices(OUTSIDE, k=draw.randint(1, 3)) for _ in range(2)]
    return Program(2, tuple(units), tuple(map(tuple, between)))


def grown(rank, world, program, rounds=5):
    """Bytes of the first plan, of the last and of the largest module, and replans by round."""
    model = built(program)
    actor = Actor(model, rank, planned=True, timeout=20.0)
    for _ in range(2):
        actor.train()
    (handle,) = actor.handles
    before, replans = handle.plan.peak_bytes, [handle.stats.replans]
    for _ in range(rounds):
        for acts in program.acts:
            for act in acts:
                actor.do_inside(act)
            actor.train()
        replans.append(handle.stats.replans)
    largest = max(b.nbytes for b in handle.plan.problem.buffers if "themselves" in b.where)
    told = handle.stats, handle.plan.peak_bytes
    actor.end()
    return before, told[1], largest, replans, told[0]


def check(ranks, program):
    for before, after, largest, replans, stats in ranks.run(grown, program):
        assert before <= after <= before + largest, program
        assert replans[-1] == replans[2], program
        assert stats.plain == 0


@pytest.mark.long
def test_an_evaluation_that_leaves_modules_unsharded_takes_one_module_more(two):
    units = (Unit(),) * 5 + (Unit(reshard=False),)
    program = Program(2, units, ((("evaluate", "no_grad"),),))
    check(two, program)
    assert [x[3][-1] for x in two.run(grown, program)] == [1, 1]


@pytest.mark.further
def test_random_programs_take_one_module_more_and_are_soon_not_planned_again(two):
    for seed in (0, 1, 50):  # 50: what is carried behind a plan that changes nothing
        check(two, drawn(seed))


@pytest.mark.further
@pytest.mark.timeout(900)
def test_a_hundred_random_programs_take_one_module_more_and_settle(two):
    for seed in range(2, 102):
        check(two, drawn(seed))


def past_its_hook(rank, world):
    """The root's forward runs without FSDP2's hook, so that backward prefetches what is stale."""
    import torch

    actor = Actor(built(Program(2, (Unit(),) * 3, ())), rank, planned=True, timeout=20.0)
    for _ in range(4):
        actor.train()
        actor.model.unshard()
        with torch.no_grad():
            actor.model.forward(actor._batch())
        actor.model.reshard()
    stats = actor.handles[0].stats
    actor.end()
    return stats


def test_a_prefetch_that_misses_is_no_reason_for_another_plan(two):
    for stats in two.run(past_its_hook):
        assert (stats.replans, stats.plain, stats.reasons) == (0, 0, ())


class _Grows(torch.nn.Module):
    """A large module in each step, and from one step on a small one."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(DIM, 16 * DIM), torch.nn.Linear(DIM, DIM)])
        self.both = False

    def forward(self, x):
        x = self.blocks[0](x)
        return self.blocks[1](x) if self.both else x


def nothing_at_first(rank, world, again):
    """Its plan places nothing, until a module comes that fits."""

    def change(model, step, *_):
        model.both = step >= 4 if again else step == 4

    def build():
        return shard(_Grows(), root=False)

    return both(build, changing(change, 8), rank, capacity=8 << 10)


@pytest.mark.long
@pytest.mark.parametrize("again", [True, False])
def test_what_comes_later_is_recorded_where_nothing_was_placed(two, again):
    for result in two.run(nothing_at_first, again):
        assert result["differences"] == []
        stats = result["stats"]
        assert (stats["placed"] > 0, stats["replans"]) == (again, int(again))
        assert stats["reasons"]["the plan does not know this collective"] > 0
        assert stats["plain"] == sum(stats["reasons"].values())
