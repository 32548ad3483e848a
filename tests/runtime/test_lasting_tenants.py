"""FSDP2, graphs that save for a backward and a session lie in one segment; the session may fail."""

from __future__ import annotations

import pytest
import torch
from pool_programs import OPTIONS, WIDTH, differ, inputs, late, own, users_of
from ranks import pool_of

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=200.0)


class _Saving(torch.nn.Linear):
    """What it gathers is saved for its backward, in its placement."""

    def __init__(self, group):
        super().__init__(WIDTH, WIDTH)
        self.group = group

    def forward(self, x):
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        y = super().forward(x)
        whole = all_gather_tensor_autograd(y, 0, self.group)
        return y + (whole.sin() * whole.cos())[: len(y)]


def _sharded(rank, size, fails):
    """FSDP2 over a compiled block that saves what it gathers, and a session that fails or not."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import symmplan

    torch._dynamo.reset()
    mesh, group = dist.init_device_mesh("cpu", (size,)), dist.group.WORLD.group_name

    def made(backend):
        torch.manual_seed(0)
        first = torch.compile(_Saving(group), backend=backend, fullgraph=True)
        blocks = [first, *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))]
        return fully_shard(torch.nn.Sequential(*(fully_shard(b, mesh=mesh) for b in blocks)))

    backend = symmplan.backend(inner="eager", **OPTIONS)
    plain, model = made("aot_eager"), made(backend)
    handle = symmplan.fsdp.apply(model, **OPTIONS)
    wrong, seen = [], []

    def step(turn, one):
        x = inputs(turn)[0]
        late(rank, turn)
        loss = one(x).square().mean()
        loss.backward()
        found = [loss.detach(), *(p.grad.to_local().clone() for p in one.parameters())]
        for p in one.parameters():
            p.grad = None
        return found

    def both(turn):
        wrong.extend(differ(step(turn, model), want[turn], turn))
        seen.append(users_of())

    want = [step(turn, plain) for turn in range(12)]
    for turn in range(4):
        both(turn)

    def session():
        with symmplan.eager(**OPTIONS) as session:
            for turn in range(4, 9):
                own(inputs(turn)[0], group)
                if fails and turn == 8 and rank == 1:
                    own(inputs(turn)[0], group)  # once more than planned
                session.step()
                if not fails or turn < 8:  # then one rank is told when it leaves
                    both(turn)

    if fails:
        with pytest.raises(symmplan.errors.SymmplanError):
            session()
    else:
        session()
    for turn in range(9, 12):
        both(turn)
    crossing = backend.stats.crossing_bytes, backend.stats.evacuated
    kept = sum(tenant is not None for tenant in handle._runtime.memory.tenants)
    handle.remove()
    backend.release()
    return wrong, seen, crossing, kept, users_of()


@pytest.mark.further
@pytest.mark.parametrize("fails", [False, True])
def test_what_graphs_save_lies_in_the_segment_of_fsdp2(two, fails):
    for wrong, seen, crossing, kept, left in two.run(_sharded, fails):
        assert wrong == []
        assert kept == 1  # nobody holds on to a session that is over
        assert crossing[0]
        assert crossing[1] == 0
        users = [[users for _, users in held] for held in seen]
        assert users[3] == [["FSDP2", "compiled graphs"]]
        assert users[7] == [["FSDP2", "compiled graphs", "eager session"]]
        assert users[-1] == [["FSDP2", "compiled graphs"]]
        assert left == []
