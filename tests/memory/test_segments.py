"""`symmplan.segments`: what a process holds, whoever plans in it."""

from __future__ import annotations

import pytest
import torch
from held import segments_of_plans
from ranks import pool_of

import symmplan

pytestmark = pytest.mark.ranks

pair = pool_of(2, timeout=120.0)


def _users():
    return sorted((held.users, held.nbytes, held.memory) for held in segments_of_plans())


def _all_three(rank, size):
    """A compiled graph, a sharded model and an eager program; who holds what, and when."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    x = torch.ones(64)

    def program(x):
        return ops.wait_tensor(ops.all_gather_into_tensor(x.sin(), 2, group)) + 1

    seen = [_users()]
    backend = symmplan.backend(inner="eager", timeout=30.0)
    torch.compile(program, backend=backend)(x)
    seen.append(_users())

    model = fully_shard(torch.nn.Linear(64, 64, bias=False))
    handle = symmplan.fsdp.apply(model, timeout=30.0)
    for _ in range(2):
        model(torch.ones(4, 64)).sum().backward()
    seen.append(_users())

    with symmplan.eager(timeout=30.0) as session:
        for _ in range(2):
            program(x)
            session.step()
        seen.append(_users())
        (held,) = (h for h in segments_of_plans() if "eager session" in h.users)
        named = held.name.rpartition(".")[0], held.groups
        names = [h.name for h in segments_of_plans()]
        assert len({*names}) == len(names)
        want = [(s.name, s.groups) for s in session.plan.segments]
    handle.remove()
    backend.release()
    seen.append(_users())
    return seen, named, want, (handle.plan.peak_bytes, backend.plans[0].peak_bytes)


def test_segments_say_who_plans_in_them(pair):
    first, second = pair.run(_all_three)
    assert first == second
    seen, named, (want,), (sharded, compiled) = first
    assert named == want
    graph = (("compiled graphs",), compiled, "shm")
    model = (("FSDP2",), sharded, "shm")
    session = (("FSDP2", "eager session"), sharded, "shm")  # between FSDP2's steps
    assert seen == [[], [graph], sorted([graph, model]), sorted([graph, session]), []]
