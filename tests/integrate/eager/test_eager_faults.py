"""One rank diverges from the plan of an eager session: an error on every rank, in time."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from ranks import RankPool

pytestmark = pytest.mark.ranks

TIMEOUT = 10.0


@pytest.fixture
def pool():
    with RankPool(2, timeout=90.0) as ranks:
        yield ranks


def _gather(x, world=2):
    import torch.distributed as dist

    ops = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    return ops.wait_tensor(ops.all_gather_into_tensor(x, world, name))


def _reduce(x):
    import torch.distributed as dist

    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", dist.group.WORLD.group_name))


def _program(x, fault="", kept=None, world=2):
    """Gather, sum up, gather again in the bytes of the first."""
    y = _gather(x[:2] if fault == "shape" else x, world)
    if fault == "keep":
        kept.append(y)
    if fault == "extra":
        _gather(x)
    if fault == "dtype":
        x = x.double()
    z = y.sum() + x
    del y
    if fault == "less":
        return z
    w = _reduce(z) if fault != "other" else _gather(z)
    del z
    return _gather(w, world).sum()


def _run(rank, world_size, fault, who, when):
    import symmplan

    kept = []
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    expected = _program(x)
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:
        for turn in range(4):
            mine = fault if rank == who and turn == when else ""
            got = _program(x, mine, kept)
            assert mine or torch.allclose(got, expected), "a wrong number"
            session.step()


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("fault", ["shape", "extra", "dtype", "less", "other"])
def test_a_rank_that_diverges_ends_in_an_error_on_all(pool, fault, who, when):
    outcomes = pool.outcomes(_run, fault, who, when)
    for outcome in outcomes:
        assert outcome.error is not None, outcome
        assert "SymmplanError" in outcome.error.kinds, outcome.error.traceback
        assert outcome.error.kind != "PeerTimeoutError", "it waited in vain"
        assert outcome.error.fields["op"], outcome.error.text
        assert f"rank {who}" in outcome.error.text or "ranks 0 and 1" in outcome.error.text
        if when:
            assert outcome.error.fields["buffer"] or fault == "extra", outcome.error.text


@pytest.mark.parametrize("who", [0, 1])
def test_a_kept_tensor_is_found_before_its_bytes_change(pool, who):
    outcomes = pool.outcomes(_run, "keep", who, 2)
    for outcome in outcomes:
        assert outcome.error is not None, outcome
        assert outcome.error.kind == "RunError", outcome.error.traceback
        assert f"rank {who}" in outcome.error.text
        assert "still held" in outcome.error.text
        assert outcome.error.fields["buffer"] == "all_gather_into_tensor"
        assert outcome.error.fields["op"]


def _raises(rank, world_size, when):
    import symmplan

    x = torch.ones(4, 8)
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:
        for turn in range(4):
            if rank == 1 and turn == when:
                raise ZeroDivisionError("a fault of the program")
            _program(x)
            session.step()


@pytest.mark.parametrize("when", [0, 2])
def test_a_rank_whose_program_raises(pool, when):
    first, second = pool.outcomes(_raises, when)
    assert second.error.kind == "ZeroDivisionError"
    assert "a fault of the program" in first.error.text
    assert "rank 1" in first.error.text


def _replans(rank, world_size):
    import symmplan
    from symmplan.errors import RunError

    x = torch.ones(4, 8)
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:
        for _ in range(2):
            _program(x)
            session.step()
        before = session.plan.fingerprint
        with pytest.raises(RunError, match="other arguments"):
            _program(x[:2])
        with pytest.raises(RunError):
            session.step()
        session.replan()
        for _ in range(3):
            expected = _program(x[:2])
            session.step()
        assert session.plan.fingerprint != before
        assert session.stats.rendezvous == 2
        return float(expected)


def test_replan(pool):
    first, second = pool.run(_replans)
    assert first == second


def _leaves(rank, world_size):
    import symmplan
    from symmplan.errors import ReleasedError, SessionError, SymmplanError

    x = torch.ones(4, 8)
    session = symmplan.eager(timeout=TIMEOUT, memory="shm")
    for act in (session.step, session.replan):
        with pytest.raises(SessionError, match="not open: the session was used before it was"):
            act()
    with pytest.raises(SymmplanError, match=r"fix: call the op inside `with symmplan\.eager"):
        symmplan.placed.handle(x)
    with session:
        for _ in range(2):
            _program(x)
            session.step()
        held = _gather(x)
    for act in (session.step, session.replan, session.__enter__):
        with pytest.raises(ReleasedError, match="not open: the session was used after it was"):
            act()
    with pytest.raises(SymmplanError, match="no live segment"):
        symmplan.placed.handle(held)
    inside = "asleep check choices copies plan planned release replan sleep stats step wake"
    assert " ".join(n for n in dir(session) if not n.startswith("_")) == inside
    assert bool((held == 1).all())
    assert _gather(x).shape == (8, 8)
    del held
    gc.collect()
    torch.distributed.destroy_process_group()
    return True


def test_use_after_leaving(pool, shared_memory_is_left_clean):
    assert pool.run(_leaves) == [True, True]


def _dies(rank, world_size):
    import os

    import symmplan

    x = torch.ones(4, 8)
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:
        for turn in range(4):
            if rank == 1 and turn == 2:
                os._exit(3)
            _program(x)
            session.step()


def test_a_rank_that_dies(pool, shared_memory_is_left_clean):
    first, second = pool.outcomes(_dies)
    assert second.exitcode == 3
    assert first.error.kind == "PeerLostError"


#: What is passed in place of a tensor: looks the same, has another address or other strides.
ANOTHER = {"copy": torch.clone, "transposed": torch.t}


def _another_tensor(rank, world_size, who, another):
    """Rank ``who`` makes a tensor in its placement, and passes another one that looks the same."""
    import torch.distributed as dist

    import symmplan

    x = torch.ones(8, 8)
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:
        for turn in range(4):
            y = symmplan.placed.out(torch.mul, x, turn + 1.0)
            dist.all_reduce(ANOTHER[another](y) if rank == who and turn == 2 else y)
            assert bool((y == 2.0 * (turn + 1)).all()), "a wrong number"
            del y
            session.step()


@pytest.mark.further
@pytest.mark.parametrize(("who", "another"), [(0, "copy"), (1, "copy"), (1, "transposed")])
def test_another_tensor_than_that_which_was_made_in_its_placement(pool, who, another):
    for outcome in pool.outcomes(_another_tensor, who, another):
        assert outcome.error is not None, outcome
        assert outcome.error.kind == "RunError", outcome.error.traceback
        assert "argument 'input' is not the tensor of the recorded iteration" in outcome.error.text
        assert outcome.error.fields.get("failed_rank", outcome.rank) == who
        assert outcome.error.fields["buffer"]


def _waits_elsewhere(rank, world_size, leaves):
    """The last rank diverges while the others are where nothing of symmplan's can look around."""
    import torch.distributed as dist

    import symmplan
    from symmplan.errors import RunError
    from symmplan.torch_private.c10d import group_store

    store, x, last = group_store(dist.group.WORLD), torch.ones(4, 8), world_size - 1
    with symmplan.eager(timeout=60.0, memory="shm") as session:
        for turn in range(4):
            if turn == 2 and rank != last:
                time.sleep(1.0 + rank)
            try:
                _program(x, "shape" if rank == last and turn == 2 else "", world=world_size)
            except RunError:
                store.set(f"test/heard/{rank}", "1")
                if rank == last and not leaves:  # it stays: its peers hear of it all the same
                    store.wait([f"test/heard/{r}" for r in range(last)])
                raise
            session.step()


@pytest.mark.further
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_waits_elsewhere_hears_of_it_in_its_next_call(ranks, leaves):
    with RankPool(ranks, timeout=45.0) as pool:  # less than their patience
        outcomes = pool.outcomes(_waits_elsewhere, leaves)
    for outcome in outcomes:
        assert outcome.error is not None, outcome
        assert outcome.error.kind == "RunError", outcome.error.traceback
        assert f"rank {ranks - 1}: call 0, " in outcome.error.text
        assert outcome.error.fields["op"]
        assert outcome.error.fields["buffer"]


def _goes_on_after(rank, world_size):
    """A failure that the program catches at once is not raised again later."""
    import symmplan
    from symmplan.errors import RunError

    x = torch.ones(4, 8)
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:
        for _ in range(2):
            _program(x)
            session.step()
        with pytest.raises(RunError):
            _program(x[:2])
        session.replan()
        for _ in range(3):
            _program(x)
            session.step()
            time.sleep(2.0)
        return session.stats.rendezvous


@pytest.mark.further
def test_a_failure_that_was_caught_is_over(pool):
    assert pool.run(_goes_on_after) == [2, 2]


def _caught(rank, world_size, when, who):
    """Rank ``who`` makes another call; whoever hears of it catches that and leaves the session."""
    import symmplan
    from symmplan.errors import SymmplanError

    x, heard = torch.ones(4, 8), []
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:
        for turn in range(4):
            time.sleep(0.1 * (turn == when and rank != who))
            try:
                _program(x, "shape" if rank == who and turn == when else "")
                session.step()
            except SymmplanError as error:
                heard.append((turn, type(error).__name__))
                break
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:  # what was caught is over
        for _ in range(2):
            _program(x)
            session.step()
    return heard


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("who", [0, 1])
def test_an_error_that_was_caught_is_not_raised_again(pool, when, who):
    kind = "RunError" if when else "AgreementError"
    assert pool.run(_caught, when, who) == [[(when, kind)]] * 2


def _not_heard_of(rank, world_size):
    """Rank 1 catches its error and leaves; rank 0 makes no other call before it leaves, too."""
    import symmplan
    from symmplan.errors import RunError

    x = torch.ones(4, 8)
    with symmplan.eager(timeout=TIMEOUT, memory="shm") as session:
        for _ in range(2):
            _program(x)
            session.step()
        if rank == 1:
            with pytest.raises(RunError, match="other arguments"):
                _program(x[:2])


def test_an_error_that_nobody_has_heard_of_is_raised_at_the_end(pool):
    first, second = pool.outcomes(_not_heard_of)
    assert second.ok, second.describe()
    assert first.error is not None
    assert first.error.kind == "RunError", first.error.traceback
    assert "rank 1: call 0, " in first.error.text
    assert first.error.fields["op"]


def _raise(fault):
    if fault == "raise":
        raise ZeroDivisionError("a fault of the program")


def _waits_in_a_collective(rank, world_size, fault, ahead):
    """The last rank diverges while the others wait in the process group's own collectives."""
    import datetime as dt

    import torch.distributed as dist

    import symmplan
    from symmplan.errors import SymmplanError

    x, kept, started = torch.ones(16), [], []
    group = dist.new_group(timeout=dt.timedelta(seconds=4))

    def wait():
        work, y, z, i = started.pop(0)
        work.wait()
        assert bool((y == world_size * (i + 1)).all()), "a wrong number"
        z = torch.ops._c10d_functional.wait_tensor(z)
        assert float(z.sum()) == 16 * world_size * (i + 1), "a wrong number"

    def iteration(mine):
        for i in range(4):
            y = symmplan.placed.out(torch.mul, x, i + 1.0)
            if i == 1:
                _raise(mine)
            work = dist.all_reduce(y[:4] if mine == "shape" else y, async_op=True, group=group)
            z = torch.ops._c10d_functional.all_gather_into_tensor(
                x + i, world_size, group.group_name
            )
            started.append((work, y, z, i))
            kept.extend([y] if mine == "keep" and i == 0 else [])
            del work, y, z
            if i >= ahead:
                wait()
        while started:
            wait()

    try:
        with symmplan.eager(
            group, timeout=TIMEOUT, memory="shm", collectives="process group"
        ) as session:
            for turn in range(4):
                iteration(fault if rank == world_size - 1 and turn == 2 else "")
                session.step()
    except (SymmplanError, ZeroDivisionError):
        for tensor in kept:
            assert bool((tensor == world_size).all()), "a byte that was kept has changed"
        time.sleep(6.0)  # its peers hear of it from nobody else: its process lives on
        raise


@pytest.mark.further
@pytest.mark.parametrize(
    ("fault", "ranks", "ahead"),
    [("shape", 2, 0), ("raise", 2, 0), ("keep", 2, 3), ("shape", 3, 0)],
)
def test_the_process_groups_own_timeout_ends_a_wait_in_its_collective(fault, ranks, ahead):
    with RankPool(ranks, timeout=55.0) as pool:
        *peers, last = pool.outcomes(_waits_in_a_collective, fault, ahead)
    for outcome in (*peers, last):
        assert outcome.error is not None, outcome.describe()
        assert "a wrong number" not in outcome.error.text, outcome.error.traceback
    for outcome in peers:
        said = (f"rank {ranks - 1}", "imed out", "imeout")
        assert any(words in outcome.error.text for words in said), outcome.error.traceback
    if fault == "raise":
        assert "a fault of the program" in last.error.text, last.error.traceback
        return
    assert last.error.kind == "RunError", last.error.traceback
    assert f"rank {ranks - 1}" in last.error.text
    assert last.error.fields["op"]
    assert last.error.fields["buffer"]
