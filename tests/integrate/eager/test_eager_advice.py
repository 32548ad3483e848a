"""What sessions advise against copies can be done by who is told, and avoids the copy."""

from __future__ import annotations

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks

two = pool_of(2, timeout=120.0)

F = torch.ops._c10d_functional


def _sum(x, group):
    return F.wait_tensor(F.all_reduce(x, "sum", group)).sum()


def _advised(rank, world_size):
    """Copies of what the program makes, of what a module makes, and of what backward makes."""
    import torch.distributed as dist

    import symmplan
    from symmplan.errors import RunError

    group = dist.group.WORLD.group_name
    layer = torch.nn.Linear(8, 8)
    weight = torch.ones(8, 8, requires_grad=True)

    def by_module(x):
        with torch.no_grad():
            return _sum(layer(x), group)

    def by_program(x):
        return _sum(torch.mm(x, x), group)

    def by_backward(x):
        (grad,) = torch.autograd.grad((x @ weight).square().sum(), [weight])
        return _sum(grad, group)

    found = {}
    for program in (by_module, by_program, by_backward):
        session = symmplan.eager(timeout=30.0, choose="placed", memory="shm")
        assert not session.planned
        with pytest.raises(RunError, match="before there is a plan") as caught:
            _ = session.plan
        assert "session.planned" in caught.value.fix
        with session:
            for turn in range(2):
                program(torch.full((8, 8), float(turn)))
                session.step()
            assert session.planned
            (copy,) = [c for c in session.copies if c.where == "input"]
            found[program.__name__] = copy.fix
            assert copy.line.partition(":")[0] == __file__
        assert session.planned
        session.plan.verify()
    backend = symmplan.backend("eager", "shm", choose="placed", timeout=30.0)
    compiled = torch.compile(by_module, backend=backend, fullgraph=True)
    compiled(torch.ones(8, 8))
    found["compiled"] = backend.stats.staged
    backend.release()
    return found


@pytest.mark.further
def test_advice_is_what_its_reader_can_do(two):
    first, second = two.run(_advised)
    assert first == second
    assert first["by_program"] == "write symmplan.placed.out(torch.mm, ...) where it is made"
    for name in ("by_module", "by_backward"):
        assert first[name].startswith("code of torch makes it there: compile that with this call")
    assert first["compiled"] == 0
