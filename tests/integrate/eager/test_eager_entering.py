"""Entry points of sessions: in compiled functions, and in several threads at a time."""

from __future__ import annotations

import threading

import pytest
import torch
from ranks import pool_of

pytestmark = pytest.mark.ranks

TURNS = 4

two = pool_of(2, timeout=100.0)


def _stepped(rank, world_size, backend):
    """The compiled function itself ends the iteration."""
    import torch.distributed as dist

    import symmplan

    def program(x):
        total = x + 1
        dist.all_reduce(total)
        session.step()
        return total

    torch._dynamo.reset()
    with symmplan.eager(memory="shm", timeout=20.0) as session:
        compiled = torch.compile(program, backend=backend)
        for turn in range(TURNS):
            got = compiled(torch.ones(4, 8) * (rank + turn))
            assert torch.equal(got, torch.ones(4, 8) * (2 * turn + 3)), turn
    # Nothing of the session's stays: what is compiled afterwards is compiled.
    count = torch._dynamo.testing.CompileCounter()
    torch.compile(lambda x: x + 1, backend=count)(torch.ones(2))
    return session.stats.served, count.frame_count


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_may_end_an_iteration(two, backend):
    assert two.run(_stepped, backend) == [(TURNS - 1, 1)] * 2


def _entered(rank, world_size):
    """Threads enter sessions at once: one of them may."""
    import symmplan
    from symmplan.errors import SessionError

    wins = []
    for _ in range(20):
        sessions = [symmplan.eager(memory="shm", timeout=20.0) for _ in range(4)]
        ready, outcomes = threading.Barrier(len(sessions)), []

        def enter(session, ready=ready, outcomes=outcomes):
            ready.wait()
            try:
                session.__enter__()
            except SessionError as error:
                outcomes.append(error.what)
                ready.wait()
            else:
                outcomes.append("entered")
                ready.wait()
                session.release()

        threads = [threading.Thread(target=enter, args=(session,)) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wins.append(outcomes.count("entered"))
        assert set(outcomes) == {"entered", "two eager sessions at a time"}
    return wins


def test_of_threads_that_enter_at_once_one_may(two):
    assert two.run(_entered) == [[1] * 20] * 2
