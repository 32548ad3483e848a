"""After a rank has planned alone, and all were told so, the ranks count their runs alike."""

from __future__ import annotations

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks

three = pool_of(3, timeout=120.0)


def _gather(x, w, group, size):
    ops = torch.ops._c10d_functional
    gathered = ops.all_gather_into_tensor((x @ w).relu(), size, group)
    return ops.wait_tensor(gathered).sin()


def _goes_on(rank, size, late):
    """The error is caught, and the backend is used again, by one rank long before the others."""
    import time

    import torch.distributed as dist

    import symmplan

    torch._dynamo.reset()
    group = dist.group.WORLD.group_name
    backend = symmplan.backend(inner="eager", timeout=300.0)
    compiled = torch.compile(_gather, backend=backend, dynamic=False)
    w = torch.eye(8)
    try:
        compiled(torch.randn(4, 8), w, group, size)
        with pytest.raises(symmplan.errors.AgreementError, match="is planning a new graph"):
            compiled(torch.randn(8 if rank == 1 else 4, 8), w, group, size)
        time.sleep(1.0 if rank in late else 0.0)
        for rows in (64, 64, 32):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x, w, group, size), _gather(x, w, group, size))
        with pytest.raises(symmplan.errors.AgreementError, match="is planning a new graph"):
            compiled(torch.randn(128 if rank == 2 else 64, 8), w, group, size)
    finally:
        dist.barrier()
        backend.release()


@pytest.mark.further
@pytest.mark.parametrize("late", [(1,), (0, 2)])
def test_ranks_that_go_on_after_the_error_count_alike(three, late):
    three.run(_goes_on, late)


def _in_two_groups(rank, size):
    """Rank 0 plans alone for all ranks and for two of them, and is slow to say so."""
    import time

    import torch.distributed as dist

    import symmplan
    from symmplan.memory.meeting.control import Meeting

    torch._dynamo.reset()
    everybody = dist.group.WORLD.group_name
    pair = dist.new_group([0, 1])
    backend = symmplan.backend(inner="eager", timeout=20.0)

    def compiled(*groups):
        def program(x, w):
            return [_gather(x, w, name, of) for name, of in groups]

        graph = torch.compile(program, backend=backend, dynamic=False)

        def run(rows):
            x, w = torch.randn(rows, 8), torch.eye(8)
            torch.testing.assert_close(graph(x, w), program(x, w))

        return run

    names = (everybody, size), (pair.group_name if rank < 2 else "", 2)
    among_all, among_two, both = compiled(names[0]), compiled(names[1]), compiled(*names)
    tell = Meeting.tell

    def tell_slowly(self, progress):
        time.sleep(0.2)
        tell(self, progress)

    try:
        among_all(4)
        if rank < 2:
            among_two(4)
        Meeting.tell = tell_slowly if rank == 0 else tell
        with pytest.raises(Exception, match="rank 0 is planning a new graph"):
            both(8) if rank == 0 else among_all(4)
        Meeting.tell = tell
        for rows in (64, 64, 32):
            if rank < 2:
                among_two(rows)
            among_all(rows)
    finally:
        Meeting.tell = tell
        dist.barrier()
        backend.release()
        if rank < 2:
            dist.destroy_process_group(pair)


@pytest.mark.further
def test_who_is_told_in_one_group_counts_alike_in_the_others(three):
    three.run(_in_two_groups)
