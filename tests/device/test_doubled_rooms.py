"""What an FSDP2 model takes of a device beyond its tensors, and a device that torch's cache fills.

Doubles of the device and of NCCL count bytes; see `doubles`.
"""

from __future__ import annotations

import functools
import math
from unittest import mock

import pytest
import torch
from doubles import on_devices, state
from doubles.network import BYTES, RESTRICTED, WINDOW
from ranks import pool_of
from torch.utils._python_dispatch import TorchDispatchMode

import symmplan
from symmplan.choose.choice import NO_ROOM
from symmplan.integrate.fsdp.program_usage import ProgramUsage
from symmplan.memory.room import Room
from symmplan.process import PROCESS

two = pool_of(2, timeout=120)

GiB, MiB = 1 << 30, 1 << 20
#: What torch's allocator has cached of what the program did before.
HAD = 4 * GiB
#: The same, for room for slots also where FSDP2 frees gradients before it reduces them.
CACHED = 32 * MiB


def _trained(rank, world, choose, **options):
    """Three steps of a model: what was taken, and what ran over communicators for copy engines."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (world,)))
    handle = symmplan.fsdp.apply(model, choose=choose, timeout=30.0, **options)
    for step in range(3):
        model(torch.full((4, 1024), float(rank + step))).square().mean().backward()
    engines = [group.group_name for group in PROCESS.engines_made.values()]
    ran = {name for name, group in state().network.kernels if group in engines}
    found = handle.stats, ran, dict(state().device.taken), state().device.cached
    handle.remove()
    return found


def _in_room(rank, world, choose, free, window=WINDOW, **options):
    """``free`` is what the driver has free beside the cache and the program's communicator."""
    run = functools.partial(_trained, **options)
    with mock.patch("doubles.network.WINDOW", window):
        return on_devices(rank, world, run, choose, total=HAD + BYTES + free)


def _full(rank, world, free, had=0):
    """``free`` is what the driver has free beside the cache and the program's communicator."""
    return on_devices(rank, world, _trained, "measure", total=had + BYTES + free, had=had)


def _measured(rank, world, *, keeps=False):
    """Bytes that the allocator has cached when a measurement makes communicators, and in the end.

    ``keeps`` is whether replays say that it should keep them.
    """
    from symmplan.choose import trials

    cached, made = [], trials.engines_of

    def engines_of(*args):
        cached.append(state().device.cached)
        return made(*args)

    with (
        mock.patch.object(trials, "engines_of", engines_of),
        mock.patch.object(ProgramUsage, "keeps_cache", keeps),
    ):
        *_, last = _trained(rank, world, "measure")
    return *cached, last


def _full_later(rank, world, choose):
    """To what a device that is full now limits a plan that is made anew."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (world,)))
    handle = symmplan.fsdp.apply(model, choose=choose, timeout=30.0)
    with _pushes_are_fastest():
        for _ in range(3):
            model(torch.full((4, 1024), float(rank))).square().mean().backward()
    planning = handle._runtime.planning
    with mock.patch.object(planning._memory, "room", return_value=Room(0, 0, 0)):
        found = handle.stats.placed > 0, planning.fitting.limited([], {}, {})
    handle.remove()
    return found


def _with_modules(rank, world, window):
    """More modules may be unsharded than before, so a plan need not stay below what there was."""
    return _in_room(rank, world, "symmetric", 320 * MiB, window, unsharded_modules=2)


@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("choose", "free"),
    [
        ("push", 64 * GiB),
        pytest.param("push", 30 * MiB, marks=pytest.mark.further),  # less than a window takes
        pytest.param("copy engine", 64 * GiB, marks=pytest.mark.further),
        pytest.param("copy engine", 30 * MiB, marks=pytest.mark.further),
        pytest.param("symmetric", 30 * MiB, marks=pytest.mark.further),
    ],
)
def test_a_model_takes_little_beside_its_segments_also_where_the_cache_has_the_device(
    two, choose, free
):
    for stats, ran, taken, cached in two.run(_in_room, choose, free):
        assert (stats.served, stats.plain, stats.reasons) == (2 * 3 * 3, 0, ())
        # No ordinary collective runs there, and no second communicator is made.
        assert ran == {"Memcpy PtoP (Device -> Device)"} or choose == "symmetric"
        by_engines = choose in ("push", "copy engine")
        ours = 0 if choose == "symmetric" else RESTRICTED
        assert taken["communicators"] == BYTES + ours
        assert taken["windows"] == (2 * WINDOW if by_engines else WINDOW)
        assert stats.bytes_beyond_segments == taken["windows"] + ours
        assert stats.bytes_without_owner == 0
        if by_engines:
            causes = {"rendezvous": WINDOW, "communicators": RESTRICTED + WINDOW}
            assert dict(stats.beyond_segments) == causes
        assert cached == 0 or free > WINDOW


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
def test_what_cannot_be_registered_beside_the_cache_is_placed_without_it(two):
    """There is room for the segment beside the cache, but not for its window."""
    for stats, _, _, cached in two.run(_with_modules, 400 * MiB):
        assert (stats.served, stats.plain, stats.reasons) == (2 * 3 * 3, 0, ())
        assert cached == 0


def _pushes_are_fastest():
    """Measurements in which pushes and copy engines are."""
    from symmplan.choose import trials

    def seconds_of(clock, acts, *_, **__):
        return {name: 1e-4 if name in ("push", "copy engine") else 5e-4 for name in acts}

    return mock.patch.object(trials, "seconds_of", seconds_of)


def _budgets(rank, world, capacities):
    """Bytes of plans whose collectives were measured; pushes and copy engines were fastest."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    found = []
    with _pushes_are_fastest():
        for capacity in capacities:
            model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(3)))
            for module in (*model, model):
                fully_shard(module, mesh=dist.init_device_mesh("cpu", (world,)))
            handle = symmplan.fsdp.apply(model, choose="measure", capacity=capacity, timeout=30.0)
            for step in range(2):
                model(torch.full((4, 512), float(rank + step))).square().mean().backward()
            after = {demotion.after for demotion in getattr(handle.plan.budget, "demotions", ())}
            found.append((handle.plan.peak_bytes, after))
            handle.remove()
    return found


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.all_cases
def test_measured_pushes_keep_to_any_capacity(two):
    """One slot for all of them is what they take next, and then none."""
    capacities = [64 * MiB, 2 * MiB, 1 * MiB, 0]
    first, second = two.run(on_devices, _budgets, capacities)
    print(first)
    assert first == second
    assert all(nbytes <= capacity for (nbytes, _), capacity in zip(first, capacities, strict=True))
    assert any("shared push" in after for _, after in first)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize("free", [128 * MiB, 512 * MiB, 526 * MiB])  # the last: to measure
def test_where_nothing_can_be_placed_nothing_is_measured(two, free):
    """Communicators and windows would take bytes that the program needs."""
    for stats, ran, taken, _ in two.run(_full, free):
        assert (stats.served, stats.plain) == (0, 2 * 3 * 3)
        assert [reason for reason, _ in stats.reasons] == [NO_ROOM]
        assert ran == set()
        assert taken == {"communicators": BYTES}
        assert stats.bytes_beyond_segments == 0


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.all_cases
def test_where_there_is_room_for_all_of_it_it_is_measured(two):
    for stats, _, taken, _ in two.run(_full, 128 * MiB, 768 * MiB):
        assert taken["communicators"] > BYTES
        assert NO_ROOM not in dict(stats.reasons)


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.all_cases
def test_a_measurement_takes_nothing_beside_what_the_allocator_has_cached(two):
    """Else communicators and windows come on top of the most that the program has."""
    for measured, _ in two.run(on_devices, _measured):
        assert measured == 0


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
def test_the_allocator_keeps_its_cache_where_replays_say_so(two):
    run = functools.partial(on_devices, total=HAD + BYTES + 400 * MiB)
    for each in two.run(run, functools.partial(_measured, keeps=True)):
        assert all(HAD - 256 * MiB < cached <= HAD for cached in each)


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.all_cases
def test_what_was_placed_is_measured_where_the_device_is_full_later(two):
    """It takes nothing more, as its communicators and windows are there."""
    assert two.run(on_devices, _full_later, "measure") == [(True, None)] * 2
    assert two.run(on_devices, _full_later, "ordinary") == [(False, 0)] * 2


def _again(rank, world):
    """The same model three times: placed collectives, bytes of segments, what was taken."""
    found = []
    with _pushes_are_fastest():
        for _ in range(3):
            stats, _, taken, _ = _trained(rank, world, "measure")
            found.append((stats.placed, stats.segment_bytes, taken))
    return found


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
def test_segments_that_nobody_uses_serve_the_next_plan_where_the_device_is_full(two):
    """They were made where there was room for them, once."""
    run = functools.partial(on_devices, total=CACHED + BYTES + 256 * MiB, had=CACHED)
    for first, *others in two.run(run, _again):
        placed, segment_bytes, _ = first
        assert placed == 9
        assert segment_bytes > 0
        assert others == [first] * 2


def _limited(rank, world, room):
    """A model that is planned in that room; pushes and copy engines are fastest."""
    from symmplan.integrate.fsdp.segments import Memory

    with _pushes_are_fastest(), mock.patch.object(Memory, "room", return_value=room):
        return _trained(rank, world, "measure")[0]


@pytest.mark.ranks
@pytest.mark.all_cases
def test_on_a_full_device_a_plan_is_whole_or_there_is_none(two):
    """Two modules are unsharded at a time, and gradients are pushed into bytes of those."""
    whole = 2 * 4 * MiB
    for stats in two.run(on_devices, _limited, Room(whole - 1, whole=whole)):
        assert (stats.served, stats.plain, stats.segment_bytes) == (2 * 3 * 3, 0, whole)
    for stats in two.run(on_devices, _limited, Room(whole - 1, whole=whole - 1)):
        assert (stats.served, stats.plain, stats.segment_bytes) == (0, 2 * 3 * 3, 0)
        assert [reason for reason, _ in stats.reasons] == [NO_ROOM]
    for stats in two.run(on_devices, _limited, Room(1 << 30)):
        assert (stats.served, stats.plain) == (2 * 3 * 3, 0)
        assert stats.segment_bytes > whole


def _replays(rank, world, planned, plain, room=None):
    """A model, where replays of rank 1's allocator say how often it retries."""
    from symmplan.capture.fsdp_reserved import Reserved

    def retries(_, algorithms, limit, plan=0):
        if rank == 0:
            return 0
        return plain if {*algorithms} == {"ordinary"} else planned

    with mock.patch.object(Reserved, "retries", retries), _pushes_are_fastest():
        return _limited(rank, world, room) if room else _trained(rank, world, "measure")[0]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("planned", "plain", "fits"),
    [(3, 3, True), (4, 3, False), (math.inf, math.inf, False), (2, math.inf, True)],
)
def test_on_a_full_device_replays_of_the_allocator_say_whether_a_plan_fits(
    two, planned, plain, fits
):
    """Whether there is room for fragments is no matter then."""
    whole = 2 * 4 * MiB
    run = functools.partial(on_devices, had=0, counted=True)
    for stats in two.run(run, _replays, planned, plain, Room(whole - 1, whole=whole - 1)):
        assert (stats.served, stats.segment_bytes) == ((2 * 3 * 3, whole) if fits else (0, 0))


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize("retries", [0, 1])
def test_where_the_allocator_would_retry_a_plan_takes_as_few_bytes_as_it_can(two, retries):
    whole = 2 * 4 * MiB
    run = functools.partial(on_devices, had=CACHED, counted=True)
    for stats in two.run(run, _replays, retries, retries):
        assert (stats.served, stats.plain) == (2 * 3 * 3, 0)
        assert (stats.segment_bytes == whole) == (retries > 0)


def _retrying(rank, world, retries):
    """A model in whose first step torch's allocator retries so often, on one rank."""
    before, first = torch.nn.Linear.forward, []

    def forward(layer, x):
        if rank == 1 and not first:
            state().device.retries += retries
        first.append(layer)
        return before(layer, x)

    with _pushes_are_fastest(), mock.patch.object(torch.nn.Linear, "forward", forward):
        return _trained(rank, world, "measure")[0]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.all_cases
@pytest.mark.parametrize("retries", [0, 1, 2, 30])
def test_where_no_history_is_kept_retries_of_the_recorded_step_decide(two, retries):
    """Once may have been for what an earlier program left in its cache."""
    whole = 2 * 4 * MiB
    run = functools.partial(_retrying, retries=retries)
    for stats in two.run(on_devices, run):
        assert (stats.served, stats.plain) == (2 * 3 * 3, 0)
        assert (stats.segment_bytes == whole) == (retries > 1)


def _replayed(rank, world, choose, without):
    """A model whose plan does not count as small: what its history allows, and what it takes."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from symmplan.integrate.fsdp import program_usage, step_plans
    from symmplan.memory import room

    if rank == without:
        state().device.history = _Nothing()
    model = torch.nn.Sequential(*(torch.nn.Linear(1792, 1792, bias=False) for _ in range(6)))
    for module in (*model, model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (world,)))
    with (
        mock.patch.object(room, "SMALL", 0),
        mock.patch.object(program_usage, "SMALL", 0),
        mock.patch.object(step_plans, "expected_beyond", return_value=0),
    ):
        handle = symmplan.fsdp.apply(model, choose=choose, timeout=30.0)
        for step in range(2):
            model(torch.full((64, 1792), float(rank + step))).square().mean().backward()
            model.zero_grad()
    usage = handle._runtime.memory.program.agreed(handle._runtime.memory.groups, 0)
    found = usage.less, handle.stats.segment_bytes
    handle.remove()
    return found


class _Nothing(list):
    """A history that is not kept."""

    def append(self, _):
        pass


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("choose", ["push", "symmetric"])
def test_a_plan_takes_no_more_than_the_history_of_the_allocator_allows(two, choose):
    """All ranks go by it, or none of them does."""
    run = functools.partial(on_devices, had=0, counted=True)
    (less, taken), (others, same) = two.run(run, _replayed, choose, None)
    assert taken == same <= min(less, others)
    (unknown, more), same = two.run(run, _replayed, choose, 1)
    assert (unknown, more) == same
    assert unknown is None
    # Pushes have slots, and keep gradients until they are over.
    assert taken < more if choose == "push" else taken == more


class _Products(TorchDispatchMode):
    """The matrix products that a program's own mode sees."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket is torch.ops.aten.mm:
            self.sizes.add((args[0].shape, args[1].shape))
        return func(*args, **(kwargs or {}))


def _set(rank, world):
    """A model that is measured in the midst of what a program has set: what ran, what it saw."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (world,)))
    handle = symmplan.fsdp.apply(model, choose="measure", timeout=30.0)
    x, made, products = torch.full((4, 1024), float(rank)), [], _Products()
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16), products:
            loss = model(x).float().square().mean()
            loss.backward()
        made.append(float(loss.detach()))
    found = made, products.sizes, {choice.op for choice in handle.choices}
    handle.remove()
    return found


@pytest.mark.further
@pytest.mark.ranks
@pytest.mark.all_cases
def test_what_a_program_has_set_does_not_reach_into_measurements(two):
    """Trials run in its thread, before the second step; parameters stay as they are."""
    for made, seen, measured in two.run(on_devices, _set):
        assert measured == {"all_gather", "reduce_scatter"}
        assert len({*made}) == 1
        assert all(1024 in (*left, *right) for left, right in seen)
