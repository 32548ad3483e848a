"""What symmplan runs by itself is none of an eager session's business."""

from __future__ import annotations

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks

pool = pool_of(2, timeout=120.0)


def _program(x):
    import torch.distributed as dist

    ops = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    return ops.wait_tensor(ops.all_gather_into_tensor(x, 2, name)).sum(0)


def _with_own_collectives(rank, world_size, when):
    """Registers and meets as the NCCL backend does, by collectives of torch, inside a session."""
    import torch.distributed as dist

    import symmplan
    from symmplan.coordination.groups import resolve_groups
    from symmplan.integrate.fsdp.ops import exchanges
    from symmplan.memory.meeting.torch_rendezvous import TorchRendezvous

    name = dist.group.WORLD.group_name
    group = resolve_groups([name])[name]
    x = torch.full((4, 8), float(rank))
    meeting = TorchRendezvous(group, torch.zeros(8), None, timeout=20.0, by_collective=True)
    source, received, part = torch.ones(2, 4), torch.empty(2, 4), torch.empty(4)
    act = exchanges(part, source, received, dist.group.WORLD, dist.ReduceOp.SUM)
    with symmplan.eager(timeout=20.0, memory="shm") as session:
        for turn in range(4):
            got = _program(x)
            if turn == when:
                meeting.barrier()
                act()
                with symmplan.memory.realize(symmplan.plan(_other_plan(name)), memory="shm"):
                    meeting.barrier()
            session.step()
            assert bool((got == 4).all())
        assert bool((part == 2).all())
        return session.stats.served, len(session.plan.problem.operations)


def _other_plan(name):
    from symmplan.model import Access, Buffer, Operation, Problem

    return Problem(
        buffers=[Buffer("x", 256, group=name)],
        operations=[Operation("a", group=name, handshake=True, release=True)],
        accesses=[Access("a", "x", write=True, remote=True)],
    )


@pytest.mark.parametrize("when", [0, 2])
def test_own_collectives_pass_by_a_session(pool, when):
    first, second = pool.run(_with_own_collectives, when)
    assert first == second == (3, 2)


def _compiled_inside(rank, world_size):
    """A compiled graph in placements of its own, called by a program in a session."""
    import symmplan

    torch._dynamo.reset()
    backend = symmplan.backend(inner="eager", memory="shm", timeout=20.0)
    compiled = torch.compile(_program, backend=backend, fullgraph=True)
    x = torch.full((4, 8), float(rank))
    assert bool((compiled(x) == 4).all())
    with symmplan.eager(timeout=20.0, memory="shm") as session:
        for _ in range(3):
            a = _program(x)
            session.step()
            assert bool((a == 4).all())
            assert bool((compiled(x) == 4).all())
        served = session.stats.served
    torch.distributed.barrier()
    backend.release()
    return served


def test_a_compiled_graph_keeps_its_own_placements(pool):
    assert pool.run(_compiled_inside) == [2, 2]


def _compiled_late(rank, world_size, backend):
    """What is compiled for the first time while a session follows its plan."""
    import symmplan

    torch._dynamo.reset()
    compiled, right = torch.compile(_program, backend=backend, fullgraph=True), 0
    with symmplan.eager(choose="placed", timeout=30.0) as session:
        for turn in range(6):
            x = torch.full((4, 8), float(turn + rank))
            got = (_program if turn < 3 else compiled)(x)
            right += bool((got == 4 * (2 * turn + 1)).all())
            session.step()
    return right, session.stats.served


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiler_calls_nothing_when_it_asks_for_shapes(pool, backend):
    for right, served in pool.run(_compiled_late, backend):
        assert right == 6
        assert served == 5
