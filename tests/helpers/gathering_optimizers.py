"""FSDP2 with optimizers that gather, trained plainly and with a session in FSDP2's segments.

`trained` runs a program of *acts*, each in one iteration; `compared` runs it with and without
symmplan, and says what differs. The optimizers deal matrices to ranks by all-to-all, gather each
gradient, or ask DTensor for it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from attrs import evolve
from fsdp_models import (
    DEVICE,
    Net,
    Trace,
    batch,
    differences,
    local,
    shard,
    synchronize,
)
from torch.distributed import _functional_collectives as funcol

import symmplan
from symmplan.process import PROCESS

#: How an optimizer has whole gradients.
STYLES = ("all-to-all", "asynchronous", "unequal", "gathered", "full tensor", "in place")
#: What a program does beside training, in one iteration.
ACTS = (
    "train",
    "keep",  # a tensor of the optimizer, and look at it much later
    "evaluate inside",  # between two of the optimizer's calls
    "train inside",
    "keep inside",  # a tensor of the optimizer's first half, and evaluate
    "twice",  # two forward passes before their backward passes
    "graph",  # of a forward pass, whose backward pass comes behind the optimizer
    "sleep",
    "session sleeps",
    "both sleep",
    "replan",
    "remove",
    "frozen",
)


def program(style, acts):
    """Acts, where each iteration that a session records is one in which FSDP2 does not run.

    A session that records others lies in memory of its own, where a tensor that is kept is an
    error.
    """
    recorded = ["train"] * (2 if style == "unequal" else 1)
    found = [*recorded]
    for act in acts:
        found += [act, *recorded] if act == "replan" else [act]
    return [*found, "train"]


class Gathering:
    """Updates by a function of whole gradients, so that a wrong byte anywhere shows."""

    def __init__(self, parameters, style, group, *, holds=False):
        self.parameters = [p for p in parameters if p.ndim == 2]
        self.style = style
        self.group = group
        self.between = lambda: None
        self.kept = None
        self._holds = holds

    @torch.no_grad()
    def step(self):
        # All at once, so that they take about as much as FSDP2 does; or one half after the other.
        half = len(self.parameters) // 2
        first, second = self.parameters[:half], self.parameters[half:]
        wholes = self._wholes(first)
        if not self._holds:
            self._update(first, wholes)
            wholes = []
        self.between()
        wholes += self._wholes(second)
        self._update(self.parameters[-len(wholes) :], wholes)

    @torch.no_grad()
    def step_by_step(self):
        """One parameter after the other."""
        for p in self.parameters:
            self._update([p], self._wholes([p]))
        self.kept = None

    def _wholes(self, parameters):
        wholes = [self._whole(p, p.grad.to_local(), self.group.size()) for p in parameters]
        self.kept = wholes[0]
        return wholes

    def _update(self, parameters, wholes):
        for p, whole in zip(parameters, wholes, strict=True):
            grad = p.grad.to_local()
            scale = whole.float().square().mean().sqrt() + 1.0
            change = (grad + whole.mean(0)[None, : grad.shape[1]]) / scale
            p.to_local().sub_(change, alpha=0.05)

    def _whole(self, p, grad, size):
        out = symmplan.placed.empty if self.style == "all-to-all" else torch.empty
        if self.style == "full tensor":
            return p.grad.full_tensor()
        if self.style == "gathered":
            return funcol.all_gather_tensor(grad.contiguous(), 0, self.group)
        if self.style == "in place":
            whole = out(size * grad.shape[0], grad.shape[1], device=grad.device)
            dist.all_gather_into_tensor(whole, grad.contiguous(), group=self.group)
            return whole
        if self.style == "unequal":
            return self._unequal(p, grad, size)
        mine = grad.repeat(size, 1)
        whole = out(*mine.shape, device=grad.device)
        if self.style == "asynchronous":
            work = dist.all_to_all_single(whole, mine, group=self.group, async_op=True)
            mine = mine * 2
            work.wait()
        else:
            dist.all_to_all_single(whole, mine, group=self.group)
        return whole

    def _unequal(self, p, grad, size):
        """Rank r gets r + 1 times as many rows as the first, of some parameters the last none."""
        some = grad[: -(-grad.shape[0] // 2)]
        parts = [len(some) * (rank + 1) for rank in range(size)]
        if p.shape[0] % 3 == 0:
            parts[-1] = 0
        rank = self.group.rank()
        mine = torch.cat([some] * (sum(parts) // len(some)))
        whole = torch.empty(size * parts[rank], *grad.shape[1:], device=grad.device)
        dist.all_to_all_single(whole, mine, [parts[rank]] * size, parts, group=self.group)
        return whole if len(whole) else grad * 2


def trained(rank, world, style, acts, *, planned, holds=False, **options):
    """What a program of acts computes, and what the process holds after each iteration."""
    torch.manual_seed(3)
    model, trace = shard(Net(blocks=3).to(DEVICE[0])), Trace()
    group = dist.group.WORLD
    optimizer = Gathering(model.parameters(), style, group, holds=holds)
    handle = session = None
    found = {"bytes": [], "replans": [], "rendezvous": []}
    if planned:
        handle = symmplan.fsdp.apply(model, timeout=60.0, **options)
        device = torch.device(DEVICE[0])
        session = symmplan.eager(group, timeout=60.0, device=device, **options)
        session.__enter__()
    kept = []
    for step, act in enumerate(acts):
        if rank == step % world:
            time.sleep(0.003)
            if DEVICE[0] == "cuda":
                torch.cuda._sleep(1_000_000)
        passes = 2 if act == "twice" else 1
        some = [model(batch(step + 50 * i, rank)).square().mean() for i in range(passes)]
        for loss in some:
            loss.backward()
        trace.add(f"{step}.loss", sum(x.detach() for x in some))
        trace.grads(model, step)
        synchronize()
        graph = model(batch(step, rank)).sum() if act == "graph" else None
        optimizer.between = _between(model, optimizer, trace, kept, step, act, rank)
        optimizer.step()
        optimizer.between = None
        if act == "keep":
            kept.append((optimizer.kept, optimizer.kept.clone()))
        optimizer.kept = None
        if session is not None:
            session.step()
        if graph is not None:
            synchronize()
            graph.backward()
            del graph
        model.zero_grad()
        if handle is not None:
            _rest(handle, session, act)
            if act == "remove":
                handle.remove()
                handle = symmplan.fsdp.apply(model, timeout=60.0, **options)
            held = [s for s in symmplan.segments() if s.memory != "local"]
            found["bytes"].append(sum(s.nbytes for s in held))
            found["replans"].append(handle.stats.replans)
            found["rendezvous"].append(session.stats.rendezvous)
        for tensor, copy in kept:
            trace.add(f"{step}.kept", (tensor == copy).all())
    trace.parameters(model)
    if handle is not None:
        found["copies"] = session.stats.copies
        found["rests"] = session._frozen.arena.timed
        found["alone"] = session.plan.peak_bytes
        found["fsdp"] = handle.stats.segment_bytes
        session.__exit__(None, None, None)
        del kept
        handle.remove()
    return trace, found


def _between(model, optimizer, trace, kept, step, act, rank):
    def between():
        if act == "keep inside":
            kept.append((optimizer.kept, optimizer.kept.clone()))
        if act in ("evaluate inside", "keep inside"):
            with torch.no_grad():
                trace.add(f"{step}.inside", model(batch(90 + step, rank)))
        if act == "train inside":
            with torch.enable_grad():
                model(batch(80 + step, rank)).sum().backward()
            trace.grads(model, step)

    return between


def _rest(handle, session, act):
    if act in ("session sleeps", "both sleep"):
        session.sleep()
    if act in ("sleep", "both sleep"):
        handle.sleep()
    if act == "replan":
        session.replan()
    if act == "frozen" and not handle.planned:
        handle.freeze()


def compared(rank, world, style, acts, **options):
    """What differs from the program without symmplan, and what was found."""
    # Devices have what is sent in placements, too, and FSDP2 no room for all of it.
    on_device = DEVICE[0] != "cpu" or options.get("memory", "shm") != "shm"
    given = {"holds": style != "in place" and not on_device}
    plain, _ = trained(rank, world, style, acts, planned=False, **given)
    trace, found = trained(rank, world, style, acts, planned=True, **given, **options)
    return found | {"differences": differences(plain, trace)}


class InSession(torch.optim.SGD):
    """Gathers a few numbers of each parameter over all ranks, in a session where FSDP2 is planned.

    What it gathers has one size, whatever has gradients, and changes the parameters.
    """

    sessions = []  # noqa: RUF012 (of this process, closed by `in_session`)
    turns = 0
    count = 64

    def step(self, closure=None):
        super().step(closure)
        if PROCESS.watchers and not self.sessions:
            device = torch.device(DEVICE[0])
            self.sessions.append(symmplan.eager(timeout=20.0, device=device, choose="placed"))
            self.sessions[0].__enter__()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    self._gather(local(p))
        if self.sessions:
            type(self).turns += self.sessions[0]._turns._turn is not None
            self.sessions[0].step()

    def _gather(self, shard):
        size, mine = dist.get_world_size(), torch.zeros(self.count, device=shard.device)
        mine[: min(self.count, shard.numel())] = shard.reshape(-1)[: self.count].float()
        whole = torch.empty(size * self.count, device=shard.device)
        dist.all_gather_into_tensor(whole, mine)
        other = symmplan.placed.empty(size * self.count, device=shard.device)
        dist.all_to_all_single(other, whole.flip(0))
        scale = 1.0 - 1e-3 * (whole.mean() - 0.5 * other.mean()).tanh().item()
        if shard.dtype.is_floating_point:
            shard.mul_(scale)


def in_session(rank, world, program, run):
    """``run(rank, world, program)``, with such an optimizer; and how many turns there were."""
    torch.optim.InSession = InSession
    InSession.turns = 0
    try:
        found = run(rank, world, evolve(program, optimizer="InSession", in_backward=False))
    finally:
        while InSession.sessions:
            InSession.sessions.pop().release()
    return found | {"turns": InSession.turns}
