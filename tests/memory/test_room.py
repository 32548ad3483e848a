"""How much of a device a plan may take: what the program had without it, and never more."""

from __future__ import annotations

import budget_programs
import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st
from ranks import pool_of

import symmplan
from symmplan.capture.fsdp_memory import needed, needed_more
from symmplan.capture.fsdp_recording import Key, Look, Recording
from symmplan.device import DeviceMemory
from symmplan.memory import room
from symmplan.memory.room import SMALL, Usage, room_on

two = pool_of(2, timeout=120)

MiB = 1 << 20


# What there is.


@st.composite
def devices(draw):
    """A device, and what a program had there before it was planned."""
    allocated = draw(st.integers(0, 1 << 36))
    reserved = allocated + draw(st.integers(0, 1 << 34))
    most_reserved = reserved + draw(st.integers(0, 1 << 34))
    most_allocated = draw(st.integers(allocated, most_reserved))
    there = DeviceMemory(
        draw(st.integers(0, 1 << 36)), reserved, most_reserved, allocated, most_allocated
    )
    return there, Usage(draw(st.integers(0, most_allocated)), most_reserved)


@given(devices(), st.booleans())
def test_a_plan_takes_what_the_program_had_and_no_more(device, below):
    there, usage = device
    found = room_on(there, usage, below=below)
    assert found.at_once >= 0
    assert found.nbytes >= 0
    if found.nbytes:
        # With all that tensors will need, everything is there, and the driver keeps something.
        moving = max(0, usage.need - there.allocated)
        need = there.allocated + moving + moving // 16  # the allocator loses some to fragments
        left = there.free + there.reserved - need - found.nbytes
        assert left >= 256 * MiB
        if below:
            assert usage.need + found.nbytes <= usage.most
    if found.at_once:
        assert there.free - found.at_once >= 256 * MiB
        if below:
            assert there.reserved + found.at_once <= usage.most
    unlimited = room_on(there, usage, below=False)
    assert found.nbytes <= unlimited.nbytes
    assert room_on(there, None, below=True).nbytes <= unlimited.nbytes


@given(devices(), st.integers(-(1 << 30), 1 << 34))
def test_a_plan_takes_what_the_allocator_needs_less_or_little(device, less):
    """Where the allocator's history is known."""
    there, usage = device
    found = room_on(there, evolve(usage, less=less), below=True)
    tensors = max(0, usage.most - usage.need)
    assert found.nbytes <= found.whole <= max(0, less, min(tensors, SMALL))
    unlimited = room_on(there, usage, below=False)
    assert found.whole == min(unlimited.whole, max(0, less, min(tensors, SMALL)))


@given(devices(), st.integers(0, 1 << 30), st.booleans())
def test_a_plan_that_leaves_nothing_out_may_take_what_fragments_had(device, reserve, below):
    there, usage = device
    found = room_on(there, usage, below=below, reserve=reserve)
    assert found.nbytes <= found.whole
    assert found.nbytes <= room_on(there, usage, below=below).nbytes
    left = there.free + there.reserved - max(usage.need, there.allocated) - found.whole
    if found.whole:
        assert left >= max(reserve, 256 * MiB)
        assert left == max(reserve, 256 * MiB) or found.whole == usage.most - usage.need
        assert not below or usage.need + found.whole <= usage.most


def test_what_the_plan_replaces_is_room_where_the_driver_has_none():
    there = DeviceMemory(300 * MiB, 1000 * MiB, 1000 * MiB, 200 * MiB, 864 * MiB)
    lost = (864 - 200) * MiB // 16
    assert room_on(there, None, below=True).nbytes == (300 + 136 - 256) * MiB - lost
    found = room_on(there, Usage(512 * MiB, 1000 * MiB), below=True)
    assert found.nbytes == 488 * MiB  # beside 512 that stay, as much as there was
    assert found.at_once == 0
    lost = (512 - 200) * MiB // 16
    unlimited = room_on(there, Usage(512 * MiB, 1000 * MiB), below=False)
    assert unlimited.nbytes == (300 + 1000 - 512 - 256) * MiB - lost


@given(devices(), st.integers(0, 1 << 37), st.booleans())
def test_what_is_there_between_steps_takes_nothing_for_fragments(device, stays, below):
    there, usage = device
    more = evolve(
        there,
        reserved=there.reserved + stays,
        most_reserved=there.most_reserved + stays,
        allocated=there.allocated + stays,
        most_allocated=there.most_allocated + stays,
    )
    beside = Usage(usage.need + stays, usage.most + stays)
    if usage.need >= there.allocated:
        assert room_on(more, beside, below=below) == room_on(there, usage, below=below)
    assert room_on(more, None, below=below) == room_on(there, None, below=below)


# What a recorded step needs besides.


class _Allocator:
    """Counts bytes, as torch's does."""

    def __init__(self):
        self.ordinary = self.replaced = self.most = self.most_ordinary = 0

    @property
    def allocated(self):
        return self.ordinary + self.replaced

    def change(self, ordinary=0, replaced=0):
        self.ordinary += ordinary
        self.replaced += replaced
        # Of the ordinary bytes those count that were there when more was allocated than ever.
        if self.allocated > self.most:
            self.most, self.most_ordinary = self.allocated, self.ordinary


_bytes = st.integers(0, 500)


@example([(0, 0, 50)], 0, set())
@given(
    st.lists(st.tuples(*[st.integers(0, 500)] * 3), min_size=1, max_size=12),
    st.integers(0, 400),
    st.sets(st.integers(0, 11)),
)
def test_the_need_of_a_recorded_step_is_what_is_left_without_its_own_buffers(
    layers, left, ordinary
):
    """Each layer: bytes that it saves for backward, that it has for a moment, and others behind.

    The plan leaves some layers ``ordinary``.
    """
    allocator, recording, seen, looked = _Allocator(), Recording(), [0], [0]
    stay, stays = [0], [0]
    sizes = [64 * (i % 3 + 1) for i in range(len(layers))]

    def look(*, own=False):
        grown = bool(recording.moments) and allocator.most > looked[0]
        most = allocator.most if grown else allocator.allocated
        looked[0] = allocator.most
        recording.moments.append(Look(len(recording.events), allocator.allocated, most, own))
        seen.append(allocator.ordinary)
        stays.append(allocator.ordinary + stay[0])

    def replaced(i, nbytes):
        allocator.change(replaced=nbytes)
        stay[0] += nbytes if i in ordinary else 0

    def gathered(i, *, backward):
        look()
        key = Key(f"l{i}", "all_gather", sizes[i], "uint8", backward)
        index = recording.begin(key, sizes[i])
        replaced(i, sizes[i])
        look(own=True)
        recording.run(index, "g")
        replaced(i, sizes[i])  # the parameters
        recording.filled[index] = len(recording.events)
        look(own=True)
        recording.drop(index)
        replaced(i, -sizes[i])
        return index

    for backward in (False, True):
        for i, (saved, moment, behind) in list(enumerate(layers))[:: -1 if backward else 1]:
            index = gathered(i, backward=backward)
            allocator.change(ordinary=moment)
            allocator.change(ordinary=-moment)
            allocator.change(ordinary=-saved if backward else saved)
            look()
            recording.release(index)
            replaced(i, -sizes[i])
            allocator.change(ordinary=behind)
            allocator.change(ordinary=-behind)
    allocator.change(ordinary=left)
    look()
    unsharded = {f"l{i}": n for i, n in enumerate(sizes)}
    need, peak, slack = needed(recording, unsharded)
    # What the step leaves behind is there in the next one while it does all that again.
    assert need >= left + max(seen[:-1])
    assert need >= allocator.most_ordinary
    assert allocator.most <= peak <= allocator.most + left
    assert need <= peak
    assert needed(Recording(), {}) == (0, 0, ())

    def more(which):
        def algorithm(call):
            return "ordinary" if int(call.key.site[1:]) in which else "symmetric"

        return needed_more(recording, recording.collectives, unsharded, algorithm, slack)

    assert more(()) == 0
    assert need + more(range(12)) == peak
    assert left + max(stays[:-1]) <= need + more(ordinary) <= peak


# Ranks whose device is full.


class _Device:
    """A device of a rank on the CPU: FSDP2's recorded buffers, besides them so many bytes."""

    def __init__(self, total, base, cached):
        self.total, self.base = total, base
        self.reserved, self.most = cached, 0
        self.used, self.emptied = [], 0
        self.usage = None

    def memory(self, _):
        from symmplan.process import PROCESS

        live = {}
        for runtime in PROCESS.watchers:
            log = runtime.recorder.log
            for what, index in [] if log is None or runtime.schedule else log.events:
                if what == "begin":
                    live[index] = log.collectives[index].nbytes
                elif what == "drop":
                    live.pop(index, None)
        allocated = self.base + sum(live.values())
        self.most = max(self.most, allocated)
        self.reserved = max(self.reserved, allocated)
        held = sum(s.nbytes for s in symmplan.segments())
        self.used.append(self.reserved + held)
        return DeviceMemory(
            self.total - self.used[-1], self.reserved, self.most_reserved, allocated, self.most
        )

    @property
    def most_reserved(self):
        self.usage = max(self.usage or 0, self.reserved)
        return self.usage

    def empty(self, _):
        self.emptied += 1
        self.reserved = self.base


def _with_device(rank, world, totals, base, cached, live=None):
    from symmplan.integrate.fsdp import program_usage as usage
    from symmplan.runtime import prepare

    device = _Device(totals[rank], base, cached)
    before = usage.device_memory, room.device_memory, prepare.empty_cache
    usage.device_memory = room.device_memory = device.memory
    prepare.empty_cache = device.empty
    try:
        result = budget_programs.fsdp(rank, world, "placed", unsharded_modules=live)
        device.memory(None)
    finally:
        usage.device_memory, room.device_memory, prepare.empty_cache = before
    return {**result, "emptied": device.emptied, "used": max(device.used), "usage": device.usage}


_BASE, _ROOM = 1 << 30, 400 * MiB


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize("cached", [_BASE, _BASE + _ROOM])
def test_a_full_device_gives_its_cache_up_once_for_a_plan(two, cached):
    totals = [cached + (1 << 20), cached + 2 * _ROOM]  # the first has nothing that is free
    results = two.run(_with_device, totals, _BASE, cached)
    assert len({r["looked"]["fingerprint"] for r in results}) == 1
    for result in results:
        assert result["differences"] == []
        assert result["held"] == 0
        assert result["warned"] == []
        placed = result["stats"]["served"]
        # All ranks do alike: what the first has cached is room, where nobody needs it.
        assert bool(placed) == (cached > _BASE)
        assert result["emptied"] == bool(placed)
        assert result["used"] <= max(result["usage"], cached)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
def test_the_cache_stays_where_a_plan_fits_without(two):
    for result in two.run(_with_device, [_BASE * 4] * 2, _BASE, _BASE):
        assert result["stats"]["served"] > 0
        # Allocator and plan have no more than the allocator had, so the gathers' own bytes go back.
        assert result["emptied"] == 1
        assert result["used"] <= result["usage"] + result["bytes"][0]
    for result in two.run(_with_device, [_BASE * 4] * 2, _BASE, _BASE // 2, 2):
        assert result["stats"]["served"] > 0
        assert result["emptied"] == 0
