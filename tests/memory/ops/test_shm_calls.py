"""Calls of one-sided collectives: wrong, unequal, compiled ones, ones of late ranks; handles."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from ranks import pool_of
from test_shm import SEGMENT, STATE, set_up, tear_down

pytestmark = pytest.mark.ranks

pool = pool_of(2, 3, 1, setup=set_up, teardown=tear_down)


def wrong_calls(rank, world):
    """Every misuse raises on the spot, and the next right call works."""
    from symmplan.errors import ReleasedError, RunError
    from symmplan.memory import NotSymmetricError

    everyone = tuple(range(world))
    arena, group = STATE["arenas"][everyone], STATE["groups"][everyone]
    name, ops = group.group_name, torch.ops.symmplan
    out = arena.tensor("a", torch.float32)[: 8 * world]
    x = torch.full((8,), float(rank))
    told = {}

    def expect(kind, label, call):
        try:
            call()
        except kind as error:
            told[label] = str(error)
        else:
            told[label] = None

    plain = torch.empty(8 * world)
    expect(NotSymmetricError, "plain", lambda: ops.all_gather_out(x, world, name, out=plain))
    expect(RunError, "size", lambda: ops.all_gather_out(x, world, name, out=out[:5]))
    expect(RunError, "dtype", lambda: ops.all_gather_out(x.double(), world, name, out=out))
    expect(RunError, "group size", lambda: ops.all_gather_out(x, world + 1, name, out=out))
    expect(RunError, "group", lambda: ops.all_gather_out(x, world, "nobody", out=out))
    expect(RunError, "reduction", lambda: ops.all_reduce_out(out, "mean", name, out=out))
    expect(RunError, "band", lambda: ops.all_reduce_out(out, "band", name, out=out))
    expect(RunError, "overlap", lambda: ops.all_reduce_out(out[:8], "sum", name, out=out[4:12][:8]))
    expect(RunError, "other segment", lambda: ops.all_reduce_out(out, "sum", name, out=plain))
    expect(RunError, "source", lambda: ops.broadcast_out(x, world, name, out=out[:8]))
    strided = arena.tensor("a", torch.float32)[: 16 * world : 2]
    expect(RunError, "strided", lambda: ops.all_gather_out(x, world, name, out=strided))
    ops.all_gather_out(x, world, name, out=out)
    good = torch.equal(out, torch.arange(world).float().repeat_interleave(8))
    del ReleasedError
    return told, good


def test_wrong_calls_raise_and_do_no_harm(pool):
    if pool.world_size == 1:
        pytest.skip("overlaps and groups need peers")
    for told, good in pool.run(wrong_calls):
        assert all(told.values()), told
        assert good
        assert "symmplan::all_gather_out" in told["plain"]
        assert "'out'" in told["plain"]


def repeated_calls(rank, world):
    """How often calls were prepared, and whether each brought what its own input says.

    The first one is made where tensors are those of inference, and its tensors are gone behind it.
    """
    import symmplan.memory.ops.one_sided as one_sided

    everyone = tuple(range(world))
    arena, group = STATE["arenas"][everyone], STATE["groups"][everyone]
    name, ops = group.group_name, torch.ops.symmplan
    prepared, right, held = [], [], []
    init = one_sided.OpCall.__init__

    def counted(self, op, *args):
        prepared.append(op)
        init(self, op, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(one_sided.OpCall, "__init__", counted)
        for turn in range(5):
            with torch.inference_mode(mode=not turn):
                whole = arena.tensor("a", torch.float32)[8 : 8 + 24 * world]
                total = arena.tensor("b", torch.float32)[16:40]
                mine = torch.arange(24.0) + 100 * rank + turn
                ops.all_gather_out(mine, world, name, out=whole)
                want = torch.cat([torch.arange(24.0) + 100 * r + turn for r in range(world)])
                right.append(torch.equal(whole, want))
                part = torch.empty(24)
                ops.reduce_scatter_out(whole, "sum", world, name, out=part)
                right.append(torch.equal(part, want[24 * rank :][:24] * world))
                ops.broadcast_out(part + rank, world - 1, name, out=total)
                ops.all_reduce_out(total, "sum", name, out=total)
                right.append(torch.equal(total, (want[-24:] * world + world - 1) * world))
                held.append(sys.getrefcount(mine))
    return {op: prepared.count(op) for op in prepared}, right, held


def test_calls_at_the_same_places_are_prepared_once(pool):
    for prepared, right, held in pool.run(repeated_calls):
        assert all(right)
        assert len(prepared) == 4
        assert {*prepared.values()} == {2}  # once for the call that is there, once for all others
        assert len({*held}) == 1  # no call keeps the tensors of the program


def unequal_calls(rank, world, what):
    """Ranks that make different calls all raise, and the next right call works."""
    from symmplan.errors import RunError

    everyone = tuple(range(world))
    arena, group = STATE["arenas"][everyone], STATE["groups"][everyone]
    name, ops = group.group_name, torch.ops.symmplan
    out = arena.tensor("a", torch.float32)
    out.zero_()
    odd = rank == world - 1
    dist.barrier()
    try:
        if what == "offset":
            target = out[64 : 64 + 8 * world] if odd else out[: 8 * world]
            ops.all_gather_out(torch.ones(8), world, name, out=target)
        elif what == "size":
            n = 16 if odd else 8
            ops.all_gather_out(torch.ones(n), world, name, out=out[: n * world])
        elif what == "op":
            if odd:
                ops.broadcast_out(torch.ones(8), 0, name, out=out[:8])
            else:
                ops.all_gather_out(torch.ones(8), world, name, out=out[: 8 * world])
        elif what == "splits":
            rows = [1] * world
            if odd:
                rows[0] = 2
            ops.all_to_all_single_out(
                torch.ones(sum(rows)), [1] * world, rows, name, out=out[:world]
            )
        else:
            bad = torch.ones(8, dtype=torch.float64) if odd else torch.ones(8)
            ops.all_gather_out(bad, world, name, out=out[: 8 * world])
        text = None
    except RunError as error:
        text = str(error)
    untouched = not out.any()
    dist.barrier()
    ops.broadcast_out(torch.full((8,), 7.0), 0, name, out=out[:8])
    return text, untouched, bool((out[:8] == 7).all())


@pytest.mark.parametrize("what", ["offset", "size", "op", "splits", "one rank wrong"])
def test_unequal_calls_raise_on_every_rank(pool, what):
    if pool.world_size == 1:
        pytest.skip("needs peers")
    for text, untouched, good in pool.run(unequal_calls, what):
        assert text is not None
        assert "[group" in text
        assert untouched, "bytes moved although the calls differ"
        assert good


def compiled(rank, world, backend):
    """Under torch.compile: mutation of ``out`` is seen, order is kept, nothing breaks the graph.

    No arithmetic between the ops: Inductor then has no C++ to compile, which would take minutes.
    """
    everyone = tuple(range(world))
    arena, group = STATE["arenas"][everyone], STATE["groups"][everyone]
    name = group.group_name
    out = arena.tensor("a", torch.float32)[: 8 * world]

    def step(x, out):
        torch.ops.symmplan.all_gather_out(x, world, name, out=out)
        torch.ops.symmplan.barrier_(out, name)
        torch.ops.symmplan.all_reduce_out(out, "sum", name, out=out)
        torch.ops.symmplan.broadcast_out(x, 0, name, out=out[:8])

    x = torch.full((8,), float(rank + 1))
    torch.compile(step, backend=backend, fullgraph=True)(x, out)
    want = torch.arange(1, world + 1).float().repeat_interleave(8) * world
    want[:8] = 1
    compiled_right = torch.equal(out, want)
    # Autograd looks past them: no formula, no complaint, no requires_grad.
    torch.ops.symmplan.all_gather_out(x.requires_grad_(), world, name, out=out)
    return compiled_right, out.requires_grad


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_ops_compile(pool, backend):
    if pool.world_size != 2:
        pytest.skip("once is enough: it takes long")
    assert pool.run(compiled, backend, timeout=150) == [(True, False)] * pool.world_size


def placed_views(rank, world):
    from symmplan.memory import NotSymmetricError, locate
    from symmplan.placed import handle

    everyone = tuple(range(world))
    arena = STATE["arenas"][everyone]
    x = arena.tensor("b", torch.int32)[100:120].view(4, 5)[:, 1:3]
    placed = handle(x)
    x.fill_(rank)
    placed.barrier()
    seen = [int(placed.peer(r)[3, 1]) for r in range(world)]
    same = all(
        placed.peer(r).shape == x.shape and placed.peer(r).stride() == x.stride()
        for r in range(world)
    )
    placed.barrier()
    segment, offset = locate(x)
    try:
        handle(torch.ones(3))
        refused = False
    except NotSymmetricError:
        refused = True
    at = (placed.offset, offset, segment is arena.segments["s0"])
    return seen, same, at, (placed.rank, placed.world_size), refused


def test_handle_reaches_every_peer(pool):
    world = pool.world_size
    for rank, (seen, same, at, ids, refused) in enumerate(pool.run(placed_views)):
        assert seen == list(range(world))
        assert same
        assert at == (SEGMENT + 4 * 101, SEGMENT + 4 * 101, True)
        assert ids == (rank, world)
        assert refused


def slow_entry(rank, world, op):
    """The last rank comes late: nobody may touch its bytes before. It also copies slowly."""
    import time

    from symmplan.memory.ops import one_sided as module

    everyone = tuple(range(world))
    arena, group = STATE["arenas"][everyone], STATE["groups"][everyone]
    name, ops = group.group_name, torch.ops.symmplan
    out = arena.tensor("a", torch.float32)[: 8 * world].fill_(-1)
    late = rank == world - 1
    dist.barrier()
    real = module.copy_bytes, module.reduce_into
    untouched = True
    if late:
        time.sleep(0.2)
        untouched = bool((out == -1).all())

        def slowly(function):
            def wait_first(*args):
                time.sleep(0.2)
                function(*args)

            return wait_first

        module.copy_bytes, module.reduce_into = map(slowly, real)
    try:
        if op == "all_gather":
            ops.all_gather_out(torch.full((8,), 2.0), world, name, out=out)
            complete = bool((out == 2).all())
        elif op == "broadcast":
            ops.broadcast_out(torch.full((8,), 2.0), world - 1, name, out=out[:8])
            complete = bool((out[:8] == 2).all())
        elif op == "all_reduce":
            ops.all_reduce_out(out, "sum", name, out=out)
            complete = bool((out == -world).all())
        else:
            # Overwritten right after the call: the slow rank must have read it by then.
            part = torch.empty(8)
            ops.reduce_scatter_out(out, "sum", world, name, out=part)
            out.fill_(100)
            complete = bool((part == -world).all())
    finally:
        module.copy_bytes, module.reduce_into = real
    dist.barrier()
    return untouched, complete


@pytest.mark.parametrize("op", ["all_gather", "broadcast", "all_reduce", "reduce_scatter"])
def test_handshake_on_entry_and_release_on_exit(pool, op):
    assert pool.run(slow_entry, op) == [(True, True)] * pool.world_size
