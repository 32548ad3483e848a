"""`symmplan.fsdp.apply(unsharded_modules=...)`: how many unsharded modules have bytes at once."""

from __future__ import annotations

import fsdp_models
import hypothesis.strategies as st
import pytest
from fsdp_models import Net, shard, train
from hypothesis import given
from ranks import RankPool

from symmplan.capture.fsdp_recording import Key, Recording
from symmplan.capture.fsdp_unsharded import gathers_unsharded, most_alive
from symmplan.errors import OptionError

SITES = ("root", "a", "b", "c", "d", "e")


@st.composite
def recordings(draw):
    """A forward pass of modules that are gathered ahead of their time or late, inside a root."""
    recording = Recording()
    order = draw(st.lists(st.sampled_from(SITES[1:]), min_size=1, unique=True))
    ahead = draw(st.integers(0, 3))
    root = recording.begin(Key("root", "all_gather", 8, "float32", False), 32)
    recording.run(root, "g")
    begun: dict[int, int] = {}
    put_off: set[int] = set()
    for at, _ in enumerate(order):
        for turn in range(at, min(len(order), at + 1 + ahead)):
            if turn not in begun:
                key = Key(order[turn], "all_gather", 8, "float32", False)
                begun[turn] = recording.begin(key, 32)
                if turn > at and draw(st.booleans()):  # it ran when its module came
                    put_off.add(turn)
                else:
                    recording.run(begun[turn], "g")
        if at in put_off:
            recording.run(begun[at], "g")
        recording.release(begun[at])
    if draw(st.booleans()):
        recording.release(root)
    return recording


def alive_at_most(events, inside):
    """The largest number at once; each begins, runs and drops once, in that order."""
    begun, ran, dropped = [], [], []
    most = 0
    for what, index in events:
        if index not in inside:
            continue
        {"begin": begun, "run": ran, "drop": dropped}[what].append(index)
        if what == "run":
            assert index in begun
        if what == "drop":
            assert index in ran
        most = max(most, len(begun) - len(dropped))
    assert sorted(begun) == sorted(ran) == sorted(inside)
    assert len(begun) == len(set(begun))
    assert len(dropped) == len(set(dropped))
    return most


@given(recordings(), st.integers(1, 6))
def test_no_more_are_alive_than_told_or_needed(recording, live):
    inside = set(recording.ran)
    told = alive_at_most(gathers_unsharded(recording, inside, live), inside)
    # What the program has at once if nothing is gathered ahead of its time: the root and one.
    assert told <= max(live, 2)
    assert told == most_alive([recording], set(SITES), live)
    assert alive_at_most(gathers_unsharded(recording, inside, None), inside) == most_alive(
        [recording], set(SITES), None
    )


@given(recordings(), st.integers(1, 6))
def test_bytes_are_free_only_after_their_module(recording, live):
    inside = set(recording.ran)
    events = gathers_unsharded(recording, inside, live)
    at = {event: i for i, event in enumerate(events)}
    released = [i for what, i in recording.events if what == "release"]
    order = [i for what, i in events if what == "begin"]
    for index in released:
        later = [
            i
            for i in order
            if recording.events.index(("begin", i)) > recording.events.index(("release", index))
        ]
        for i in later:
            assert at["begin", i] > at["begin", index]


def sharded(blocks=5, ahead=0):
    model = shard(Net(blocks=blocks))
    layers = list(model.blocks)
    for i, block in enumerate(layers):
        if ahead:
            block.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + ahead])
            block.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])
    return model


def told(rank, world, live, ahead, algorithm="placed"):
    def look(handle):
        assert all(a.kind != "unsharded_modules" for a in handle.plan.advice())
        advice = [a for a in handle.plan.trades() if a.kind == "unsharded_modules"]
        line = next(x for x in handle.plan.summary().splitlines() if "unsharded modules" in x)
        saves = [(a.saves, a.text) for a in advice]
        return handle.plan.unsharded_modules, handle.plan.peak_bytes, saves, line

    def build():
        return sharded(ahead=ahead)

    return fsdp_models.both(build, train, rank, look=look, unsharded_modules=live, choose=algorithm)


def deepened(rank, world, live):
    """Prefetch lists become longer after the plan was made."""

    def program(model, trace, rank):
        train(model, trace, rank)
        layers = list(model.blocks)
        for i, block in enumerate(layers):
            block.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        train(model, trace, rank)

    return fsdp_models.both(sharded, program, rank, unsharded_modules=live)


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.parametrize("ahead", [2, 0, 1])
@pytest.mark.parametrize("algorithm", ["placed", "push"])
def test_fewer_need_fewer_bytes_and_all_compute_the_same(two, ahead, algorithm):
    bytes_of = {}
    for live in (None, 1, 2, 3, 5):
        for result in two.run(told, live, ahead, algorithm):
            assert result["differences"] == []
            stats = result["stats"]
            assert stats["replans"] == stats["plain"] == stats["reordered"] == 0
            count, peak, advice, line = result["looked"]
            assert line == f"unsharded modules: {count} at once"
            bytes_of[live] = peak
            if live is not None:
                assert count <= max(live, 2)  # the root and a block it must have
            for saves, text in advice:
                one, less = (-1, "less") if saves > 0 else (1, "more")
                assert f"unsharded_modules={count + one} needs {abs(saves):,} bytes {less}" in text
    assert bytes_of[1] == bytes_of[2] < bytes_of[3] < bytes_of[5]


@pytest.mark.further
@pytest.mark.ranks
def test_lists_may_become_longer_where_there_is_room(two):
    for live, replans in ((None, 1), (5, 0)):
        for result in two.run(deepened, live):
            assert result["differences"] == []
            assert (result["stats"]["replans"] > 0) == (replans > 0)


def test_a_module_needs_its_parameters():
    import symmplan

    with pytest.raises(OptionError, match="unsharded_modules is 0"):
        symmplan.fsdp.apply(Net(), unsharded_modules=0)
