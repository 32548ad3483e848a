"""Gathers that begin before FSDP2 asks for them, and gathers in backward that need not run."""

from __future__ import annotations

import contextlib

import fsdp_models
import pytest
import torch
from fsdp_models import Net, batch, same, sgd, shard, train_step
from test_fsdp import pool_of

from symmplan.capture.fsdp import Key, Recording
from symmplan.capture.fsdp_live import gathered_ahead, gathers_live
from symmplan.integrate.fsdp.home import Home

pytestmark = pytest.mark.ranks

two = pool_of(2)

BLOCKS = 4


def recorded(*events):
    """``("b", True)`` gathers in backward, ``"b"`` in forward; each is used and released."""
    recording = Recording()
    for event in events:
        site, backward = event if isinstance(event, tuple) else (event, False)
        index = recording.begin(Key(site, "all_gather", 8, "torch.float32", backward), 32)
        recording.run(index, "g")
        recording.use(index)
        recording.release(index)
    return recording


@pytest.mark.parametrize(
    ("events", "ahead"),
    [
        (("root", "a", "b"), {1: 0, 2: 1}),
        # A pass ends where a module comes again, and with backward.
        (("root", "a", "root", "a"), {1: 0, 3: 2}),
        (("root", "a", ("a", True), "b", "c"), {1: 0, 4: 3}),
    ],
)
def test_gathers_begin_with_the_use_of_those_before(events, ahead):
    recording = recorded(*events)
    inside = set(recording.ran)
    assert gathered_ahead(recording, inside) == ahead
    told = [e for e in gathers_live(recording, inside, None) if e[0] in ("begin", "run", "drop")]
    for index, other in ahead.items():
        begin = told.index(("begin", index))
        assert told.index(("run", other)) < begin
        if ("drop", other) in told:
            assert begin < told.index(("drop", other))
    # Where each begins with the use of the one before, nothing changes any more.
    again = Recording(recording.collectives, recording.events)
    assert gathered_ahead(again, inside) == ahead


def test_what_is_not_direct_is_not_ahead():
    recording = recorded("root", "a", "b")
    assert gathered_ahead(recording, {0, 2}) == {2: 1}


@contextlib.contextmanager
def noted(model, log):
    """``log`` gets what is gathered where parameters live, and which block computes."""
    gather = Home.gather

    def gathering(home):
        log.append(f"gather {home._site}")
        gather(home)

    Home.gather = gathering
    hooks = [
        block.up.register_forward_hook(lambda *_, i=i: log.append(f"blocks.{i}"))
        for i, block in enumerate(model.blocks)
    ]
    try:
        yield
    finally:
        Home.gather = gather
        for hook in hooks:
            hook.remove()


def stepped(rank, world, by_hand):
    """What the last of four steps gathers; ``by_hand``: once more before its forward pass."""
    log = []

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(4):
            log.clear()
            with noted(model, log):
                for block in model.blocks if by_hand else ():
                    block.unshard()
                    block.reshard()
                log.append("forward")
                train_step(model, optimizer, trace, step, rank)
        trace.parameters(model)

    result = fsdp_models.both(lambda: shard(Net(BLOCKS)), program, rank)
    return {**result, "log": log}


def test_the_next_module_is_gathered_first_and_the_last_ones_once(two):
    results = two.run(stepped, False)
    forward = ["forward", "gather model", "gather blocks.0"]
    for i in range(BLOCKS):
        forward += [f"gather blocks.{i + 1}"] * (i + 1 < BLOCKS) + [f"blocks.{i}"]
    for result in same(results, departures=0, plain=0, copies=0, replans=0):
        log = result["log"]
        assert log[: len(forward)] == forward
        # Two blocks have bytes besides the root's, so the last two are still there.
        backward = [f"gather blocks.{i}" for i in reversed(range(BLOCKS - 2))]
        assert log[len(forward) :] == backward
        assert result["stats"]["reused"] == 3 * 2  # the first step was recorded


def test_nothing_is_gathered_ahead_outside_of_a_forward_pass(two):
    """There FSDP2's streams may not have waited for the optimizer yet."""
    for result in same(two.run(stepped, True), copies=0):
        before = result["log"][: result["log"].index("forward")]
        assert before == [f"gather blocks.{i}" for i in range(BLOCKS)]


def in_place(block):
    with torch.no_grad():
        block.up.weight.mul_(1.5)


def its_part(block):
    with torch.no_grad():
        block.up.weight.to_local().mul_(1.5)


def an_optimizer(block):
    for parameter in block.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1, foreach=True)
    optimizer.step()
    optimizer.zero_grad()


def another_optimizer(block):
    """Of this rank alone: nothing may depend on it."""
    if torch.distributed.get_rank() == 0:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        torch.optim.SGD([weight], lr=0.1).step()


def changed(rank, world, change, during):
    """A shard changes where plain FSDP2 has not gathered it yet."""

    def program(model, trace, rank):
        optimizer = sgd(model)
        for step in range(5):
            hook = None
            if during and step > 2:
                hook = model.blocks[1].up.register_forward_hook(lambda *_: change(model.blocks[2]))
            loss = model(batch(step, rank)).pow(2).mean()
            if not during and step > 2:
                change(model.blocks[-1])
            if hook is not None:
                hook.remove()
            loss.backward()
            trace.add(f"{step}.loss", loss)
            fsdp_models.update(model, optimizer, trace, step)
        trace.parameters(model)

    return fsdp_models.both(lambda: shard(Net(BLOCKS)), program, rank)


@pytest.mark.parametrize("during", [True, False], ids=["during forward", "after forward"])
@pytest.mark.parametrize("change", [in_place, its_part, an_optimizer, another_optimizer])
def test_a_shard_that_changes_is_gathered_again(two, change, during):
    same(two.run(changed, change, during), copies=0)


def written(rank, world):
    """A hook writes to gathered parameters, which lasts until they are released."""

    def program(model, trace, rank):
        optimizer = sgd(model)

        def write(module, _):
            with torch.no_grad():
                module.weight.mul_(1.5)

        model.blocks[-1].up.register_forward_pre_hook(write)
        for step in range(4):
            train_step(model, optimizer, trace, step, rank)

    return fsdp_models.both(lambda: shard(Net(BLOCKS)), program, rank)


def test_what_is_written_to_gathered_parameters_is_not_kept(two):
    same(two.run(written), copies=0)


def skipping(rank, world, orders):
    """What was gathered ahead is not what comes next."""

    def change(model, step, trace, rank):
        model.order = list(orders[step])

    return fsdp_models.both(
        lambda: shard(Net(BLOCKS)), fsdp_models.changing(change, len(orders)), rank
    )


def test_a_module_that_is_left_out_gives_its_bytes_back(two):
    orders = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3), (3, 0), (0, 1, 2, 3), (1,)]
    for result in two.run(skipping, orders):
        assert result["differences"] == []


def evaluated(rank, world):
    """Two passes without gradients, between which the parameters change."""

    def change(model, step, trace, rank):
        for turn in range(2):
            with torch.no_grad():
                trace.add(f"{step}.{turn}", model(batch(step + turn, rank)))
                for parameter in model.parameters():
                    parameter.mul_(0.9)

    return fsdp_models.both(lambda: shard(Net(BLOCKS)), fsdp_models.changing(change, 4), rank)


def test_passes_apart_do_not_gather_for_each_other(two):
    same(two.run(evaluated), copies=0)
