"""What a process does that is forked from a rank: the rank and its peers see nothing of it."""

from __future__ import annotations

import gc
import os
import sys
import time

import pytest
import torch
from memory_plans import hand_made
from ranks import RankPool, pool_of

from symmplan.errors import RunError

pytestmark = pytest.mark.ranks

TIMEOUT = 20.0

pool = pool_of(2, timeout=180.0)  # Inductor compiles C++


def forked(act):
    """What ``act`` raises in a child, and how the child ends."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        text = "nothing"
        try:
            act()
        except BaseException as error:  # noqa: BLE001
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return text


def gather(x, world):
    import torch.distributed as dist

    ops = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    return ops.wait_tensor(ops.all_gather_into_tensor(x, world, name))


# Rank side.


def an_arena(rank, world, what):
    from symmplan.memory import realize
    from symmplan.placed import handle

    def leave():
        with arena:
            sys.exit(3)

    def drop():
        nonlocal arena, segment, x
        arena = segment = x = None
        gc.collect()

    with realize(hand_made({"x": 512}), memory="shm", timeout=TIMEOUT) as arena:
        segment, x = arena.segments["s0"], arena.tensor("x", torch.int64)
        acts = {
            "release": arena.release,
            "leave": leave,
            "drop": drop,
            "barrier": segment.barrier,
            "break": lambda: segment.health.break_(ValueError("in the child")),
            "meeting": next(iter(segment.rendezvous.values())).barrier,
            "handle": lambda: handle(x),
            "op": lambda: torch.ops.symmplan.all_reduce_out(x, "sum", "default", out=x),
            "realize": lambda: realize(hand_made({"x": 64}), memory="shm", timeout=TIMEOUT),
        }
        said = forked(acts[what]) if rank == 0 else ""
        x.fill_(rank + 1)
        if rank == 0:
            time.sleep(0.5)  # its peer waits, and looks whether that is in vain
        for _ in range(3):
            segment.barrier()
            torch.ops.symmplan.all_reduce_out(x, "max", "default", out=x)
        return said, int(x.sum())


def a_session(rank, world, what, when):
    import symmplan

    x = torch.full((4,), float(rank))
    said = ""
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:

        def leave():
            with session_again(session):
                raise ValueError("in the child")

        def program():
            assert float(gather(x, world).sum()) == 4.0

        acts = {
            "release": session.release,
            "leave": leave,
            "step": session.step,
            "call": lambda: gather(x, world),
            "replan": session.replan,
        }
        for turn in range(4):
            program()
            if rank == 0 and turn == when:
                said = forked(acts[what])
            session.step()
    return said


class session_again:  # noqa: N801
    """Leaves a session as its with-block would."""

    def __init__(self, session):
        self._session = session

    def __enter__(self):
        return self._session

    def __exit__(self, *error):
        return self._session.__exit__(*error)


def a_backend(rank, world):
    import symmplan

    backend = symmplan.backend(memory="shm")

    @torch.compile(backend=backend)
    def program(x):
        return gather(x * 2, world).sum()

    x = torch.full((4,), float(rank))
    first = float(program(x))
    said = forked(backend.release) if rank == 0 else ""
    return said, first, float(program(x)), backend.stats.segment_bytes > 0


def alone(rank, world):
    """Memory that no peer has is a child's as much as its parent's."""
    import symmplan

    handles = []

    def child():
        handles.append(placed.barrier())
        arena.release()

    from symmplan.memory import realize

    with realize(hand_made({"x": 64}), memory="local") as arena:
        placed = symmplan.placed.handle(arena.tensor("x"))
        return forked(child)


# Parent side.


@pytest.mark.parametrize("what", ["release", "leave", "drop", "break"])
def test_what_a_child_lets_go_of_stays_with_its_parent(pool, what):
    said = "SystemExit: 3" if what == "leave" else "nothing"
    assert pool.run(an_arena, what) == [(said, 2 * 64), ("", 2 * 64)]


@pytest.mark.parametrize("what", ["barrier", "meeting", "handle", "op", "realize"])
def test_a_child_takes_no_part(pool, what):
    (said, total), other = pool.run(an_arena, what)
    assert said.startswith(RunError.__name__), said
    assert "forked" in said
    assert (total, other) == (2 * 64, ("", 2 * 64))


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("what", ["release", "leave", "step", "call", "replan"])
def test_a_child_of_a_session(pool, what, when):
    said, other = pool.run(a_session, what, when)
    assert other == ""
    if what == "release":
        assert said == "nothing"
    elif what == "leave":
        assert said == "ValueError: in the child"
    else:
        assert said.startswith(RunError.__name__), said
        assert "forked" in said


@pytest.mark.further
def test_a_child_of_a_compiled_program(pool):
    for rank, (said, *rest) in enumerate(pool.run(a_backend)):
        assert said == ("" if rank else "nothing")
        assert rest == [8.0, 8.0, True]


def test_private_memory_is_the_child_s_own():
    with RankPool(1, init=None) as one:
        assert one.run(alone) == ["nothing"]
