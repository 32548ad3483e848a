"""Programs of each integration for groups on several hosts, and what they say of themselves.

They compute with whole numbers, so that the order of sums shows nowhere.
"""

from __future__ import annotations

import random
import time

import torch

F = torch.ops._c10d_functional
STEPS = 5


def _late(rank, step):
    time.sleep(random.Random(100 * step + rank).choice([0.0, 0.0, 0.01]))


def _program(x, group, size):
    gathered = F.wait_tensor(F.all_gather_into_tensor(x + 1, size, group))
    scattered = F.wait_tensor(F.reduce_scatter_tensor(gathered * 2, "sum", size, group))
    return F.wait_tensor(F.all_reduce(scattered + x, "sum", group)), gathered


def given(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-9, 9, (12, 8), generator=generator).float()


def compiled(rank, size):
    """What differs from the plain program, how the calls ran, and what was counted."""
    import torch.distributed as dist

    import symmplan

    group = dist.group.WORLD.group_name
    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", choose="placed", timeout=30.0)
    program = torch.compile(_program, backend=backend, fullgraph=True)
    wrong = []
    for step in range(STEPS):
        x = given(rank, step)
        _late(rank, step)
        pairs = zip(program(x, group, size), _program(x, group, size), strict=True)
        wrong += [step for got, want in pairs if not torch.equal(got, want)]
    checked = backend.check(lambda: program(given(rank, 0), group, size))
    stats = backend.stats
    backend.release()
    return _told(wrong, checked, stats)


def eager(rank, size):
    """As `compiled`."""
    import torch.distributed as dist

    import symmplan

    group = dist.group.WORLD.group_name
    wrong = []
    with symmplan.eager(choose="placed", timeout=30.0) as session:

        def iteration(step):
            x = given(rank, step)
            wanted = _expected(size, step)
            pairs = zip(_program(x, group, size), wanted, strict=True)
            wrong.extend(step for got, want in pairs if not torch.equal(got, want))
            session.step()

        for step in range(STEPS):
            _late(rank, step)
            iteration(step)
        checked = session.check(lambda: iteration(0))
        return _told(wrong, checked, session.stats)


def _expected(size, step):
    """What `_program` gives, by the inputs of all ranks."""
    all_given = [given(r, step) for r in range(size)]
    gathered = torch.cat([x + 1 for x in all_given])
    scattered = (gathered * 2 * size).view(size, *all_given[0].shape)
    return sum(scattered[r] + all_given[r] for r in range(size)), gathered


def built():
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(8, 8, bias=False) for _ in range(3)]
    for block in blocks:
        block.weight.data.mul_(8).round_()
    return torch.nn.Sequential(*blocks)


def fsdp(rank, size):
    """As `compiled`: whole numbers, so that the order of sums shows nowhere."""
    from torch.distributed.fsdp import fully_shard

    import symmplan

    def step(model, number):
        model.zero_grad()
        _late(rank, number)
        loss = (model(given(rank, number)[:4]) * (rank + 1)).sum()
        loss.backward()
        return [loss.detach(), *(p.grad.to_local().clone() * size for p in model.parameters())]

    models = built(), built()
    for model in models:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    plain, planned = models
    handle = symmplan.fsdp.apply(planned, choose="placed", timeout=30.0)
    wrong = []
    for number in range(STEPS):
        pairs = zip(step(planned, number), step(plain, number), strict=True)
        wrong += [number for got, want in pairs if not torch.allclose(got, want, rtol=1e-6)]
    checked = handle.check(lambda: step(planned, 0))
    stats = handle.stats
    handle.remove()
    return _told(wrong, checked, stats)


def experts(rank, size, choose):
    """Rows that go to each rank and back, which the experts there multiply: as `compiled`."""
    import torch.distributed as dist

    import symmplan

    wrong = []
    given = {"max_tokens": 64, "choose": choose, "timeout": 30.0}
    with symmplan.expert_parallel(dist.group.WORLD, **given) as layer:
        for step in range(STEPS):
            _late(rank, step)
            counts = [(rank + peer + step) % 4 for peer in range(size)]
            rows = (torch.arange(float(sum(counts))) + 100 * rank + step).view(-1, 1)
            routes = layer.routes(counts)
            back = layer.combine(layer.dispatch(rows, routes) * (rank + 1), routes)
            factors = torch.repeat_interleave(torch.arange(1.0, size + 1), torch.tensor(counts))
            wrong += [] if torch.equal(back, rows * factors.view(-1, 1)) else [step]
        reasons = [reason for reason, _ in layer.stats.reasons]
        return wrong, layer.stats.served, reasons, [sorted(c.seconds) for c in layer.choices]


def routed(rank, size, seed):
    """Tokens that go to several experts, as in two levels so in torch's own way.

    Returns:
        Calls that differ, how many ran in two levels, and bytes that crossed and that would have
        with all rows.
    """
    import torch.distributed as dist

    import symmplan
    from symmplan.memory.meeting.counterparts import Counterparts

    crossed, exchange = [], Counterparts.exchange
    Counterparts.exchange = lambda self, output, source, *parts: (
        crossed.append(source.nbytes) or exchange(self, output, source, *parts)
    )
    chance, wrong, all_bytes = random.Random(seed), [], 0
    given = {"max_tokens": 16 * size, "timeout": 30.0}
    group = dist.group.WORLD
    try:
        with (
            symmplan.expert_parallel(group, choose="two-level", **given) as ours,
            symmplan.expert_parallel(group, choose="ordinary", **given) as plain,
        ):
            for step in range(6):
                width, dtype = chance.choice([(8, torch.float32), (5, torch.bfloat16)])
                generator = torch.Generator().manual_seed(100 * seed + 10 * step + rank)
                tokens = torch.randn(12, width, generator=generator).to(dtype)
                counts = torch.randint(0, 12, (size,), generator=generator).tolist()
                counts = [0] * size if step == 3 else counts
                picks = [torch.randperm(12, generator=generator)[:n] for n in counts]
                rows = tokens[torch.cat(picks)]
                all_bytes += 3 * rows.nbytes
                _late(rank, step)
                found = [_through(layer, rows, counts, rank) for layer in (ours, plain)]
                pairs = zip(*found, strict=True)
                wrong += [step for got, want in pairs if not torch.equal(got, want)]
            return wrong, ours.stats.served, sum(crossed), all_bytes
    finally:
        Counterparts.exchange = exchange


def _through(layer, rows, counts, rank):
    """What comes to the experts, what comes back, and the gradient of that."""
    rows = rows.clone().requires_grad_()
    routes = layer.routes(counts)
    inside = layer.dispatch(rows, routes)
    back = layer.combine(inside * (rank + 1), routes)
    (back.float() ** 2).sum().backward()
    return inside.detach(), back.detach(), rows.grad


def _told(wrong, checked, stats):
    ran = sorted((s.planned.algorithm, s.algorithm) for s in checked.calls)
    reasons = sorted(reason for reason, _ in stats.reasons)
    return {
        "wrong": wrong,
        "ran": ran,
        "placed": stats.placed,
        "rendezvous": stats.rendezvous,
        "reasons": reasons,
    }


PROGRAMS = {"compile": compiled, "eager": eager, "FSDP2": fsdp}
