"""FSDP2 and compiled graphs in one model on CUDA devices, over NCCL."""

from __future__ import annotations

import pytest
import torch
from devices import needs_devices, pool_on
from held import segments_of_plans

pytestmark = needs_devices()


pool = pool_on(2, timeout=280.0)


def _trained(rank, size, compiled, sharded):
    """Losses without symmplan and with it in the graphs, in FSDP2, or in both."""
    import torch.distributed as dist
    from test_tenants import TOKENS, made

    import symmplan

    torch.cuda.set_device(rank)
    torch._dynamo.reset()
    mesh, other = dist.init_device_mesh("cuda", (size,)), dist.new_group(list(range(size)))
    backend = symmplan.backend(inner="eager", memory="nccl", timeout=60.0, choose="placed")
    pair = []
    for inner, planned in (("aot_eager", False), (backend if compiled else "aot_eager", sharded)):
        model, handle = made(mesh, other, inner, planned=planned)
        pair.append((model, torch.optim.SGD(model.parameters(), lr=0.01)))
    losses = []
    for turn in range(6):
        for model, optimizer in pair:
            if rank == turn % 2:
                torch.cuda._sleep(2_000_000)
            tokens = (torch.arange(TOKENS, device="cuda") * (turn + 3)) % 2048
            loss = model(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    users = sorted(s.users for s in segments_of_plans() if s.users and s.memory != "shm")
    torch.cuda.synchronize()
    dist.barrier()
    if handle is not None:
        handle.remove()
    backend.release()
    return losses, users


@pytest.mark.parametrize(
    ("compiled", "sharded"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_trains_as_without(pool, compiled, sharded):
    for losses, users in pool.run(_trained, compiled, sharded):
        print(losses, users)
        torch.testing.assert_close(losses[::2], losses[1::2], rtol=1e-4, atol=1e-6)
        assert users == [("FSDP2",) * sharded + ("compiled graphs",) * compiled] * (
            sharded or compiled
        )


def _pooled(rank, size):
    """Two backends and a session, without FSDP2: who lies where, and how far results are off."""
    import torch.distributed as dist

    import symmplan

    torch.cuda.set_device(rank)
    torch._dynamo.reset()
    group = dist.group.WORLD.group_name
    ops = torch.ops._c10d_functional

    def program(x):
        return ops.wait_tensor(ops.all_gather_into_tensor(x * 2.0, size, group)).sin() + 1

    options = {"memory": "nccl", "timeout": 60.0, "choose": "placed"}
    backends = [symmplan.backend(inner="eager", **options) for _ in range(2)]
    graphs = [torch.compile(program, backend=b, fullgraph=True, dynamic=False) for b in backends]
    inputs = [torch.randn(rows, 256, device="cuda") for rows in (64, 128, 32)]
    want = [program(x) for x in inputs]
    for graph, x in zip(graphs, inputs, strict=False):
        graph(x)  # the second makes the segment grow
    wrong = 0.0
    with symmplan.eager(**options) as session:
        for turn in range(6):
            if rank == turn % 2:
                torch.cuda._sleep(2_000_000)
            got = [program(inputs[2]).clone()]
            if turn:
                got += [graph(x).clone() for graph, x in zip(graphs, inputs, strict=False)]
            off = [(a - b).abs().max() for a, b in zip(got, [want[2], *want[:2]], strict=False)]
            wrong = max(wrong, *(float(x) for x in off))
            session.step()
            users = [s.users for s in segments_of_plans() if s.users and s.memory != "shm"]
    torch.cuda.synchronize()
    dist.barrier()
    for backend in backends:
        backend.release()
    return wrong, users


def test_backends_and_a_session_lie_in_one_segment(pool):
    for wrong, users in pool.run(_pooled):
        assert wrong == 0.0
        assert users == [("compiled graphs", "eager session")]
