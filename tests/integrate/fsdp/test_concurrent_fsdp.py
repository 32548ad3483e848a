"""FSDP2 beside other groups' collectives: they are heard in its first step, and timed beside it."""

from __future__ import annotations

import contextlib

import pytest
import torch.distributed as dist
from fsdp_models import Net, both, mesh, same, shard, train
from hypothesis import given
from hypothesis import strategies as st
from ranks import pool_of
from torch import nn

from symmplan.runtime.concurrent import concurrent_heard

four = pool_of(4, timeout=120.0)
pair = pool_of(2, timeout=120.0)


# Who runs beside whom.


@given(st.data())
def test_what_was_heard_is_concurrent_of_the_calls_next_to_it(data):
    streams = st.sampled_from(["gathers", "reductions"])
    calls = [(s, (s, n)) for s, n in data.draw(st.lists(st.tuples(streams, st.integers(0, 2))))]
    places = sorted(data.draw(st.lists(st.integers(0, len(calls)), max_size=8)))
    heard = [(at, f"other {at}", 1 + at) for at in places]
    found = concurrent_heard(calls, heard)

    def beside(call, at):
        """No call of the same stream lies between them."""
        between = calls[call + 1 : at] if call < at else calls[at:call]
        return calls[call][0] not in [stream for stream, _ in between]

    for kind in {kind for _, kind in calls}:
        mine = [i for i, (_, k) in enumerate(calls) if k == kind]
        near = {other for at, other, _ in heard for i in mine if beside(i, at)}
        assert (kind in found) == bool(near)
        if near:
            assert found[kind][0] in near
            assert 0 < found[kind][1] <= len(heard)
    if calls and heard:  # each was shared out once, whoever has most of what
        one = concurrent_heard(calls, [(at, "other", 1) for at in places])
        counts = {k: sum(k == kind for _, kind in calls) for k in one}
        assert sum(often * counts[k] for k, (_, often) in one.items()) == pytest.approx(len(heard))


# On ranks.


@contextlib.contextmanager
def timed(rank, size, loses):
    """Beside others one rank after the other is slow in symmetric memory; alone nobody is.

    Yields what was timed beside what. ``loses`` says whether it then loses.
    """
    from symmplan.runtime import trials

    original, seen, turn = trials.seconds_of, [], [0]

    def seconds_of(clock, acts, group, nbytes, *, beside, enough, concurrent=None):
        for act in acts.values():
            clock.span(act, 2, 0, group, concurrent)
        seen.append(concurrent is not None)
        if concurrent is None:
            return {algorithm: 5.0 if algorithm == "ordinary" else 3.0 for algorithm in acts}
        turn[0] += 1
        slow = 9.0 if loses and turn[0] % size == rank else 3.0
        return {algorithm: 5.0 if algorithm == "ordinary" else slow for algorithm in acts}

    trials.seconds_of = seconds_of
    trials.forget()
    try:
        yield seen
    finally:
        trials.seconds_of = original
        trials.forget()


def look(handle):
    from symmplan.process import PROCESS

    return {
        "choices": [
            (c.op, c.nbytes, c.algorithm, c.concurrent, c.seconds["symmetric"])
            for c in handle.choices
        ],
        # Only the recorded step is listened to.
        "listening": [PROCESS.listening is not None, len(PROCESS.listeners)],
        "groups": len(handle._runtime.planning.beside),
    }


def tensor_parallel():
    """Tensor parallelism inside, FSDP2 outside."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    both_dimensions = mesh(2, 2, names=("dp", "tp"))
    model = Net()
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, both_dimensions["tp"], plan)
    return shard(model, mesh=both_dimensions["dp"])


def beside_tensor_parallelism(rank, world, loses):
    with timed(rank, world, loses) as seen:
        # Ranks of one tensor-parallel group must see the same data.
        result = both(
            tensor_parallel,
            lambda model, trace, rank: train(model, trace, rank // 2, steps=3),
            rank,
            look,
            choose="measure",
        )
    return result | {"seen": seen}


@pytest.mark.ranks
@pytest.mark.further
@pytest.mark.parametrize("loses", [True, False])
def test_gathers_are_timed_beside_tensor_parallel_sums(four, loses):
    results = four.run(beside_tensor_parallelism, loses)
    assert [r["differences"] for r in results] == [[]] * 4
    first = results[0]["looked"]
    # All ranks of the mesh choose alike, by the slowest of all of them.
    assert all(r["looked"] == first for r in results)
    assert all(r["seen"] == results[0]["seen"] for r in results)
    assert first["listening"] == [0, 0]
    assert first["groups"] == 1
    concurrent = [c for c in first["choices"] if c[3]]
    assert {c[0] for c in concurrent} == {"all_gather", "reduce_scatter"}
    for _, _, algorithm, beside, seconds in concurrent:
        assert beside == "_c10d_functional::all_reduce_.default with 256 bytes, ordinary"
        assert (algorithm, seconds) == (("ordinary", 9.0) if loses else ("symmetric", 3.0))
    # The root's are the first and the last: beside them nothing is summed.
    alone = [c[:3] for c in first["choices"] if not c[3]]
    assert alone == [(op, 2048, "symmetric") for op in ("all_gather", "reduce_scatter")]
    assert [r["stats"]["placed"] for r in results] == [2 if loses else 11] * 4


class Summed(nn.Module):
    """What it runs is summed over a group, in both directions, by hand."""

    def __init__(self, inner, group):
        super().__init__()
        self.inner = inner
        self.group = group

    def forward(self, x):
        x = self.inner(x)
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return x + (total / self.group.size() - x.detach())


def hand_written(rank, world, kind):
    """Sums over another group of the same ranks, or over the model's own."""
    group = dist.group.WORLD if kind == "its own group" else dist.new_group(range(world))

    def build():
        model = Net()
        model.blocks = nn.ModuleList(Summed(b, group) for b in model.blocks)
        return shard(model)

    def program(model, trace, rank):
        train(model, trace, rank, steps=3)

    with timed(rank, world, loses=False) as seen:
        result = both(build, program, rank, look, choose="measure")
    return result | {"seen": seen}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["another group", "its own group"])
def test_collectives_written_by_hand_are_heard(pair, kind):
    results = pair.run(hand_written, kind)
    same(results)
    for result in results:
        companies = {c[3] for c in result["looked"]["choices"]}
        if kind == "another group":
            (concurrent,) = companies - {""}
            assert concurrent.startswith("_c10d_functional::all_reduce_.default with 256 bytes")
        else:  # it runs one after the other
            assert companies == {""}
            assert not any(result["seen"])
