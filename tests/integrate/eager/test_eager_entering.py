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


def _of_one_graph(rank, world_size, kind):
    """Functions of one graph in a session: compiled before it, in it, and called in backward."""
    import torch.distributed as dist
    from torch.utils.checkpoint import checkpoint

    import symmplan

    def grown(x):
        return torch.nn.functional.gelu(x) * 2

    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounter()
    before, within = (torch.compile(grown, backend=count, fullgraph=True) for _ in range(2))
    before(torch.ones(4, 8))
    compiled, stances = [count.frame_count], []
    if kind == "a stance of the program":
        torch.compiler.set_stance("eager_on_recompile")
    with symmplan.eager(memory="shm", timeout=20.0) as session:
        for turn in range(TURNS):
            x = torch.full((4, 8), float(rank + turn), requires_grad=True)
            y = checkpoint(within, before(x), use_reentrant=False)
            y.sum().backward()
            total = x.grad + 1
            dist.all_reduce(total)
            plain = [torch.full((4, 8), float(r + turn), requires_grad=True) for r in range(2)]
            torch.stack([grown(grown(p)) for p in plain]).sum().backward()
            assert torch.allclose(total, plain[0].grad + plain[1].grad + 2), turn
            if turn == 0 and kind == "set meanwhile":
                torch.compiler.set_stance("eager_on_recompile")
            session.step()
            compiled.append(count.frame_count)
            stances.append(torch._dynamo.eval_frame._stance.stance)
    torch.compiler.set_stance("default")
    return session.stats.served, compiled, stances


@pytest.mark.parametrize(
    ("kind", "stance"),
    [
        ("", "default"),
        ("a stance of the program", "eager_on_recompile"),
        ("set meanwhile", "eager_on_recompile"),
    ],
)
@pytest.mark.all_cases
def test_functions_that_are_compiled_as_one_graph_run_op_by_op_while_recorded(two, kind, stance):
    for served, compiled, stances in two.run(_of_one_graph, kind):
        assert served == TURNS - 1
        assert compiled[:2] == [1, 1]
        assert stances == [stance] * TURNS
        assert (compiled[-1] > 1) == (stance == "default")


def _calling(rank, world_size, fullgraph):
    """Calls that the session plans, in a compiled function: in both forms, beside FSDP2's hooks."""
    import logging

    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    import symmplan

    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("symmplan").addHandler(handler)

    def program(x):
        total = x * 2
        dist.all_reduce(total)
        return functional.all_gather_tensor(total + x, 0, dist.group.WORLD)

    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounter()
    compiled, frames = torch.compile(program, backend=count, fullgraph=fullgraph), []
    with symmplan.eager(memory="shm", timeout=20.0) as session:
        for turn in range(TURNS):
            x = torch.full((4, 8), float(rank + turn))
            got = compiled(x)
            parts = [torch.full((4, 8), 4.0 * turn + 2 + r + turn) for r in range(world_size)]
            assert torch.equal(got, torch.cat(parts)), turn
            session.step()
            frames.append(count.frame_count)
    if not fullgraph:
        compiled(x)
    logging.getLogger("symmplan").removeHandler(handler)
    return session.stats.served, frames, count.frame_count, told


@pytest.mark.parametrize("fullgraph", [False, True])
def test_calls_in_compiled_functions_are_planned_and_those_run_op_by_op(two, fullgraph):
    for served, frames, last, told in two.run(_calling, fullgraph):
        assert served == 2 * (TURNS - 1)
        assert frames == [0] * TURNS
        assert fullgraph or last > 0
        assert len([text for text in told if "run op by op until it ends" in text]) == 1


class _Block(torch.nn.Module):
    """What Dynamo compiles, as it does no module of torch's own."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))


def _hooked(rank, world_size):
    """FSDP2 gathers for a compiled model, in what Dynamo is told to leave out."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import symmplan

    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounter()
    model = torch.nn.Sequential(*(_Block() for _ in range(2)))
    for module in (*model, model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (world_size,)))
    compiled = torch.compile(model, backend=count)
    with symmplan.eager(memory="shm", timeout=20.0) as session:
        for turn in range(TURNS):
            compiled(torch.full((4, 8), float(rank + turn))).sum().backward()
            session.step()
    return session.stats.served > 0, count.frame_count > 0


def test_what_compilers_leave_out_makes_no_calls_in_compiled_functions(two):
    assert two.run(_hooked) == [(True, True)] * 2


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
