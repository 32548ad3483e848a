"""Programs that apply and remove at odd moments, on a rank; see `test_fsdp_handle.py`."""

from __future__ import annotations

import contextlib

import torch
from fsdp_models import Net, Trace, batch, differences, shard, train_step
from torch import nn

import symmplan
from symmplan.errors import RunError


class Normed(Net):
    """Weights that graphs save in several ways: as views, as themselves, not at all."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.words = nn.Embedding(8, 16)

    def forward(self, x):
        return self.norm(super().forward(x + self.words((x[:, 0] * 7).long().abs() % 8)))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


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
            trace.grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters(model)

    return compared(program, rank)


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
