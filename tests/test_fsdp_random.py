"""Random module trees, schedules and acts under FSDP2, planned and not: the same bits."""

from __future__ import annotations

import contextlib

import fsdp_acts
import pytest
import torch
from fsdp_conditions import Hoard, flat, holding
from fsdp_models import Block, Net, Trace, batch, both, differences, sgd, update
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import pool_of
from torch import nn

from symmplan.errors import SymmplanError

pytestmark = pytest.mark.ranks

two = pool_of(2)


@st.composite
def random_programs(draw):
    """Arguments of `random_program`."""
    count = draw(st.integers(1, 4))
    blocks = draw(
        st.lists(
            st.sampled_from(["whole", "parts", "both", "none"]), min_size=count, max_size=count
        )
    )
    hidden = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    options = {"reshard_after_forward": draw(st.booleans()), "bf16": draw(st.booleans())}
    usual = tuple(range(count))
    # Mostly the usual order, else any: blocks may be left out, repeated, in another order.
    order = st.one_of(
        st.just(usual), st.lists(st.integers(0, count - 1), max_size=count + 2).map(tuple)
    )
    steps = draw(
        st.lists(
            st.tuples(order, st.integers(1, 2), st.booleans(), st.booleans()),
            min_size=3,
            max_size=6,
        )
    )
    # FSDP2 itself cannot skip the gradients of a module that it never gathered.
    first = (draw(st.permutations(usual).map(tuple)), *steps[0][1:])
    return blocks, hidden, options, [first, *steps[1:]]


def random_program(rank, world, blocks, hidden, options, steps):
    """A random tree and a random schedule.

    Args:
        blocks: How each block is wrapped: ``"whole"``, ``"parts"``, ``"both"`` or ``"none"``.
        hidden: Width of each block.
        options: Arguments of ``fully_shard``.
        steps: For each step ``(order of blocks, micro-batches, sync all, evaluate)``.
    """

    def build():
        model = Net(blocks=0)
        model.blocks = nn.ModuleList(Block(hidden=h) for h in hidden)
        return fsdp_acts.wrapped(model, world, blocks, options)

    def program(model, trace, rank):
        optimizer = sgd(model)
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
            update(model, optimizer, trace, step)
        trace.parameters(model)

    return both(build, program, rank)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=random_programs())
def test_random_programs_have_the_same_bits(two, arguments):
    for result in two.run(random_program, *arguments):
        assert result["differences"] == []
        peak, bound, _ = result["bytes"]
        assert peak >= bound
        assert result["barriers"] == 0


INDEX = st.integers(0, 5)


WHERE = st.sampled_from(["forward", "before backward", "backward"])


def act(name, *arguments):
    """An act of `fsdp_acts.Actor`."""
    return st.tuples(st.just(name), *arguments)


#: What may also happen in the middle of a step.
ANYWHERE = [
    act("unshard", INDEX, st.booleans()),
    act("unshard_all", st.booleans(), st.booleans()),
    act("look", INDEX, st.integers(0, 2)),
    act("save"),
    act("remove"),
    act("freeze"),
    act("prefetch", st.integers(0, 2), st.integers(0, 2)),
    act("after_forward", st.booleans(), st.booleans()),
]


BETWEEN = [
    act("train"),
    act("train", st.integers(1, 3), st.booleans(), st.booleans()),
    act("several", st.integers(2, 3)),
    act("evaluate", st.sampled_from(["no_grad", "inference"])),
    act("discard"),
    act("postpone"),
    act("catch_up"),
    act("input_gradient"),
    act("twice"),
    act("cross", INDEX, INDEX),
    act("clip"),
    act("autocast"),
    act("fail", WHERE, INDEX),
    act("inside", WHERE, INDEX, st.one_of(ANYWHERE)),
    act("order", st.lists(INDEX, max_size=5).map(tuple)),
    act("recompute", st.sampled_from([None, True, False])),
    act("learn", INDEX, st.booleans()),
    act("in_backward", INDEX, st.booleans()),
    act("reshard", INDEX),
    act("reshard_all"),
    act("load", st.booleans()),
    act("apply"),
]


@st.composite
def random_acts(draw):
    """Arguments of `acted`."""
    count = draw(st.sampled_from([4, 3, 5, 2, 1]))
    how = st.sampled_from(["whole", "whole", "whole", "parts", "both", "none"])
    wraps = draw(st.lists(how, min_size=count, max_size=count))
    # Some widths do not divide evenly.
    hidden = draw(st.lists(st.sampled_from([16, 8, 32, 17]), min_size=count, max_size=count))
    options = {
        "reshard_after_forward": draw(st.sampled_from([True, True, False])),
        "bf16": draw(st.booleans()),
        "tied": draw(st.booleans()),
    }
    usual = [("train",)] * draw(st.integers(1, 2))
    between = draw(st.lists(st.one_of(ANYWHERE + BETWEEN), min_size=4, max_size=16))
    return {
        "model": (hidden, wraps, options),
        # Training goes on after whatever it was.
        "acts": [*usual, *between, ("train",), ("train",)],
        "choose": draw(st.sampled_from(["placed", "push", "copy engine"])),
        "flat": draw(st.sampled_from([False, False, True])),
        "hold": (draw(st.integers(0, 1)), draw(st.sampled_from([0, 1, 4]))),
    }


def acted(rank, world, arguments):
    """Do acts without and with symmplan, up to the first at which plain FSDP2 fails.

    Args:
        arguments: ``model``: arguments of `fsdp_acts.built`; ``acts``; ``choose``: as for
            `symmplan.fsdp.apply`; ``flat``: whether gathers are in flat buffers; ``hold``:
            ``(rank, count)``: who keeps the buffers of so many collectives.

    Returns:
        ``{"differences", "refused": text of symmplan's error or None, "unsupported": that of plain
        FSDP2's, "done": how many acts, "counts": how often what happened, "intact": whether the
        kept buffers were}``.
    """
    acts, hold = arguments["acts"], arguments["hold"]
    told = {"refused": None, "unsupported": None, "counts": {}}
    hoard = Hoard(hold[1])
    traces = []

    def keep(_, tensor):
        if rank == hold[0] and hold[1]:
            hoard.keep(tensor)

    def run(planned):
        torch.manual_seed(7)
        model = fsdp_acts.built(world, *arguments["model"])
        options = {"choose": arguments["choose"], "timeout": 10.0}
        actor = fsdp_acts.Actor(model, rank, planned=planned, **options)
        traced = []
        for act in acts:
            try:
                actor.do(act)
            except SymmplanError as error:
                told["refused"] = f"{act}: {type(error).__name__}: {error}"
                break
            except Exception as error:
                if planned:
                    raise
                told["unsupported"] = f"{act}: {error}"
                break
            traced = list(actor.trace.items)
        if told["refused"] is None and told["unsupported"] is None:
            actor.trace.parameters(actor.model)
            traced = actor.trace.items
        traces.append(traced)
        told["counts"] = actor.end()
        return actor.done

    with contextlib.ExitStack() as stack:
        stack.enter_context(holding(keep))
        if arguments["flat"]:
            stack.enter_context(flat())
        acts = acts[: run(planned=False)]
        told["done"] = run(planned=True)
        hoard.end()
    left, right = (Trace() for _ in range(2))
    left.items, right.items = traces
    if told["refused"] is not None:
        del left.items[len(right.items) :]
    return {**told, "differences": differences(left, right), "intact": all(hoard.intact)}


def check_acted(ranks, arguments):
    """The same bits on all ranks, and the same acts done."""
    results = ranks.run(acted, arguments)
    for result in results:
        assert result["differences"] == []
        assert result["intact"]
        assert result["refused"] == results[0]["refused"]
        assert result["done"] == results[0]["done"]
    return results


@pytest.mark.further
@settings(max_examples=20)
@given(arguments=random_acts())
def test_whatever_is_done_between_steps_has_the_same_bits_or_is_refused(two, arguments):
    check_acted(two, arguments)


def test_a_plan_that_is_made_in_inference_mode_serves_training(two):
    """What is kept from then on must not belong to that mode."""
    check_acted(
        two,
        {
            "model": ((16, 8), ("whole", "whole"), {"tied": False, "bf16": False}),
            "acts": [("train",), ("evaluate", "inference"), *[("train",)] * 3],
            "choose": "placed",
            "flat": True,
            "hold": (0, 4),
        },
    )


@pytest.mark.parametrize(
    "then",
    [
        [("after_forward", False, True), ("train",)],
        [("after_forward", False, True), ("postpone",)],
        [("unshard_all", False, True), ("postpone",)],
        [("unshard_all", True, True), ("postpone",)],
        [("train", 2, True, False), ("train", 2, True, False)],
    ],
)
def test_modules_make_room_while_graphs_have_views_of_their_parameters(two, then):
    """They are resharded until their backward passes, and leave when these are done."""
    train = [("train",), ("train",)]
    results = check_acted(
        two,
        {
            "model": ((16,) * 4, ("whole",) * 4, {"tied": False, "bf16": False}),
            "acts": [*train, ("postpone",), *then, ("catch_up",), *train],
            "choose": "placed",
            "flat": False,
            "hold": (0, 0),
        },
    )
    for result in results:
        assert result["counts"]["other modules' parameters were needed at the same time"] > 0
        # One for that, and one for gathers that came late in each of the acts before.
        assert 1 <= result["counts"]["replans"] <= 3


@pytest.mark.parametrize(
    ("others", "postponed", "refused"),
    [
        ((0, 2), False, False),  # block 2 has no graph yet, and leaves
        ((0, 2), True, True),
        ((2, 0), False, True),
        ((0, 3), True, False),  # their bytes are apart
    ],
)
def test_two_modules_with_graphs_in_use_at_once_are_refused_by_all_ranks(
    two, others, postponed, refused
):
    train = [("train",), ("train",)]
    between = [("cross", *others)]
    if postponed:
        between = [("postpone",), *between, ("catch_up",)]
    results = check_acted(
        two,
        {
            "model": ((16,) * 4, ("whole",) * 4, {"tied": False, "bf16": False}),
            "acts": [*train, *between, *train],
            "choose": "placed",
            "flat": False,
            "hold": (0, 0),
        },
    )
    for result in results:
        assert (result["refused"] is not None) == refused
        if refused:
            assert f"'blocks.{others[1]}' needs its parameters while" in result["refused"]
            assert "fix: call handle.remove()" in result["refused"]
