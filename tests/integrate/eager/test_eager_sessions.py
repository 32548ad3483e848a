"""Sessions after sessions: what failed in one is over, and nothing of it stays in the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from paths import HELPERS
from ranks import pool_of

pytestmark = pytest.mark.ranks

TIMEOUT = 20.0


pool = pool_of(2, 3, timeout=100.0)
two = pool_of(2, timeout=100.0)


def gather(x, group=None):
    import torch.distributed as dist

    ops = torch.ops._c10d_functional
    group = dist.group.WORLD if group is None else group
    return ops.wait_tensor(ops.all_gather_into_tensor(x, group.size(), group.group_name))


def program(x):
    return gather(gather(x).sum() + x).sum()


def another_group():
    import torch.distributed as dist

    return dist.new_group(list(range(dist.get_world_size())))


# Rank side.


def fails(rank, world, how, who, when):
    """A session in which rank ``who`` fails in iteration ``when``; the others hear of it."""
    import symmplan
    from symmplan.runtime import prepare

    other = another_group() if how == "planning" else None
    planned = prepare.plan_problem

    def broken(*_, **__):
        raise ZeroDivisionError("the old fault")

    x = torch.ones(4, 8)
    patience = 2.0 if how == "late" else TIMEOUT
    try:
        with symmplan.eager(timeout=patience, memory="shm") as session:
            for turn in range(3):
                now = rank == who and turn == when
                if now and how == "at once":
                    broken()
                gather(x)
                if other is not None:
                    gather(x, other)
                if now and how == "inside":
                    broken()
                if now and how == "late":
                    time.sleep(3 * patience)
                if now and how == "planning":
                    prepare.plan_problem = broken
                gather(x[:2] if now and how == "shape" else x)
                session.step()
    finally:
        prepare.plan_problem = planned


def session_again(rank, world):
    import symmplan

    x = torch.ones(4, 8)
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:
        for _ in range(3):
            got = program(x)
            session.step()
        assert session.stats.served == 4
    return float(got)


def session_of_two_groups(rank, world):
    import symmplan

    x, other = torch.ones(4, 8), another_group()
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:
        for _ in range(3):
            got = program(x) + gather(x, other).sum() * 0
            session.step()
    return float(got)


def backend_again(rank, world):
    import symmplan

    compiled = torch.compile(backend=symmplan.backend(memory="shm", timeout=TIMEOUT))(program)
    return float(compiled(torch.ones(4, 8)))


def caught(rank, world):
    """The failure is caught inside the session, and the session planned again."""
    import symmplan
    from symmplan.errors import SymmplanError
    from symmplan.runtime import prepare

    planned = prepare.plan_problem

    def broken(*_, **__):
        raise ZeroDivisionError("the old fault")

    x, kinds = torch.ones(4, 8), []
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:
        program(x)
        prepare.plan_problem = broken if rank == 1 else planned
        try:
            session.step()
        except (SymmplanError, ZeroDivisionError) as error:
            kinds.append(type(error).__name__)
        prepare.plan_problem = planned
        session.replan()
        for _ in range(3):
            got = program(x)
            session.step()
    return kinds, float(got)


def apart(rank, world, outside):
    """One rank is in a session that the other has not entered."""
    import symmplan
    from symmplan.memory import realize

    if rank == outside:
        from memory_plans import hand_made

        realize(hand_made({"x": 64}), memory="shm", timeout=60.0)
    else:
        with symmplan.eager(timeout=60.0, memory="shm"):
            gather(torch.ones(8))


def one_less(rank, world):
    """Rank 1 comes to a session when the other has given it up and made the next; both try on."""
    import torch.distributed as dist

    import symmplan
    from symmplan.errors import SymmplanError
    from symmplan.torch_private import c10d

    store = c10d.group_store(dist.group.WORLD)
    x, said = torch.ones(4, 8), []
    if rank == 0:
        with pytest.raises(SymmplanError), symmplan.eager(timeout=0.5, memory="shm"):
            gather(x)
        store.set("test/given up", "1")
    store.wait(["test/given up"])
    while len(said) < 3:
        try:
            return said, session_again(rank, world)
        except SymmplanError as error:  # noqa: PERF203
            said.append(str(error))
    raise AssertionError(said)


def remains(rank, world, how):
    """What is left of a session: the object, threads."""
    import torch.distributed as dist

    import symmplan

    def run():
        x = torch.ones(4, 8)
        session = symmplan.eager(timeout=TIMEOUT, memory="shm")
        if how == "never entered":
            return weakref.ref(session)
        try:
            with session:
                for turn in range(4):
                    gather(x)
                    dist.all_reduce(x)
                    y = symmplan.placed.out(torch.mul, x, 0.5)
                    dist.all_reduce(y, async_op=True).wait()
                    del y
                    if how == "raises" and turn == 2:
                        raise ZeroDivisionError  # noqa: TRY301
                    if how == "recording":
                        break
                    session.step()
                    if how == "replanned" and turn == 1:
                        session.replan()
        except ZeroDivisionError:
            pass
        return weakref.ref(session)

    run()
    gc.collect()
    before = threading.active_count()
    gone = [run() for _ in range(3)]
    gc.collect()
    gather(torch.ones(4, 8))  # and what was caught is not any more
    return [s() for s in gone], threading.active_count() - before


# Parent side.


@pytest.mark.further
@pytest.mark.parametrize(
    ("how", "who", "when"),
    [
        ("at once", 1, 0),
        ("inside", 0, 0),
        ("inside", 1, 0),
        ("inside", 1, 2),
        ("shape", 1, 0),
        ("shape", 1, 2),
        ("planning", 1, 0),
        ("late", 1, 0),
    ],
)
def test_a_session_after_one_that_failed(pool, how, who, when):
    for outcome in pool.outcomes(fails, how, who, when):
        assert outcome.error is not None, outcome.describe()
        if how not in ("shape", "late"):
            assert "the old fault" in outcome.error.text, outcome.describe()
    total = 64.0 * pool.world_size * (16 * pool.world_size + 0.5)
    assert pool.run(session_again) == [total] * pool.world_size
    assert pool.run(backend_again) == [total] * pool.world_size
    if how == "planning":
        assert pool.run(session_of_two_groups) == [total] * pool.world_size


def test_a_session_that_is_planned_again(pool):
    expected = pool.run(session_again)
    for rank, (kinds, total) in enumerate(pool.run(caught)):
        # Rank 1 fails, and tells the others where they get their memory.
        first = "ZeroDivisionError" if rank == 1 else "RunError"
        assert kinds[0] == first
        assert total == expected[rank]


@pytest.mark.parametrize("outside", [0, 1])
def test_a_rank_that_is_in_no_session(two, outside):
    for outcome in two.outcomes(apart, outside, timeout=50.0):  # less than their patience
        assert outcome.error is not None, outcome.describe()
        assert outcome.error.kind == "AgreementError", outcome.describe()
        assert f"rank {1 - outside} has entered an eager session" in outcome.error.text
    assert len(set(two.run(session_again))) == 1


@pytest.mark.further
def test_a_rank_that_made_one_session_less(two):
    (first, total), (second, other) = two.run(one_less)
    assert first == []
    assert len(second) == 1
    assert "rank 1 did not come: rank 0 waited 0.5 s in 'options'" in second[0]
    assert total == other


@pytest.mark.further
@pytest.mark.parametrize("how", ["well", "never entered", "recording", "raises", "replanned"])
def test_nothing_of_a_session_stays(two, how):
    assert two.run(remains, how) == [([None] * 3, 0)] * 2


@pytest.mark.further
@pytest.mark.parametrize("how", ["never entered", "recorded", "planned", "raises", "raises in it"])
def test_the_interpreter_ends_well(how, tmp_path):
    """A thread that is in a store's C++ code while the interpreter ends aborts the process."""
    script = HELPERS / "ending_programs.py"
    times = int(os.environ.get("SYMMPLAN_ENDINGS", "1"))
    done = subprocess.run(
        [sys.executable, str(script), how, str(times), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60.0 + 20.0 * times,
        check=True,
    )
    lines = sorted(done.stdout.splitlines())
    code = 1 if how.startswith("raises") else 0
    assert lines == [f"exit {code}"] * times * 2 + ["threads []"] * times * 2, done.stderr


_IMPORTS = """
import gc, weakref
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import symmplan.torch_private.c10d
import torch._dynamo, torch.distributed.fsdp
from torch.distributed.nn import functional
assert functional.all_reduce(torch.ones(2)).tolist() == [1, 1]
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
gc.collect()
print(group())
"""

_LEAVES = """
import atexit, gc, weakref
atexit.register(lambda: print(group()))  # runs after what symmplan registers
import torch, torch.distributed as dist
gc.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import symmplan
ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
def program():
    with symmplan.eager(memory="shm", choose="placed") as session:
        for _ in range(2):
            ops.wait_tensor(ops.all_gather_into_tensor(torch.ones(8), 1, name))
            session.step()
program()
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
"""


@pytest.mark.further
@pytest.mark.parametrize("script", [_IMPORTS, _LEAVES], ids=["imports", "sessions"])
def test_nothing_holds_the_default_group_when_the_interpreter_ends(script):
    """Its threads would run meanwhile, and abort the process now and then."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "None\n", done.stderr
