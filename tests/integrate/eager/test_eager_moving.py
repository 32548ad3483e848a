"""Tensors that a program makes for a collective to fill: they move to their placements."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from doubles import installed, state
from hypothesis import given
from hypothesis import strategies as st
from ranks import RanksFailed, pool_of

from examples import examples

pytestmark = pytest.mark.ranks

one, two = pool_of(1, timeout=100.0), pool_of(2, timeout=100.0)

TURNS = 4
COUNT = 96


@frozen
class Filled:
    """A tensor and the collective that fills it."""

    call: str = "all_gather"
    make: str = "empty"  # how it is made
    before: str = ""  # what the program does with it before
    late: str = ""  # the same, only in later iterations
    behind: str = ""  # what it does with it afterwards
    waits: bool = False  # whether the call is asynchronous


def _made(item, count, cached):
    import symmplan

    if item.make == "cached":
        return cached.setdefault((id(item), count), torch.zeros(count))
    made = {"zeros": torch.zeros, "placed": symmplan.placed.empty}.get(item.make, torch.empty)
    return made(count)


def _called(item, whole, mine):
    calls = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, mine, async_op=item.waits),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(whole, mine, async_op=item.waits),
        "all_to_all": lambda: dist.all_to_all_single(whole, mine, async_op=item.waits),
    }
    work = calls[item.call]()
    if item.waits:
        work.wait()


def _iterate(items, rank, turn, cached):
    """What one iteration computes."""
    found = []
    for number, item in enumerate(items):
        sizes = {"all_gather": (2, 1), "reduce_scatter": (1, 2), "all_to_all": (2, 2)}[item.call]
        count, given = (COUNT * size for size in sizes)
        whole = _made(item, count, cached)
        mine = torch.arange(float(given)) * (1 + rank) + 10.0 * turn + number
        does = item.before or (item.late if turn > 1 else "")
        others = {"view": lambda x: x[3:9], "array": torch.Tensor.numpy}
        other = others.get(does, lambda _: None)(whole)
        if does == "read":
            whole.fill_(2.0)
            found.append(whole.sum())
        _called(item, whole, mine)
        if other is not None:
            found.append(torch.as_tensor(other).clone())
        if item.behind == "reduced":
            dist.all_reduce(whole)
        elif item.behind == "filled again":
            found.append(whole.clone())
            _called(item, whole, mine + 1.0)
        elif item.behind == "held":
            cached[number] = whole
        found.append(whole * 1.5)
    return found


def _run(rank, items, session=None, inference=False):
    cached, found = {}, []
    with torch.inference_mode(inference), session or nullcontext():
        for turn in range(TURNS):
            found += _iterate(items, rank, turn, cached)
            if session is not None:
                session.step()
    return found


def _compared(rank, world, items, memory="shm", inference=False):
    """Whether the session computes the same, and which arguments it copies."""
    import symmplan

    plain = _run(rank, items)
    with nullcontext() if memory == "shm" else installed(races=True):
        session = symmplan.eager(memory=memory, choose="placed", timeout=30.0)
        found = _run(rank, items, session, inference)
        assert memory == "shm" or state().races == []
    return all(map(torch.equal, plain, found)), sorted({c.where for c in session.copies})


CALLS = ["all_gather", "reduce_scatter", "all_to_all"]


MEMORIES = ["shm", "nccl", "cuda"]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("waits", [False, True])
def test_what_a_collective_fills_is_not_copied(two, waits, memory):
    makes = ("empty", "zeros", "placed")
    items = [Filled(call, make, waits=waits) for call in CALLS for make in makes]
    for same, copied in two.run(_compared, items, memory):
        assert same
        assert "out" not in copied


@pytest.mark.parametrize("memory", MEMORIES)
def test_other_tensors_on_its_storage_see_the_values(two, memory):
    items = [Filled(call, late="view", waits=call == "all_gather") for call in CALLS]
    for same, copied in two.run(_compared, items, memory):
        assert same
        assert "out" not in copied


def test_arrays_on_its_storage_see_the_values(two):
    items = [Filled(late="array"), Filled("all_to_all", late="array")]
    assert two.run(_compared, items) == [(True, [])] * 2


@pytest.mark.parametrize("before", ["view", "read", "array"])
def test_what_is_used_before_is_copied(two, before):
    assert two.run(_compared, [Filled(before=before)]) == [(True, ["out"])] * 2


def test_it_is_moved_in_inference_mode(two):
    items = [Filled(), Filled("all_to_all", late="view")]
    assert two.run(_compared, items, "shm", True) == [(True, [])] * 2


@pytest.mark.further
def test_it_is_another_tensor_that_a_later_call_gets(two):
    """What went back is not where a later call of the plan looks for it."""
    with pytest.raises(RanksFailed, match="is not the tensor of the recorded iteration"):
        two.run(_compared, [Filled(late="view", behind="reduced")])


ITEMS = st.builds(
    Filled,
    st.sampled_from(CALLS),
    st.sampled_from(["empty", "empty", "zeros", "placed", "cached"]),
    st.sampled_from(["", "", "", "view", "read", "array"]),
    st.sampled_from(["", "", "view", "read", "array"]),
    st.sampled_from(["", "reduced", "filled again", "held"]),
    st.booleans(),
).filter(lambda item: not item.late or item.behind not in ("reduced", "filled again"))


@pytest.mark.further
@examples(60)
@given(
    items=st.lists(ITEMS, min_size=1, max_size=4),
    memory=st.sampled_from(MEMORIES),
    inference=st.booleans(),
)
def test_random_programs_have_the_same_bits(two, items, memory, inference):
    assert all(same for same, _ in two.run(_compared, items, memory, inference))


def _refused(rank, world):
    """The collective that fills it is ordinary, and another one wants it in a placement."""
    import symmplan

    group = dist.new_group([0, 1])
    found = []
    with symmplan.eager(memory="shm", timeout=30.0) as session:
        for turn in range(TURNS):
            whole = torch.empty(2 * COUNT)
            dist.all_gather_into_tensor(whole, torch.full((COUNT,), 1.0 + rank + turn))
            part = torch.empty(COUNT)
            dist.reduce_scatter_tensor(part, whole, group=group)
            found.append(part.clone())
            del whole, part
            session.step()
    return [float(x[0]) for x in found], session.stats.copies


def test_several_groups_of_the_same_ranks(two):
    first, second = two.run(_refused)
    assert first[0] == [2.0 * (1 + turn) for turn in range(TURNS)]
    assert second[0] == [2.0 * (2 + turn) for turn in range(TURNS)]


def _apart(rank, world, how):
    """One rank does something of its own, as for a log."""
    import symmplan

    with symmplan.eager(memory="shm", timeout=30.0) as session:
        for turn in range(TURNS):
            if rank == 0 and how == "more":
                torch.empty(3).fill_(1.0)
            make = torch.zeros if rank and how == "other" else torch.empty
            whole = make(2 * COUNT)
            if rank == 0 and how == "view":
                whole[:2].fill_(1.0)
            dist.all_gather_into_tensor(whole, torch.full((COUNT,), 1.0 + rank + turn))
            assert float(whole.sum()) == COUNT * (3 + 2 * turn)
            del whole
            session.step()
    return sorted({c.where for c in session.copies})


@pytest.mark.parametrize(("how", "copied"), [("more", []), ("other", []), ("view", ["out"])])
def test_what_one_rank_does_besides_changes_no_plan(two, how, copied):
    assert two.run(_apart, how) == [copied] * 2


def _advised(rank, world):
    """What the program asked for by `placed.empty` is where another call wants it."""
    import symmplan

    with symmplan.eager(memory="shm", choose="placed", timeout=30.0) as session:
        for turn in range(TURNS):
            whole, part = symmplan.placed.empty(2 * COUNT), torch.empty(COUNT)
            dist.all_gather_into_tensor(whole, torch.full((COUNT,), 1.0 + rank + turn))
            dist.reduce_scatter_tensor(part, whole)
            assert float(part.sum()) == 2 * COUNT * (1 + rank + turn)
            del whole, part
            session.step()
    return session.copies


def test_what_is_asked_for_stays_where_it_was_asked_for(two):
    assert two.run(_advised) == [()] * 2


def _over_a_result(rank, world):
    """What a declared call has made is overwritten by another one."""
    from torch.distributed import _functional_collectives as funcol

    import symmplan

    found = []
    with symmplan.eager(memory="shm", choose="placed", timeout=30.0) as session:
        for turn in range(TURNS):
            mine = torch.full((COUNT,), 1.0 + rank + turn)
            whole = funcol.wait_tensor(funcol.all_gather_tensor(mine, 0, dist.group.WORLD))
            dist.all_gather_into_tensor(whole, mine + 1.0)
            found.append(float(whole.sum()) / COUNT)
            del mine, whole
            session.step()
    return found


def test_a_result_that_is_overwritten_stays_a_result(two):
    assert two.run(_over_a_result) == [[5.0 + 2 * turn for turn in range(TURNS)]] * 2


def _gathered_from_itself(rank, world):
    import symmplan

    found = []
    with symmplan.eager(memory="shm", timeout=30.0, choose="placed") as session:
        for turn in range(TURNS):
            whole = torch.arange(8.0) + turn
            dist.all_gather_into_tensor(whole, whole)
            found.append(whole.tolist())
            del whole
            session.step()
    return found


def test_what_the_call_itself_reads_stays(one):
    assert one.run(_gathered_from_itself) == [[[x + t for x in range(8)] for t in range(TURNS)]]


def _held(rank, world):
    """In a later iteration the program keeps what it dropped in the recorded one."""
    import symmplan
    from symmplan.errors import RunError

    kept = []

    def train():
        with symmplan.eager(memory="shm", timeout=30.0) as session:
            for turn in range(TURNS):
                whole = torch.empty(2 * COUNT)
                dist.all_gather_into_tensor(whole, torch.full((COUNT,), 1.0 + rank))
                if turn:
                    kept.append(whole)
                del whole
                session.step()

    with pytest.raises(RunError, match="still held") as error:
        train()
    return error.value.fix, [float(x.sum()) for x in kept]


def test_what_is_held_longer_is_an_error_before_a_byte_changes(two):
    for fix, kept in two.run(_held):
        assert "keep a clone" in fix
        assert kept == [3.0 * COUNT]


def _dropped(rank, world):
    import symmplan

    session = symmplan.eager(memory="shm", timeout=30.0)
    with session:
        for _ in range(TURNS):
            whole = torch.empty(2 * COUNT)
            dist.all_gather_into_tensor(whole, torch.full((COUNT,), 1.0 + rank))
            del whole
            session.step()
        session.sleep()
        asleep = sum(s.nbytes for s in symmplan.segments())
        whole = torch.empty(2 * COUNT)
        dist.all_gather_into_tensor(whole, torch.full((COUNT,), 5.0 + rank))
        session.step()
    total = float(whole.sum())
    del whole
    gc.collect()
    return asleep, sum(s.nbytes for s in symmplan.segments()), total


def test_it_sleeps_and_its_segment_goes(two):
    assert two.run(_dropped) == [(0, 0, 11.0 * COUNT)] * 2
