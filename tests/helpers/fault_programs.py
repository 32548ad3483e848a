"""Programs in which one rank differs, raises, dies or stops at a moment that is known.

Each integration's program makes the same steps on all ranks and knows every right number without
asking anybody. `test_faults_table.py` says what must come of each fault on each rank.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import signal

import attrs
import torch
import torch.distributed as dist
from budget_programs import failing
from torch import nn

import symmplan

STEPS = 5
#: In which step a moment comes. Programs that differ do so in all of it; who raises, dies or stops
#: does so before the first, between the collectives of the planned, and behind the last.
_MOMENTS = {0: "before", 3: "planned", STEPS - 1: "end"}
_SIZE = (4, 8)


class FailedError(ArithmeticError):
    """What a program raises by itself."""


#: What fails on the rank that cannot have symmetric memory.
_STAGES = {"no memory": "allocate", "no backend": "rendezvous"}


@attrs.define
class Fault:
    """What happens, when, and whether to this rank.

    Attributes:
        failures: How often memory could not be had here.
    """

    what: str
    moment: str
    here: bool
    failures: list = attrs.field(factory=list)
    _stack: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)

    def at(self, moment):
        """The program has come to a moment between two collectives."""
        if not self.here or moment != self.moment:
            return
        if self.what == "raises":
            raise FailedError("a fault of its own")
        if self.what in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if self.what == "killed" else signal.SIGSTOP)

    def inside(self, step, number):
        """The program has come to collective ``number`` of a step."""
        moment = _MOMENTS.get(step, "")
        if number == {"before": 0, "planned": 1}.get(moment):
            self.at(moment)

    def differs(self, what, step):
        """Whether this rank's program is another one in this step."""
        return self.here and self.what == what and _MOMENTS.get(step) == self.moment

    @property
    def options(self):
        """How collectives are to run, which may be another way on this rank."""
        return "ordinary" if self.here and self.what == "option" else "placed"

    def grows(self, step):
        """Whether all ranks need more memory than before, which cannot be had on this one."""
        now = self.what in _STAGES and _MOMENTS.get(step) == self.moment
        if now:
            self._fail()
        return now

    def _fail(self):
        self.failures = self._stack.enter_context(failing(_STAGES[self.what], here=self.here))

    @contextlib.contextmanager
    def meanwhile(self):
        """While ranks agree or get their memory, this rank may fail, die or stop."""
        from symmplan.coordination.exchange import Exchange

        original = Exchange.round

        def met(exchange, phase, *args, **kwargs):
            if phase == "hello":
                self.at("agreeing")
            return original(exchange, phase, *args, **kwargs)

        Exchange.round = met
        try:
            with self._stack:
                if self.what in _STAGES and self.moment == "agreeing":
                    self._fail()
                yield
        finally:
            Exchange.round = original


def _inputs(rank, step, *, more=1):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-9, 9, (more * _SIZE[0], _SIZE[1]), generator=generator).float()


def _all_inputs(step, world, **size):
    return [_inputs(r, step, **size) for r in range(world)]


def _gather(x, group):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x * 2, group.size(), group.group_name))


def _sum(x, group):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x + 1, "sum", group.group_name))


def _two_collectives(step, rank, group, fault, gather, add, more):
    """A gather and a sum, with right numbers."""
    world = group.size()
    x = _inputs(rank, step, more=more)
    mine = x[:2] if fault.differs("size", step) else x
    order = [gather, add]
    if fault.differs("order", step):
        order.reverse()
    if fault.differs("more", step):
        order.insert(0, gather)
    found = {}
    for number, call in enumerate(order):
        fault.inside(step, number)
        found[call] = call(mine, group)
    every = _all_inputs(step, world, more=more)
    assert torch.equal(found[gather], 2 * torch.cat(every)), "a wrong number"
    assert torch.equal(found[add], sum(every) + world), "a wrong number"


def compiled(rank, group, fault, timeout):
    """Two compiled functions; returns what was done, as all programs do."""
    torch._dynamo.reset()
    backend = symmplan.backend("eager", choose=fault.options, timeout=timeout)
    gather, add = (torch.compile(f, backend=backend, dynamic=False) for f in (_gather, _sum))
    more = 1
    try:
        for step in range(STEPS):
            more = 8 if fault.grows(step) else more
            _two_collectives(step, rank, group, fault, gather, add, more)
        fault.at("end")
        return backend.stats  # noqa: TRY300 (the end of what may raise)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise error.inner_exception from None
    finally:
        backend.release()


def eager(rank, group, fault, timeout):
    """The same in a session."""
    more = 1
    with symmplan.eager(group, choose=fault.options, timeout=timeout) as session:
        for step in range(STEPS):
            if fault.grows(step):
                more = 8
                session.replan()
            _two_collectives(step, rank, group, fault, _gather, _sum, more)
            session.step()
        fault.at("end")
        return session.stats


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(_SIZE[1], _SIZE[1], bias=False)
        self.at = lambda: None

    def forward(self, x):
        self.at()
        return self.linear(x)


class _Model(nn.Module):
    """Blocks of one size, so that their collectives fit each other in any order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.order = (0, 1, 2)

    def forward(self, x):
        for i in self.order:
            x = self.blocks[i](x)
        return x


def fsdp(rank, group, fault, timeout):
    """A sharded model, whose losses and gradients the unsharded one has, too."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    world, mesh = group.size(), DeviceMesh.from_group(group, "cpu")
    whole, model = _Model(), _Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    handle = symmplan.fsdp.apply(model, choose=fault.options, timeout=timeout)
    usual = model.order
    try:
        for step in range(STEPS):
            for number, block in enumerate(model.blocks):
                block.at = functools.partial(fault.inside, step, number)
            if fault.grows(step):
                usual = (0, 1, 2, 0, 1, 2)
            model.order = usual
            if fault.differs("order", step):
                model.order = (1, 0, 2)
            if fault.differs("more", step):
                model.order = (0, 0, 1, 2)
            x = _inputs(rank, step)
            found = model(x[:2] if fault.differs("size", step) else x).square().mean()
            found.backward()
            whole.order = usual
            if not (fault.what in ("more", "order") and fault.moment == "before"):
                _same_step(whole, model, found, step, rank, world, fault)
        fault.at("end")
        return handle.stats
    finally:
        handle.remove()


def _same_step(whole, model, found, step, rank, world, fault):
    losses = []
    for r, x in enumerate(_all_inputs(step, world)):
        few = fault.what == "size" and _MOMENTS.get(step) == fault.moment and r == world - 1
        losses.append(whole(x[:2] if few else x).square().mean())
    torch.testing.assert_close(found, losses[rank], msg="a wrong number")
    (sum(losses) / world).backward()
    for right, mine in zip(whole.parameters(), model.parameters(), strict=True):
        part = right.grad.chunk(world)[rank : rank + 1]
        own = mine.grad.to_local()
        torch.testing.assert_close(own, part[0] if part else own[:0], msg="a wrong number")
    whole.zero_grad()
    model.zero_grad()


def experts(rank, group, fault, timeout):
    """Layers of two widths; each rank's expert multiplies by its number plus one."""
    world, counts = group.size(), [2] * group.size()
    made = symmplan.expert_parallel(
        group, max_tokens=64, choose=_PUSH[fault.options], timeout=timeout
    )
    with made as layers:
        for step in range(STEPS):
            counts = [80] * world if fault.grows(step) else counts
            widths = [8, 4]
            if fault.differs("order", step):
                widths.reverse()
            if fault.differs("more", step):
                widths.insert(0, 8)
            for number, width in enumerate(widths):
                rows = torch.arange(float(sum(counts) * width)).view(-1, width) + 100 * rank + step
                factors = torch.arange(1.0, world + 1).repeat_interleave(counts[0]).view(-1, 1)
                if fault.differs("size", step):
                    rows = rows[:, :3].contiguous()
                fault.inside(step, number)
                routes = layers.routes(counts)
                inside = layers.dispatch(rows, routes)
                outside = layers.combine(inside * (rank + 1), routes)
                assert torch.equal(outside, rows * factors), "a wrong number"
        fault.at("end")
        return layers.stats


_PUSH = {"placed": "push", "ordinary": "ordinary"}
PROGRAMS = {"compile": compiled, "eager": eager, "FSDP2": fsdp, "experts": experts}


def run(rank, world, integration, what, moment, timeout):
    """A program with a fault on the last rank.

    Returns:
        How many of its collectives ran in placements and how many did not, and how often memory
        could not be had on this rank.
    """
    from symmplan.choose import trials

    trials.forget()
    fault = Fault(what, moment, here=rank == world - 1)
    group = dist.new_group(range(world), timeout=dt.timedelta(seconds=timeout))
    with fault.meanwhile():
        stats = PROGRAMS[integration](rank, group, fault, timeout)
    return stats.served, stats.plain, sum(fault.failures)
