"""``debug=True`` in shared memory: races end in an error that names both accesses."""

from __future__ import annotations

import contextlib
import mmap
import time
from datetime import timedelta

import numpy as np
import pytest
import race_programs
import torch
from hypothesis import given
from hypothesis import strategies as st
from race_programs import PROGRAMS
from ranks import RankPool, pool_of

from symmplan.memory.race_log import OPEN, Extent, RaceLog, log_nbytes
from symmplan.model import Access, Buffer, Operation

pytestmark = pytest.mark.ranks

_TURNS = 4


def _seed(rank, world_size):
    race_programs.seed()


pool = pool_of(3, setup=_seed, timeout=40.0)


def _group(rank, world_size, name):
    """A new group for each program: a session that fails aborts its own."""
    import torch.distributed as dist

    _, ranks, process_group, _ = PROGRAMS[name]
    race_programs.PROCESS_GROUP[0] = process_group
    group = dist.new_group(list(range(ranks)))
    return group if rank < ranks else None


def _inputs(rank, turn):
    return torch.arange(64.0).view(8, 8) + 100 * rank + 1000 * turn


def _eager(rank, world_size, name, kind):
    import symmplan

    program = PROGRAMS[name][0]
    group = _group(rank, world_size, name)
    if group is None:
        return
    with symmplan.eager(group, timeout=20.0, memory="shm", debug=True) as session:
        for turn in range(_TURNS):
            program(kind, _inputs(rank, turn), group.group_name)
            session.step()


def _compiled(rank, world_size, name, kind, inner):
    import symmplan

    program = PROGRAMS[name][0]
    group = _group(rank, world_size, name)
    if group is None:
        return
    group = group.group_name
    torch._dynamo.reset()
    backend = symmplan.backend(inner, memory="shm", timeout=20.0, debug=True)
    run = torch.compile(lambda x: program(kind, x, group), backend=backend, fullgraph=True)
    try:
        for turn in range(_TURNS):
            run(_inputs(rank, turn))
    finally:
        backend.release()


ALGORITHMS = {
    "eager": (_eager, ()),
    "compiled": (_compiled, ("eager",)),
    "inductor": (_compiled, ("inductor",)),
}


@pytest.mark.further
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_of_the_six_is_found(pool, name, algorithm):
    _, ranks, _, kind = PROGRAMS[name]
    function, more = ALGORITHMS[algorithm]
    outcomes = pool.outcomes(function, name, kind, *more)[:ranks]
    assert all(o.error is not None for o in outcomes), outcomes
    found = [o.error for o in outcomes if o.error.kind == "RaceError"]
    assert found, [o.error.text for o in outcomes]
    for error in found:
        first, second = error.fields["accesses"]
        assert "symmplan_races::" in first[1] + second[1]
        assert first[8] or second[8]  # one of them writes
        for access in (first, second):
            assert f"rank {access[0]}" in error.text
            assert access[1] in error.text  # the op
            assert access[2] in error.text  # the line
            assert access[2].rpartition(":")[0].endswith(".py"), access


def _one_sided(rank, world_size, between):
    """Each rank writes its own bytes and reads the next one's; what lies between may order that."""
    import torch.distributed as dist

    import symmplan
    from symmplan.memory import realize
    from symmplan.runtime.watching import Watching

    name = dist.group.WORLD.group_name
    problem = symmplan.Problem(
        buffers=[Buffer("x", 64, name)],
        operations=[Operation("op", group=name, handshake=True, release=True)],
        accesses=[Access("op", "x", write=True, remote=True)],
    )
    ordinary = torch.ones(3 * world_size)
    part, equal = torch.empty(3), [3] * world_size
    # Rank 2 gets nothing of rank 0, and does not wait for it.
    sent = {0: [6, 3, 0], 1: equal, 2: equal}[rank]
    got = {0: [6, 3, 3], 1: equal, 2: [0, 3, 3]}[rank]
    ops = torch.ops._c10d_functional
    work = None
    with realize(symmplan.plan(problem), memory="shm", timeout=20.0, debug=True) as arena:
        x = arena.tensor("x", torch.float32)
        placed = symmplan.placed.handle(x)
        try:
            with Watching(20.0):
                x.fill_(rank)
            dist.barrier()  # which nobody sees: all ranks come to what lies between
            with Watching(20.0):
                if between == "barrier":
                    placed.barrier()
                elif between == "all-reduce":
                    dist.all_reduce(ordinary)
                elif between == "functional all-reduce":
                    ops.wait_tensor(ops.all_reduce(ordinary, "sum", name))
                elif between == "all-gather":
                    dist.all_gather_into_tensor(ordinary, part)
                elif between == "reduce-scatter":
                    dist.reduce_scatter_tensor(part, ordinary)
                elif between == "all-to-all":
                    ops.wait_tensor(ops.all_to_all_single(ordinary, equal, equal, name))
                elif between == "uneven all-to-all":
                    ops.wait_tensor(ops.all_to_all_single(ordinary, got, sent, name))
                elif between == "broadcast":
                    dist.broadcast(ordinary, 0)
                elif between == "not waited":
                    work = dist.all_reduce(ordinary, async_op=True)
                placed.peer((rank + 1) % world_size).clone()
                placed.barrier()
        except symmplan.errors.RaceError as error:
            return sorted(a.op for a in error.accesses)
        finally:
            if work is not None:
                with contextlib.suppress(symmplan.errors.RaceError):
                    work.wait()
            dist.barrier()
    return None


_ORDERS = (
    *("barrier", "all-reduce", "functional all-reduce", "all-gather", "reduce-scatter"),
    "all-to-all",
)
_DOES_NOT = ("nothing", "broadcast", "not waited", "uneven all-to-all")


@pytest.mark.parametrize("between", _ORDERS)
def test_what_synchronizes_orders(pool, between):
    assert pool.run(_one_sided, between) == [None] * 3


@pytest.mark.parametrize("between", _DOES_NOT)
def test_what_does_not_meet_does_not_order(pool, between):
    found = pool.run(_one_sided, between)
    assert ["aten::clone", "aten::fill_"] in found
    assert None not in found  # the others hear of it


def _at_its_start(rank, world_size):
    """The last rank passes the first one's bytes, slowly, to a collective for which others wait."""
    import torch.distributed as dist

    import symmplan
    from symmplan.memory import realize
    from symmplan.memory.races import RaceDetector
    from symmplan.runtime.watching import Watching

    name = dist.group.WORLD.group_name
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=10))
    problem = symmplan.Problem(
        buffers=[Buffer("x", 64, name)],
        operations=[Operation("op", group=name, handshake=True, release=True)],
        accesses=[Access("op", "x", write=True, remote=True)],
    )
    start, last = RaceDetector.start, rank == world_size - 1

    def late(*args):
        number = start(*args)
        time.sleep(0.5)
        return number

    with realize(symmplan.plan(problem), memory="shm", timeout=20.0, debug=True) as arena:
        x = arena.tensor("x", torch.float32)
        placed = symmplan.placed.handle(x)
        RaceDetector.start = late if last else start
        try:
            with Watching(20.0):
                x.fill_(rank)
            dist.barrier()  # which nobody sees
            with Watching(20.0):
                given = placed.peer(0) if last else torch.ones(16)
                ops = torch.ops._c10d_functional
                ops.wait_tensor(ops.all_reduce(given, "sum", group.group_name))
        except symmplan.errors.RaceError as error:
            return sorted(a.op for a in error.accesses)
        finally:
            RaceDetector.start = start
            dist.barrier()


def test_nobody_waits_for_a_rank_that_finds_a_race_in_what_it_is_about_to_start(pool):
    found = pool.run(_at_its_start)
    assert found == [["_c10d_functional::all_reduce", "aten::fill_"]] * 3


def _before_its_wait(rank, world_size):
    import torch.distributed as dist

    import symmplan

    race_programs.PROCESS_GROUP[0] = True
    group = dist.new_group(list(range(world_size)))
    with symmplan.eager(group, timeout=20.0, memory="shm", debug=True) as session:
        for turn in range(2):
            y = symmplan.placed.out(torch.mul, _inputs(rank, turn), 2.0)
            work = dist.all_reduce(y, group=group, async_op=True)
            if turn:
                y.add_(1)  # the collective may not have read it yet
            work.wait()
            del y
            session.step()


def test_a_rank_races_with_its_own_collective(pool):
    errors = [o.error for o in pool.outcomes(_before_its_wait)]
    assert {error.kind for error in errors} == {"RaceError"}
    own = [e for e in errors if "twice" in e.text]
    assert own
    first, second = own[0].fields["accesses"]
    assert first[0] == second[0]
    assert {"aten::add_", "c10d::allreduce_"} == {first[1], second[1]}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_ops_that_meet_are_right_without_barriers(pool, name, algorithm):
    function, more = ALGORITHMS[algorithm]
    pool.run(function, name, "11", *more)


def _strided(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    storage = torch.arange(256, dtype=draw(st.sampled_from([torch.uint8, torch.int16])))
    strides = [draw(st.integers(0, 6)) for _ in sizes]
    return storage, storage.as_strided(sizes, strides, draw(st.integers(0, 40)))


@st.composite
def _views(draw):
    storage, view = _strided(draw)
    offset = (view.data_ptr() - storage.data_ptr()) if view.numel() else 0
    spots = view.reshape(-1).tolist()
    item = view.element_size()
    used = {int(s) % 256 * item + i for s in spots for i in range(item)}
    return Extent.of(view, offset), used


@given(_views(), _views())
def test_strided_views_share_the_bytes_that_their_elements_share(one, other):
    (extent, used), (extent_b, used_b) = one, other
    assert extent.low == min(used)
    assert extent.high == max(used) + 1
    shared = extent.overlap(extent_b)
    common = used & used_b
    assert (shared is not None) == bool(common)
    if shared is not None:
        low, high = shared
        assert low == min(common)
        assert set(range(low, high)) <= common
        assert high not in common


def _log(size=3):
    return RaceLog(mmap.mmap(-1, log_nbytes(size)), 0, size)


def test_a_log_gives_what_was_published_and_forgets_the_oldest():
    log = _log()
    for number in range(1, 1001):
        log.publish(7, number, np.asarray([number, 0, 1]))
        log.publish(8, number, np.asarray([0, number, 0]))
    assert log.published(7, 1000).tolist() == [1000, 0, 1]
    assert log.published(8, 990).tolist() == [0, 990, 0]
    assert log.published(7, 1) is None
    assert log.published(9, 1000) is None
    assert log.clock.tolist() == [0, 1000, 0]


def test_a_log_finds_conflicts_that_are_not_over():
    log = _log()
    here = Extent(0, 64, 64)
    log.append(1, here, 1, ("read", "a.py:1", ""), write=False)
    number = log.append(1, here, OPEN, ("aten::copy_ in x::y", "b.py:2", "'z'"), write=True)
    log.append(2, here, 9, ("other", "", ""), write=True)
    log.append(1, Extent(64, 80, 16), 9, ("beside", "", ""), write=True)
    (found,) = log.conflicts(0, 5, 1, Extent(32, 80, 48), write=False)[:1]
    assert (found.number, found.write) == (number, True)
    assert found.text == ("aten::copy_ in x::y", "b.py:2", "'z'")
    assert log.settled(0, 5) == number
    log.close(number, 5)
    assert log.conflicts(0, 5, 1, here, write=True) == []
    assert log.settled(0, 9) == log.count


def test_a_log_is_bounded():
    log = _log()
    for i in range(5000):
        log.append(0, Extent(i, i + 1, 1), i, (f"op {i}", "f.py:1" * 100, "ö" * 300), write=True)
    found = log.conflicts(0, -1, 0, Extent(0, 5000, 5000), write=False)
    assert found[-1].number == 4999
    assert found[0].number > 0
    assert log._text(0)[0] == "op 0"
    assert log._text(0)[1].endswith("f.py:1")


def _fsdp(rank, world_size, planted):
    """A planned model is trained; if planted, ranks sum before their peers have pushed."""
    from fsdp_models import Net, Trace, shard, train

    import symmplan
    from symmplan.integrate.fsdp.push import Pushes

    torch.manual_seed(7)
    model = shard(Net())
    handle = symmplan.fsdp.apply(model, choose="push", timeout=20.0, debug=True)
    meets = Pushes._all_fit
    try:
        train(model, Trace(), rank, steps=3)
        if planted:
            Pushes._all_fit = lambda _: True
        train(model, Trace(), rank, steps=3)
    finally:
        Pushes._all_fit = meets
        handle.remove()
    return handle.stats.served


@pytest.mark.parametrize("planted", [True, False])
def test_the_bytes_of_a_planned_fsdp2_model_are_watched(planted):
    with RankPool(2, timeout=40.0) as two:
        outcomes = two.outcomes(_fsdp, planted)
    kinds = {None if o.error is None else o.error.kind for o in outcomes}
    assert kinds == ({"RaceError"} if planted else {None}), outcomes


def _late_view(rank, world_size, act):
    """A view of a layer's weight that the pass before kept is read or written after its reshard."""
    from fsdp_models import Net, Trace, batch, shard, train

    import symmplan

    model, kept = shard(Net()), []
    handle = symmplan.fsdp.apply(model, timeout=20.0, debug=True)
    train(model, Trace(), rank, steps=3)
    assert handle.stats.placed
    layer = model.blocks[0].up
    layer.register_forward_hook(lambda layer, *_: kept.append(layer.weight.detach().view(-1)))
    loss = model(batch(0, rank)).sum()
    with pytest.raises(RuntimeError, match=r"that is invalid|was resharded"):
        getattr(kept[0], act)()
    loss.backward()
    handle.remove()


@pytest.mark.further
@pytest.mark.parametrize("act", ["zero_", "sum"])
def test_a_view_of_a_resharded_weight_is_an_error(act):
    with RankPool(2, timeout=40.0) as two:
        two.run(_late_view, act)
