"""Programs on a budget, and with memory that cannot be had on one rank: they run on a rank.

`test_budget.py` says what must come out.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import warnings

import fsdp_models
import torch
from fsdp_models import Net, shard, train
from held import segments_of_plans

#: What can fail on a rank while memory is made: where, and with what.
STAGES = {
    "allocate": ("symmplan.memory.backends.shm", "create"),
    "map": ("symmplan.memory.backends.shm", "map_file"),
    "share": ("symmplan.memory.backends.shm", "open_peer"),
    "rendezvous": ("symmplan.memory.backends.shm.ShmBackend", "rendezvous"),
    "settle": ("symmplan.memory.backends.shm.ShmBackend", "settle"),
    "look": ("symmplan.memory.room", "free_bytes"),
}
#: The same where algorithms are measured.
MEASURING = {
    "register": ("symmplan.choose.trials", "register"),
    "clock": ("symmplan.choose.trials", "clock_of"),
    "engines": ("symmplan.choose.trials", "engines_of"),
}
KINDS = ("OutOfSharedMemoryError", "MemoryError", "OSError", "RuntimeError", "BackendError")


def _owner(path):
    try:
        return importlib.import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def failing(stage, kind="OutOfSharedMemoryError", *, here=True, after=0):
    """From the call ``after`` on, a stage fails on this rank if ``here``."""
    from symmplan import errors

    path, name = {**STAGES, **MEASURING}[stage]
    owner = _owner(path)
    original, count = getattr(owner, name), [0]
    known = getattr(errors, kind, None)

    def fails(*args, **kwargs):
        if stage == "settle" and not args[0]._own:  # nothing was made
            return original(*args, **kwargs)
        count[0] += 1
        if count[0] <= after:
            return original(*args, **kwargs)
        if known is not None:
            raise known("no luck today", fix="try tomorrow")
        raise {"MemoryError": MemoryError, "OSError": OSError}.get(kind, RuntimeError)("no luck")

    if here:
        setattr(owner, name, fails)
    try:
        yield count
    finally:
        setattr(owner, name, original)


def fsdp(rank, world, choose="placed", build=None, program=train, **apply):
    """An FSDP2 model both ways, what it warned of, and what it still holds when it is removed."""
    from symmplan.choose import trials

    trials.forget()

    def look(handle):
        budget = handle.plan.budget
        return {
            "algorithms": sorted({s.algorithm.name for s in handle._runtime.schedule.collectives}),
            "summary": handle.plan.summary(),
            "gave": None if budget is None else [(g.before, g.after) for g in budget.demotions],
            "fingerprint": handle.plan.fingerprint,
        }

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = fsdp_models.both(
            build or (lambda: shard(Net())),
            program,
            rank,
            look=look,
            timeout=20.0,
            choose=choose,
            **apply,
        )
    result["warned"] = [str(w.message) for w in said if "symmplan" in str(w.message)]
    result["held"] = len(segments_of_plans())
    return result


def fsdp_failing(rank, world, stage, kind, victim, after, choose, **apply):
    with failing(stage, kind, here=rank == victim, after=after) as count:
        result = fsdp(rank, world, choose, **apply)
    result["failed"] = rank == victim and count[0] > after
    return result


def fsdp_on(rank, world, capacities, choose):
    """Each rank is given its own capacity."""
    return fsdp(rank, world, choose, capacity=capacities[rank % len(capacities)])


def fsdp_where_free(rank, world, free):
    """Nobody is given a capacity, and each rank has another number of bytes free."""
    from symmplan.memory import room

    before = room.free_bytes
    room.free_bytes = lambda *_: free[rank]
    try:
        return fsdp(rank, world, "placed")
    finally:
        room.free_bytes = before


def seeded(rank, world, name, seeds):
    """Many programs, each with a fault somewhere or a budget, or both; the bad ones."""
    bad, hit = [], 0
    for seed in seeds:
        draw = random.Random(f"{name} {seed}")
        algorithms = ("placed", "copy engine", "push", "measure") if name == "fsdp" else ()
        choose = draw.choice(algorithms or ("placed", "measure", "measure"))
        stages = [*STAGES, *(MEASURING if choose == "measure" else ())]
        stage, kind, victim = draw.choice(stages), draw.choice(KINDS), draw.randrange(world)
        after = draw.choice((0, 0, 1, 2))
        capacities = [None] * world
        if draw.random() < 0.5:
            capacities = [draw.choice((0, 1000, 5000, "10KB", "20 KiB", 1 << 30)) for _ in "ab"]
        blocks = draw.randrange(1, 4)
        with torch.random.fork_rng(), failing(stage, kind, here=rank == victim, after=after) as n:
            if name == "fsdp":
                apply = {"choose": choose, "build": lambda n=blocks: shard(Net(n))}
                result = fsdp(rank, world, capacity=capacities[rank % 2], **apply)
                wrong = result["differences"][:3]
            else:
                program = {"eager": eager, "compiled": compiled, "overlapped": overlapped}[name]
                result = program(rank, world, capacities, choose)
                wrong = result["wrong"]
                if sum(result["reasons"].values()) > result["plain"]:
                    wrong = [*wrong, result["reasons"], result["plain"]]
        hit += rank == victim and n[0] > after
        if wrong or result["held"]:
            bad.append((seed, stage, kind, victim, after, choose, capacities, wrong))
    return bad, hit


def _collectives(x, weight):
    """Two gathers of different sizes and a sum, with products between."""
    from torch.distributed import _functional_collectives as funcol

    group = torch.distributed.group.WORLD
    gathered = funcol.all_gather_tensor(x, 0, group) * 1
    small = funcol.all_gather_tensor(x[:1], 0, group) * 1
    return funcol.all_reduce(gathered @ weight, "sum", group) + small.sum()


def _inputs(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator), torch.randn(16, 16, generator=generator)


def _reported(stats, plans, said):

    return {
        "served": stats.served,
        "plain": stats.plain,
        "reasons": dict(stats.reasons),
        "peak": sum(p.peak_bytes for p in plans),
        "gave": [(g.before, g.after) for p in plans if p.budget for g in p.budget.demotions],
        "summary": "\n".join(p.summary() for p in plans),
        "warned": [str(w.message) for w in said if "symmplan" in str(w.message)],
        "held": len(segments_of_plans()),
    }


def eager(rank, world, capacities, choose="placed"):
    """A session, each rank with a capacity of its own; in which steps its results were wrong."""
    import symmplan
    from symmplan.choose import trials

    trials.forget()
    want = [_collectives(*_inputs(rank, step)) for step in range(4)]
    wrong = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        capacity = capacities[rank % len(capacities)]
        with symmplan.eager(choose=choose, capacity=capacity, timeout=20.0) as session:
            for step in range(4):
                result = _collectives(*_inputs(rank, step)).clone()
                session.step()
                wrong += [] if torch.equal(result, want[step]) else [step]
            stats, plans = session.stats, [session.plan]
    return {"wrong": wrong, **_reported(stats, plans, said)}


def overlapped(rank, world, capacities, choose="placed"):
    """Two groups of the same ranks, whose collectives run at the same time; compiled."""
    return compiled(rank, world, capacities, choose, body=_overlapped)


def _overlapped(x, weight):
    from torch.distributed.distributed_c10d import _world

    ops = torch.ops._c10d_functional
    data, tensor = (g.group_name for g in list(_world.pg_map)[:2])
    gathered = ops.all_gather_into_tensor(weight.detach(), 2, data)
    summed = ops.all_reduce(x.detach() @ x.detach().t(), "sum", tensor)
    whole = ops.wait_tensor(gathered)
    return (x @ weight).sum() + ops.wait_tensor(summed).sum() * whole


def compiled(rank, world, capacities, choose="placed", inner="eager", body=None):
    """The same compiled, with gradients."""
    import symmplan
    from symmplan.choose import trials

    trials.forget()
    torch._dynamo.reset()

    def run(body):
        found = []
        for step in range(4):
            x, weight = _inputs(rank, step)
            weight.requires_grad_()
            result = body(x, weight)
            result.square().mean().backward()
            found.append((result.detach(), weight.grad))
        return found

    body, others = body or _collectives, {}
    if body is _overlapped:  # only process groups' collectives may run at the same time
        others["collectives"] = "process group"
    want = run(torch.compile(body, backend="inductor" if inner == "inductor" else "eager"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        capacity = capacities[rank % len(capacities)]
        backend = symmplan.backend(inner, choose=choose, capacity=capacity, timeout=20.0, **others)
        found = run(torch.compile(body, backend=backend))
        stats, plans = backend.stats, backend.plans
        backend.release()
    wrong = [
        i
        for i, pair in enumerate(zip(want, found, strict=True))
        if not all(map(torch.equal, *pair))
    ]
    return {"wrong": wrong, **_reported(stats, plans, said)}


def with_failing(rank, world, name, stage, kind, victim, after, choose):
    """`eager` or `compiled` with a fault on one rank."""
    with failing(stage, kind, here=rank == victim, after=after) as count:
        result = {"eager": eager, "compiled": compiled}[name](rank, world, [None], choose)
    result["failed"] = rank == victim and count[0] > after
    return result


def inductor_failing(rank, world):
    with failing("allocate", here=rank == 1):
        return compiled(rank, world, [None], "placed", "inductor")


def mesh_failing(rank, world, stage, victim):
    """Sharded in rows, replicated in columns: who fails meets not all ranks."""
    from fsdp_models import mesh

    def build():
        return shard(Net(), mesh=mesh(2, 2, names=("replicate", "shard")))

    with failing(stage, "RuntimeError", here=rank == victim):
        return fsdp(rank, world, build=build)


def measured_again(rank, world):
    """Measure where one rank cannot set up what copy engines need; then use these."""
    with failing("engines", "MemoryError", here=rank == 1):
        first = fsdp(rank, world, "measure")
    second = fsdp(rank, world, "copy engine")
    return first["differences"], second["differences"], second["stats"]["plain"]


def measured_nowhere(rank, world, name):
    """Measure where one rank has no bytes to spare: no choice has seconds."""
    from symmplan.choose import trials

    timed = []
    free, seconds_of = trials.free_bytes, trials.seconds_of
    trials.free_bytes = lambda _: 4096 if rank else 1 << 40
    trials.seconds_of = lambda *args, **_: timed.append(args)
    try:
        result = {"fsdp": fsdp, "eager": eager, "compiled": compiled}[name](
            rank, world, *([] if name == "fsdp" else [[None]]), "measure"
        )
    finally:
        trials.free_bytes, trials.seconds_of = free, seconds_of
    stats = result.get("stats", result)
    wrong = result["differences"] if name == "fsdp" else result["wrong"]
    return wrong, result["warned"], timed, stats["served"], stats["plain"]


def measured_small(rank, world, name, room):
    """Measure with so little room that only parts fit; what was measured, and in how many bytes."""
    from symmplan.choose import trials
    from symmplan.choose.clock import clock_bytes
    from symmplan.integrate.fsdp.apply import Handle

    taken, choices = [], []
    borrowed, beyond, remove = trials.borrowed, trials.BEYOND, Handle.remove

    def watched(plan, *args, **kwargs):
        taken.append(plan.peak_bytes)
        return borrowed(plan, *args, **kwargs)

    def look(handle):
        choices.extend((c.nbytes, min(c.seconds.values())) for c in handle.choices)
        remove(handle)

    trials.borrowed, Handle.remove = watched, look
    trials.BEYOND = room + clock_bytes(torch.device("cpu"))
    try:
        if name == "fsdp":
            result = fsdp(rank, world, "measure")
            wrong = result["differences"]
        else:
            wrong = {"eager": eager, "compiled": compiled}[name](rank, world, [None], "measure")[
                "wrong"
            ]
    finally:
        trials.borrowed, trials.BEYOND, Handle.remove = borrowed, beyond, remove
    return wrong, taken, choices
