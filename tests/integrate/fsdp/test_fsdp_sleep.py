"""`Handle.sleep` and `Handle.wake`: nothing is held meanwhile, and training goes on as it was."""

from __future__ import annotations

import gc
import pathlib
import warnings

import attrs
import pytest
import torch
from doubles import on_devices, state
from doubles.network import WINDOW
from doubles.streams import capture
from fsdp_models import Net, Trace, batch, differences, mesh, sgd, shard, train_step
from ranks import pool_of
from torch.distributed.fsdp import fully_shard

import symmplan
from symmplan.device import device_of
from symmplan.errors import BackendError, ReleasedError, RunError
from symmplan.memory.backends import shm
from symmplan.process import PROCESS

pytestmark = pytest.mark.ranks

two, four = pool_of(2, timeout=120), pool_of(4, timeout=120)

TURNS = 20
SHARED = "/dev/shm"


def held():
    """How many shared files this process has mapped, and how many it has open."""
    gc.collect()
    mapped = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    links = pathlib.Path("/proc/self/fd").iterdir()
    files = [str(link.readlink()) for link in links if link.is_symlink()]
    return [sum(SHARED in text for text in texts) for texts in (mapped, files)]


def trained(rank, act, turns=TURNS, **handled):
    """A model that rests after each second step, when ``act(handle, turn)`` is done if planned."""
    torch.manual_seed(7)
    model, trace = shard(Net(blocks=3)), Trace()
    handle = symmplan.fsdp.apply(model, timeout=30.0, **handled) if handled else None
    optimizer = sgd(model)
    for step in range(4 + 2 * turns):
        if step >= 4 and step % 2 == 0:
            if handle is not None:
                act(handle, step // 2 - 2)
            trace.parameters(model)
        train_step(model, optimizer, trace, step, rank)
    return trace, handle


def _turns(rank, world, choose, wakes, held=held, turns=TURNS, **options):
    """What is held while asleep, and the counters, of a program that is compared with FSDP2."""
    before = held()
    found = {"held": [], "bytes": set(), "prints": set(), "before": before}

    def act(handle, turn):
        assert not handle.asleep
        handle.sleep()
        handle.sleep()  # it is asleep already
        assert handle.asleep
        assert not symmplan.segments()
        found["held"].append(held())
        found["bytes"].add(handle.stats.segment_bytes)
        if wakes:
            handle.wake()
            handle.wake()
            assert handle.stats.segment_bytes == handle.plan.peak_bytes
        found["prints"].add(handle.plan.fingerprint)

    plain, _ = trained(rank, act, turns)
    trace, handle = trained(rank, act, turns, choose=choose, **options)
    found["stats"], found["most"] = attrs.asdict(handle.stats), handle.plan.peak_bytes
    handle.remove()
    return found | {"differences": differences(plain, trace)}


def judge(found, meetings, turns=TURNS):
    stats = found["stats"]
    assert found["differences"] == []
    assert found["bytes"] == {0}
    assert len(found["prints"]) == 1
    assert stats["sleeps"] == turns
    assert stats["rendezvous"] == meetings * (1 + turns)
    assert stats["recorded"] == 11  # the first step alone
    assert [stats[name] for name in ("plain", "copies", "replans", "reordered")] == [0] * 4


@pytest.mark.further
@pytest.mark.parametrize("wakes", [True, False])
@pytest.mark.parametrize("choose", ["push", "placed"])
def test_turns_have_the_same_bits_and_hold_nothing_while_asleep(two, choose, wakes):
    for found in two.run(_turns, choose, wakes):
        judge(found, 1)  # one segment, one group
        assert found["held"] == [found["before"]] * TURNS


def _taken():
    """Bytes of the device that segments and all beyond them have."""
    gc.collect()
    device = state().device
    return device.segments, sum(device.taken.values())


@pytest.mark.parametrize(
    ("memory", "choose", "meetings"),
    [
        ("nccl", "copy engine", 2),  # with the communicator for copy engines, too
        pytest.param("nccl", "push", 2, marks=pytest.mark.further),
        pytest.param("nccl", "placed", 1, marks=pytest.mark.further),
        pytest.param("cuda", "push", 1, marks=pytest.mark.further),
    ],
)
def test_a_device_has_its_bytes_back_and_those_of_communicators(two, memory, choose, meetings):
    options = {"held": _taken, "memory": memory, "turns": 4}
    for found in two.run(_on_devices, choose, options):
        judge(found, meetings, 4)
        (segments, beyond), *others = found["held"]
        assert segments == 0
        assert others == [(segments, beyond)] * 3  # nothing grows
        # What stays is of the program's own communicator, as long as that lives.
        stays = WINDOW if memory == "nccl" else 0
        assert beyond - found["before"][1] == stays
        assert dict(found["stats"]["beyond_segments"]).get("rendezvous", 0) == stays


def _on_devices(rank, world, choose, options):
    def run(rank, world):
        # The program's own communicator is there before.
        torch.distributed.all_reduce(torch.ones(1))
        return _turns(rank, world, choose, wakes=False, **options)

    return on_devices(rank, world, run, counted=True)


def _share_communicators(rank, world):
    """Two models and a session sleep one after the other: which communicators there are, and bits.

    All run over one communicator for copy engines.
    """
    found, over = [], {"choose": "copy engine", "memory": "nccl", "timeout": 30.0}
    name, x = torch.distributed.group.WORLD.group_name, torch.arange(4096.0) + rank

    def gathered():
        gather = torch.ops._c10d_functional.all_gather_into_tensor
        return torch.ops._c10d_functional.wait_tensor(gather(x * 2, world, name)).sum()

    def trained(act, apply):
        trace, models = Trace(), []
        for number in range(2):
            torch.manual_seed(number)
            models.append(shard(Net()))
        handles = [apply(model) for model in models]
        optimizers = [sgd(model) for model in models]
        for turn in range(6):
            for model, optimizer in zip(models, optimizers, strict=True):
                train_step(model, optimizer, trace, turn, rank)
            trace.add("gathered", gathered())
            act(turn, handles)
        return trace, handles

    def act(turn, handles):
        session.step()
        a, b = handles
        for each in [(), (a,), (session,), (b, a), (), (b, session, a)][turn]:
            each.sleep()
        found.append(len(PROCESS.engines_made))

    plain, _ = trained(lambda *_: None, lambda _: None)
    with symmplan.eager(**over) as session:
        planned, handles = trained(act, lambda model: symmplan.fsdp.apply(model, **over))
    for handle in handles:
        handle.remove()
    return found, differences(plain, planned), state().network.refused


@pytest.mark.long
def test_a_communicator_stays_while_a_program_that_is_awake_runs_over_it(two):
    for found, wrong, refused in two.run(on_devices, _share_communicators):
        assert wrong == refused == []
        assert found == [1, 1, 1, 1, 1, 0]


def _refused(rank, world):
    """Where a rank alone keeps what it computed, no rank sleeps, and training goes on."""
    kept, said = [], []

    def act(handle, turn):
        if turn % 2 == rank:
            kept.append(model(batch(turn, rank)))
        else:
            model(batch(turn, rank))
        with pytest.raises(RunError, match="are in use") as caught:
            handle.sleep()
        said.append(str(caught.value))
        assert not handle.asleep
        kept.clear()
        handle.sleep()

    torch.manual_seed(7)
    model = shard(Net(blocks=3))
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=30.0)
    optimizer, trace = sgd(model), Trace()
    for step in range(8):
        if step >= 4:
            act(handle, step)
        train_step(model, optimizer, trace, step, rank)
    slept = handle.stats.sleeps
    handle.sleep()
    handle.remove()  # asleep
    with pytest.raises(ReleasedError):
        handle.sleep()
    with pytest.raises(ReleasedError):
        handle.wake()
    return said, slept, held()


def test_nobody_sleeps_while_a_rank_alone_has_views(two):
    for said, slept, _ in two.run(_refused):
        assert len(said) == slept == 4
        assert all("backward()" in text for text in said)


def _captured(rank, world):
    """A step is captured in a CUDA graph, once while asleep, and once awake."""

    def program(rank, world):
        model = shard(Net(blocks=2))
        handle = symmplan.fsdp.apply(model, memory="nccl", choose="placed", timeout=30.0)
        optimizer, trace = sgd(model), Trace()
        for step in range(3):
            train_step(model, optimizer, trace, step, rank)
        x, device = batch(0, rank), device_of(torch.device("cpu"))
        handle.sleep()
        said = []
        with device.on_stream(device.new_stream()), capture():
            with pytest.raises(RunError, match="is being captured") as caught:
                model(x)
            said.append(str(caught.value))
        handle.wake()
        handle._runtime.memory.capture = 1  # FSDP2 has no streams on a CPU to be captured
        with pytest.raises(RunError) as caught:
            handle.sleep()
        (segment,) = handle._runtime.memory.arena.segments.values()
        asleep = handle.asleep
        handle.remove()
        return [*said, str(caught.value)], f"{segment.address:#x}", asleep

    return on_devices(rank, world, program)


def test_what_a_captured_graph_has_addresses_of_stays(two):
    results = two.run(_captured)
    address = results[0][1]  # all say what the first says
    for (first, second), _, asleep in results:
        assert "handle.wake()" in first
        assert not asleep
        assert "captured CUDA graph" in second
        assert address in second


def _refused_in_a_mesh(rank, world):
    """Rank 0 alone has a graph that is alive; rank 3 is in no group with it."""
    whole = mesh(2, 2, names=("rows", "columns"))
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(2)))
    for layer, name in zip(model, ("rows", "columns"), strict=True):
        fully_shard(layer, mesh=whole[name])
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=30.0)
    for step in range(3):
        model(batch(step, rank)).sum().backward()
    kept = [model(batch(3, rank))]
    if rank:
        kept.clear()
    said = ""
    try:
        handle.sleep()
    except RunError as error:
        said = str(error)
    asleep = handle.asleep
    kept.clear()
    handle.sleep()
    model(batch(4, rank)).sum().backward()
    sleeps = handle.stats.sleeps
    handle.remove()
    return said, asleep, sleeps


def test_all_ranks_of_a_mesh_hear_who_does_not_sleep(four):
    results = four.run(_refused_in_a_mesh)
    assert results == [(results[0][0], False, 1)] * 4
    assert "are in use" in results[0][0]


def _no_room(rank, world):
    """When it wakes, rank 1 cannot have its memory any more."""
    allocate = shm.ShmBackend.allocate

    def full(*args, **kwargs):
        raise BackendError("no memory is left", fix="wait")

    def act(handle, turn):
        handle.sleep()
        if turn == 1 and rank == 1:
            shm.ShmBackend.allocate = full

    plain, _ = trained(rank, act, turns=4)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trace, handle = trained(rank, act, turns=4, choose="placed")
    finally:
        shm.ShmBackend.allocate = allocate
    stats = handle.stats
    handle.remove()
    return differences(plain, trace), stats, [str(one.message) for one in told]


@pytest.mark.long
def test_where_a_rank_cannot_have_memory_again_all_run_in_torchs_way(two):
    results = two.run(_no_room)
    for wrong, stats, _ in results:
        assert wrong == []
        assert stats.placed == stats.segment_bytes == 0
        assert any("no memory is left" in why for why, _ in stats.reasons)
    assert any("no memory is left" in text for *_, told in results for text in told)


def _before_a_plan(rank, world):
    model = shard(Net(blocks=2))
    handle = symmplan.fsdp.apply(model, choose="placed", timeout=30.0)
    handle.sleep()
    handle.wake()
    asleep, sleeps = handle.asleep, handle.stats.sleeps
    handle.remove()
    return asleep, sleeps


def test_before_there_is_a_plan_nothing_happens(two):
    assert two.run(_before_a_plan) == [(False, 0)] * 2
