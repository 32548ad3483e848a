"""Programs of one process that sleep and wake at random, over communicators that they share."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from doubles import on_devices, state
from fsdp_models import Net, Trace, differences, mesh, sgd, shard, train_step
from ranks import pool_of

import symmplan
from symmplan.errors import RunError
from symmplan.process import PROCESS

pytestmark = [pytest.mark.ranks, pytest.mark.all_cases]

two, four = pool_of(2, timeout=240.0), pool_of(4, timeout=240.0)

F = torch.ops._c10d_functional


def _gathered(x, group):
    return F.wait_tensor(F.all_gather_into_tensor(x * 2, group.size(), group.group_name)).sin()


def _steps(rank, world, chance, trace, options, with_session):
    """``{name: (a step, what sleeps)}``: two models, and a session or a graph; plain by default."""
    pairs = mesh(world // 2, 2, names=("row", "column"))
    groups, found = [dist.group.WORLD, pairs.get_group("column")], {}
    for number in range(2):
        torch.manual_seed(number)
        # Sharded over all ranks, or over pairs, which are replicated.
        over = pairs if world > 2 and chance.random() < 0.6 else mesh(world)
        model = shard(Net(), mesh=over)
        handle = symmplan.fsdp.apply(model, **options) if options else None
        optimizer = sgd(model)

        def train(turn, model=model, optimizer=optimizer):
            train_step(model, optimizer, trace, turn, rank)

        found[f"model {number}"] = train, handle
    group = chance.choice(groups)
    if with_session:
        session = symmplan.eager(**options).__enter__() if options else None

        def iterate(turn):
            trace.add("session", _gathered(torch.arange(2048.0) + rank + turn, group))
            if session is not None:
                session.step()

        found["session"] = iterate, session
        return found
    backend = symmplan.backend("eager", **options) if options else None

    def program(x):
        return _gathered(x, group) + 1

    compiled = torch.compile(program, backend=backend) if options else program

    def run(turn):
        trace.add("graph", compiled(torch.arange(4096.0) * (rank + turn)))

    found["graph"] = run, backend
    return found


def _at_random(rank, world, seed, choose):
    """What differs from torch's own, what was refused, and how many communicators are left."""

    def programs(**options):
        chance, trace = random.Random(seed), Trace()
        steps, said = _steps(rank, world, chance, trace, options, seed % 2), []
        for turn in range(8):
            for name, (step, sleeper) in steps.items():
                if turn < 2 or chance.random() < 0.7:
                    time.sleep(random.Random(100 * turn + rank).choice([0.0, 0.0, 0.01]))
                    step(turn)
                act = chance.choice(["sleep", "sleep", "wake", "", ""])
                if turn and act and sleeper is not None:
                    try:
                        getattr(sleeper, act)()
                    except RunError as error:
                        said.append((turn, name, error.what.splitlines()[0]))
        if options:
            # Who lies in the segments of a model sleeps first.
            for _, sleeper in reversed(steps.values()):
                sleeper.sleep()
            said.append(len(PROCESS.engines_made))
            if "session" in steps:
                steps["session"][1].__exit__(None, None, None)
            else:
                steps["graph"][1].release()
            for number in range(2):
                steps[f"model {number}"][1].remove()
        return trace, said

    torch._dynamo.reset()
    plain, _ = programs()
    planned, said = programs(choose=choose, memory="nccl", timeout=30.0)
    # Pushes sum in the order of ranks.
    return differences(plain, planned, 1e-6), said, state().network.refused


@pytest.mark.parametrize(
    ("seed", "choose"),
    [
        (0, "copy engine"),
        *(
            pytest.param(
                seed, ("copy engine", "push", "placed")[seed % 3], marks=pytest.mark.further
            )
            for seed in range(1, 10)
        ),
    ],
)
@pytest.mark.parametrize("ranks", ["two", pytest.param("four", marks=pytest.mark.further)])
def test_programs_that_share_communicators_sleep_at_random(request, ranks, seed, choose):
    found = request.getfixturevalue(ranks).run(on_devices, _at_random, seed, choose)
    for wrong, said, refused in found:
        assert wrong == refused == []
        assert said == found[0][1]
        assert said[-1] == 0
