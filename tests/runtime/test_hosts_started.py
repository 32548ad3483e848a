"""Collectives over hosts in the form of devices: they are over when they are waited for.

CPU ranks run them. What a device queues on a stream of its own runs here either at once or when it
is waited for, not before: the two ends of what a stream may do.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from host_programs import PROGRAMS
from hosts import hosts_pool, needs_hosts
from hypothesis import given
from hypothesis import strategies as st
from one_sided_programs import one_sided_programs
from test_right_numbers import MANY, PAUSES, SEEDS, _check, _compiled, _eager, _setup

pytestmark = needs_hosts()
F = torch.ops._c10d_functional


class _Later(dist.Work):
    """Work that nobody does before somebody waits for it."""

    def __init__(self, run):
        super().__init__()
        self._run = run

    def wait(self, timeout=None):
        run, self._run = self._run, None
        if run is not None:
            run()
        return True

    def is_completed(self):
        return self._run is None


def _as_devices(rank, size, when):
    """Use the rows of devices in shared memory."""
    from symmplan.memory.ops import started
    from symmplan.place import algorithms

    def beside(run, device, which, *kept):
        return _Later(run) if when == "late" else run()

    rows = property(lambda self: {**self.table, **algorithms._STARTED})
    algorithms.Lowerings.over_hosts = rows
    started.beside = beside
    _setup(rank, size)


pool = hosts_pool((2, 2), setup=functools.partial(_as_devices, when="late"), timeout=180.0)
at_once = hosts_pool((2, 2), setup=functools.partial(_as_devices, when="at once"), timeout=180.0)


@pytest.mark.all_cases
@pytest.mark.parametrize("integration", ["compile", "eager"])
def test_programs_run_in_two_levels(pool, integration):
    first, *others = pool.run(PROGRAMS[integration])
    assert all(other == first for other in others)
    assert not first["wrong"]
    assert first["placed"] > 0
    assert first["rendezvous"] == 1


def _overlapped(rank, size, inner):
    """Iterations in which tensors are reused as soon as a collective has started, or ended."""
    import symmplan

    group = dist.group.WORLD.group_name

    def program(x, y):
        gathered = F.all_gather_into_tensor(x * 2, size, group)
        scattered = F.reduce_scatter_tensor(y + 1, "sum", size, group)
        between = (x * 3).relu() @ x.T  # may take the memory of what was given
        reduced = F.all_reduce(between, "sum", group)
        again = (y - 1).relu() + y
        gathered, scattered = F.wait_tensor(gathered), F.wait_tensor(scattered)
        second = F.wait_tensor(F.all_gather_into_tensor(scattered, size, group))
        return gathered + 1, second * 2, F.wait_tensor(reduced) + 3, again

    torch._dynamo.reset()
    backend = symmplan.backend(inner=inner, choose="placed", timeout=60.0)
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    wrong = []
    for step in range(5):
        chance = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randint(-4, 5, (4, 8), generator=chance).float()
        y = torch.randint(-4, 5, (4 * size, 8), generator=chance).float()
        pairs = zip(compiled(x, y), program(x, y), strict=True)
        wrong += [(step, i) for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    placed = backend.stats.placed
    backend.release()
    return wrong, placed


@pytest.mark.further
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_what_was_given_is_free_only_when_a_collective_has_read_it(pool, inner):
    for wrong, placed in pool.run(_overlapped, inner):
        assert not wrong
        assert placed >= 4


def _called(rank, size, asynchronous):
    """Calls of ``torch.distributed`` whose works the program waits for in another order."""
    import symmplan

    wrong = []
    with symmplan.eager(choose="placed", timeout=60.0) as session:
        for step in range(5):
            mine = torch.full((4, 8), float(rank + step))
            whole, part = torch.empty(4 * size, 8), torch.empty(2, 8)
            whole.fill_(-1.0)  # what is made for a collective alone would lie in its placement
            given = torch.arange(16.0 * size).view(2 * size, 8) * (rank + 1) + step
            total = torch.full((8, 8), float(rank * step))
            works = [
                dist.all_gather_into_tensor(whole, mine, async_op=asynchronous),
                dist.reduce_scatter_tensor(part, given, async_op=asynchronous),
                dist.all_reduce(total, async_op=asynchronous),
            ]
            if asynchronous and step and bool((whole != -1).any()):
                wrong.append((step, "over before it was waited for"))
            for work in works[1:] + works[:1]:
                if work is not None:
                    work.wait()
            every = range(size)
            sums = sum(torch.arange(16.0 * size).view(2 * size, 8) * (r + 1) + step for r in every)
            wants = (
                torch.cat([torch.full((4, 8), float(r + step)) for r in every]),
                sums[2 * rank : 2 * rank + 2],
                torch.full((8, 8), float(sum(r * step for r in every))),
            )
            pairs = zip((whole, part, total), wants, strict=True)
            wrong += [(step, i) for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
            del mine, whole, part, given, total, works
            session.step()
        return wrong, session.stats.served


@pytest.mark.long
@pytest.mark.all_cases
@pytest.mark.parametrize("asynchronous", [False, True])
def test_calls_of_a_session_end_where_the_program_waits(pool, asynchronous):
    for wrong, served in pool.run(_called, asynchronous):
        assert not wrong
        assert served == 4 * 3


def _random_eager(ranks, data):
    program = data.draw(one_sided_programs(4))
    _check(ranks, _eager, program, "auto", data.draw(PAUSES), data.draw(SEEDS))


def _random_compiled(ranks, data):
    program = data.draw(one_sided_programs(4, in_place=False))
    _check(ranks, _compiled, program, "auto", data.draw(PAUSES), data.draw(SEEDS))


@pytest.mark.further
@MANY
@given(data=st.data())
def test_random_eager_programs(pool, data):
    _random_eager(pool, data)


@pytest.mark.further
@MANY
@given(data=st.data())
def test_random_eager_programs_whose_work_is_done_at_once(at_once, data):
    _random_eager(at_once, data)


@pytest.mark.further
@MANY
@given(data=st.data())
def test_random_compiled_programs(pool, data):
    _random_compiled(pool, data)


@pytest.mark.further
@MANY
@given(data=st.data())
def test_random_compiled_programs_whose_work_is_done_at_once(at_once, data):
    _random_compiled(at_once, data)
