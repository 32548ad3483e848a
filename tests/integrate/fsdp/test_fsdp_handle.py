"""The life of a handle: `apply` and `Handle.remove`, also at odd moments, where it is right or a
clear error and nothing is lost; several handles.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from fsdp_models import (
    Net,
    Trace,
    Words,
    batch,
    differences,
    mesh,
    sgd,
    shard,
    train,
    train_step,
    update,
)
from ranks import pool_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import symmplan
from symmplan.errors import RunError

pytestmark = pytest.mark.ranks

two = pool_of(2)


def _interleaved(rank, world, handled):
    """Two models whose steps interleave."""
    models = [shard(Net(blocks=2)), shard(Net(blocks=3))]
    handles = handled(models)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in models]
    trace = Trace()
    for step in range(4):
        made = models[0](batch(step, rank))
        judged = models[1](made).pow(2).mean()
        judged.backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
    return trace, handles


def _parts(rank, world, handled):
    """Two parts of one model."""
    model = nn.Sequential(Net(blocks=2), Net(blocks=3))
    for part in model:
        shard(part, root=False)
    fully_shard(model, mesh=mesh(world))
    handles = handled(model)
    trace = Trace()
    train(model, trace, rank, steps=5)
    return trace, handles


def planned_apart(rank, world, program):
    """Several modules have a plan each."""

    def run(planned):
        def handled(modules):
            made = modules if planned else ()
            return [symmplan.fsdp.apply(m, choose="placed", timeout=30.0) for m in made]

        torch.manual_seed(7)
        trace, handles = globals()[program](rank, world, handled)
        stats = [handle.stats for handle in handles]
        for handle in handles:
            handle.remove()
        return trace, stats

    (left, _), (right, stats) = run(False), run(True)
    return differences(left, right), stats


def apart(pool, program):
    """What is so on all devices; how many rendezvous each plan made on each rank."""
    found = []
    for different, stats in pool.run(planned_apart, program):
        assert different == []
        assert len(stats) == 2
        assert all(s.served for s in stats)
        assert [s.plain for s in stats] == [0, 0]
        if program == "_interleaved":
            assert [s.copies for s in stats] == [0, 0]
        found.append([s.rendezvous for s in stats])
    return found


@pytest.mark.further
@pytest.mark.all_cases
@pytest.mark.parametrize("program", ["_interleaved", "_parts"])
def test_models_and_parts_of_one_have_a_plan_each(two, program):
    for rendezvous in apart(two, program):
        if program == "_interleaved":
            assert rendezvous == [1, 1]


class Normed(Words):
    """Weights that graphs save in several ways: as views, as themselves, not at all."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(super().forward(x))


def compared(program, rank, build=lambda: shard(Normed()), **options):
    """Run ``program(model, apply, trace, rank)`` without and with symmplan.

    ``apply()`` gives a handle, or one that does nothing; what the program returns is returned.
    """
    traces, told = [], None
    for planned in (False, True):
        torch.manual_seed(7)
        model = build()
        handles = []

        def apply(model=model, planned=planned, handles=handles):
            if not planned:
                return None
            handles.append(
                symmplan.fsdp.apply(model, **{"choose": "placed", "timeout": 20.0, **options})
            )
            return handles[-1]

        traces.append(Trace())
        told = program(model, apply, traces[-1], rank)
        for handle in handles:
            handle.remove()
    return {"differences": differences(*traces), "told": told}


def refused(handle):
    """The text of the error with which `remove` refuses; None if it does not."""
    if handle is None:
        return None
    try:
        handle.remove()
    except RunError as error:
        return str(error)
    return None


def same(results):
    for result in results:
        assert result["differences"] == []
    return [result["told"] for result in results]


def removed_before_backward(rank, world, reshard):
    """``remove()`` between forward and backward, then between steps."""

    def program(model, apply, trace, rank):
        optimizer = sgd(model)
        handle = apply()
        told = []
        for step in range(5):
            loss = model(batch(step, rank)).pow(2).mean()
            if step == 3:
                told.append(refused(handle))
            loss.backward()
            trace.add("loss", loss)
            trace.grads(model, step)
            if step == 3:
                told.append(refused(handle))
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters(model)
        return told

    return compared(program, rank, lambda: shard(Normed(), reshard_after_forward=reshard))


@pytest.mark.parametrize("reshard", [True, False])
def test_remove_between_forward_and_backward_raises_and_loses_nothing(two, reshard):
    for first, second in same(two.run(removed_before_backward, reshard)):
        assert "between a forward pass and its backward pass" in first
        assert "fix: call it after backward()" in first
        assert second is None


def removed_in_hook(rank, world, kind):
    """``remove()`` in a hook of a module."""

    def program(model, apply, trace, rank):
        optimizer = sgd(model)
        handle = apply()
        told = []
        register = {
            "forward": model.blocks[1].down.register_forward_hook,
            "first forward": model.words.register_forward_hook,
            "backward": model.blocks[1].up.register_full_backward_hook,
            "last backward": model.words.register_full_backward_hook,
        }[kind]
        for step in range(5):
            hook = None
            if step == 3:
                hook = register(lambda *_: told.append(refused(handle)))
            train_step(model, optimizer, trace, step, rank)
            if hook is not None:
                hook.remove()
        trace.parameters(model)
        return told

    return compared(program, rank)


@pytest.mark.parametrize("kind", ["forward", "first forward", "backward", "last backward"])
def test_remove_in_a_hook_raises_or_is_right(two, kind):
    for (told,) in same(two.run(removed_in_hook, kind)):
        if "backward" in kind:
            assert "inside a backward pass" in told
        elif kind == "forward":
            assert "between a forward pass and its backward pass" in told


def applied_before_backward(rank, world):
    """``apply`` between forward and backward, and again after ``remove``."""

    def program(model, apply, trace, rank):
        optimizer = sgd(model)
        handle, placed = None, []
        for step in range(10):
            loss = model(batch(step, rank)).pow(2).mean()
            if step in (1, 6):
                handle = apply()
            loss.backward()
            trace.add("loss", loss)
            trace.grads(model, step)
            if step in (4, 9) and handle is not None:
                placed.append(handle.stats.served)
                handle.remove()
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters(model)
        return placed

    return compared(program, rank)


@pytest.mark.long
def test_apply_between_forward_and_backward(two):
    for first, second in same(two.run(applied_before_backward)):
        assert first > 0
        assert second > 0


def removed_while_accumulating(rank, world, again):
    """``remove()`` (and ``apply``) between micro-batches of which only the last reduces."""

    def program(model, apply, trace, rank):
        optimizer = sgd(model)
        handle = apply()
        for step in range(5):
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                model(batch(10 * step + micro, rank)).pow(2).mean().backward()
                if step == 2 and micro == 1 and handle is not None:
                    handle.remove()
                    handle = apply() if again else handle
            update(model, optimizer, trace, step)
        trace.parameters(model)

    return compared(program, rank)


@pytest.mark.parametrize("again", [True, False])
def test_remove_keeps_gradients_that_are_not_reduced_yet(two, again):
    same(two.run(removed_while_accumulating, again))


def removed_after_evaluation(rank, world):
    """The root stays unsharded after a pass without gradients; someone looks at its weights."""

    def program(model, apply, trace, rank):
        optimizer = sgd(model)
        handle = apply()
        for step in range(5):
            train_step(model, optimizer, trace, step, rank)
            if step == 3:
                with torch.no_grad():
                    trace.add("eval", model(batch(99, rank)))
                model.blocks[1].unshard(async_op=True)
                if handle is not None:
                    handle.remove()
                trace.add("whole", model.norm.weight)
                with torch.no_grad():
                    trace.add("eval", model(batch(98, rank)))
        trace.parameters(model)

    return compared(program, rank)


def test_remove_keeps_what_is_unsharded(two):
    same(two.run(removed_after_evaluation))


def removed_by_an_error(rank, world, where):
    """A step fails, and ``remove()`` runs while its error is handled; then training goes on."""

    def program(model, apply, trace, rank):
        optimizer = sgd(model)
        handle = apply()
        for step in range(3):
            train_step(model, optimizer, trace, step, rank)
        told = []
        loss = model(batch(50, rank)).pow(2).mean()
        with contextlib.suppress(ArithmeticError):
            try:
                if where == "backward":
                    hook = loss.register_hook(fail)
                    try:
                        loss.backward()
                    finally:
                        hook.remove()
                fail()
            finally:
                if handle is not None:
                    handle.remove()
        if handle is not None:
            try:
                model.blocks[0](batch(50, rank))  # a new forward pass, and the old graph
                loss.backward()
            except RuntimeError as error:
                told.append(str(error))
        del loss
        return told

    return compared(program, rank)


def fail(*_):
    raise ArithmeticError


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_remove_while_an_error_is_handled_never_hides_it(two, where):
    """A backward pass through what is left of the step raises; it reads no foreign bytes."""
    for (told,) in same(two.run(removed_by_an_error, where)):
        assert "modified by an inplace operation" in told


def views_kept(rank, world):
    """Somebody has views of parameters that were resharded: no reason not to remove."""

    def program(model, apply, trace, rank):
        optimizer = sgd(model)
        handle = apply()
        kept = []
        up = model.blocks[1].up
        hook = up.register_forward_hook(lambda m, *_: kept.append(m.weight.detach()[:1]))
        for step in range(5):
            train_step(model, optimizer, trace, step, rank)
            if step == 3 and handle is not None:
                handle.remove()
        hook.remove()
        trace.parameters(model)

    return compared(program, rank)


def test_views_of_parameters_do_not_hinder_remove(two):
    same(two.run(views_kept))
