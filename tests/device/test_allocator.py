"""The model of torch's caching allocator: what it has of the driver while blocks come and go."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symmplan.device import HeldBlock
from symmplan.device.allocator import CachingAllocator

KIB, MIB = 1 << 10, 1 << 20

#: Sizes at which the allocator changes what it does, and others.
sizes = st.sampled_from(
    (1, 512, 513, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 19 * MIB)
) | st.integers(1, 64 * MIB)
#: Takes a size on one of two streams, or drops what was taken so many before.
acts = st.lists(st.tuples(sizes, st.integers(0, 1)) | st.integers(0, 20), max_size=60)


def run(allocator, program):
    """The blocks that are in use after a program, with their sizes and streams."""
    live = []
    for act in program:
        if not isinstance(act, int):
            nbytes, stream = act
            live.append((allocator.take(nbytes, stream), nbytes, stream))
        elif live:
            allocator.drop(live.pop(act % len(live))[0])
        yield live


@given(acts)
def test_blocks_never_overlap_and_lie_in_what_the_driver_gave(program):
    allocator = CachingAllocator()
    streams = {}
    for live in run(allocator, program):
        ranges = sorted((block.address, block.address + block.nbytes) for block, _, _ in live)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
        assert all(block.nbytes >= nbytes for block, nbytes, _ in live)
        assert sum(block.nbytes for block, _, _ in live) <= allocator.reserved
        for block, _, stream in live:  # no other stream ever has these bytes
            for at in range(block.address, block.address + block.nbytes, MIB // 2):
                assert streams.setdefault(at, stream) == stream


@given(acts)
def test_what_is_dropped_can_be_given_back(program):
    allocator = CachingAllocator()
    *_, live = [[], *run(allocator, program)]
    for block, _, _ in live:
        allocator.drop(block)
    allocator.empty()
    assert allocator.reserved == 0


@given(acts, st.integers(0, 256 * MIB))
def test_it_never_has_more_than_the_driver_has_for_it(program, limit):
    """It gives back its cache only where it would need more, and goes on like any other."""
    free = CachingAllocator()
    for _ in run(free, program):
        pass
    allocator = CachingAllocator(limit)
    try:
        for live in run(allocator, program):
            assert sum(block.nbytes for block, _, _ in live) <= allocator.reserved <= limit
    except MemoryError:
        assert allocator.retries > 0
    assert (free.reserved <= limit) == (allocator.retries == 0)


@given(acts, sizes, st.integers(0, 1))
def test_the_same_again_needs_nothing_of_the_driver(program, nbytes, stream):
    allocator = CachingAllocator()
    for _ in run(allocator, program):
        pass
    allocator.drop(allocator.take(nbytes, stream))
    had = allocator.reserved
    allocator.take(nbytes, stream)
    assert allocator.reserved == had


@given(acts, acts)
def test_an_allocator_that_has_what_another_has_goes_on_like_it(program, more):
    allocator, other = CachingAllocator(), CachingAllocator()
    *_, live = [[], *run(allocator, program)]
    allocator.empty()
    used = {index: block for index, (block, _, _) in enumerate(live)}
    held = allocator.held(used)
    free = HeldBlock("free", 2 * MIB, free=True, segment="free", stream=0, small=False)
    again = other.hold([*held, free])
    assert other.reserved == allocator.reserved + 2 * MIB
    other.empty()
    assert again.keys() == used.keys()
    assert [again[i].nbytes for i in used] == [block.nbytes for block in used.values()]
    assert other.reserved == allocator.reserved
    for index, block in used.items():
        allocator.drop(block)
        other.drop(again[index])
        for _ in zip(run(allocator, more), run(other, more), strict=True):
            assert other.reserved == allocator.reserved
    if not any(isinstance(act, tuple) for act in more):
        other.empty()
        assert other.reserved == 0


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_the_first_bytes_of_the_driver(nbytes, reserved):
    allocator = CachingAllocator()
    allocator.take(nbytes, None)
    assert allocator.reserved == reserved


def test_a_block_is_split_unless_the_rest_is_small():
    allocator = CachingAllocator()
    allocator.take(2 * MIB, None)  # of 20
    rest = allocator.take(17 * MIB, None)
    assert (rest.nbytes, allocator.reserved) == (18 * MIB, 20 * MIB)
    allocator.drop(rest)
    assert allocator.take(16 * MIB, None).nbytes == 16 * MIB
    assert allocator.take(2 * MIB - 512, None).nbytes == 2 * MIB
    assert allocator.reserved == 20 * MIB


def test_neighbours_merge():
    allocator = CachingAllocator()
    blocks = [allocator.take(4 * MIB, None) for _ in range(5)]
    assert allocator.reserved == 20 * MIB
    for index in (1, 3, 2):
        allocator.drop(blocks[index])
    assert allocator.take(12 * MIB, None).address == blocks[1].address
    assert allocator.reserved == 20 * MIB


def test_the_smallest_block_that_serves_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.take(40 * MIB, None), allocator.take(30 * MIB, None)
    allocator.drop(large)
    allocator.drop(small)
    assert allocator.take(25 * MIB, None).address == small.address


def test_streams_share_nothing():
    allocator = CachingAllocator()
    allocator.drop(allocator.take(40 * MIB, "one"))
    allocator.take(40 * MIB, "other")
    assert allocator.reserved == 80 * MIB
    allocator.empty()
    assert allocator.reserved == 40 * MIB
