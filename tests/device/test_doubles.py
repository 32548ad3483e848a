"""The doubles of a device and of NCCL refuse what the real ones refuse, and do their work late."""

from __future__ import annotations

import os
import re

import pytest
import torch
from doubles import installed, on_devices, state
from doubles.network import BYTES, RESTRICTED, WINDOW
from doubles.streams import capture
from paths import TESTS
from ranks import pool_of

from symmplan.device import device_of, kind_of
from symmplan.integrate.fsdp.push import Pushes
from symmplan.model import Placement
from symmplan.torch_private import nccl, peers, symm_mem

CPU = torch.device("cpu")

F = torch.ops._c10d_functional

two = pool_of(2, timeout=60)


@pytest.fixture
def device():
    with installed(total=1000, had=0):
        yield device_of(CPU)


# Streams.


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_push_is_one_launch_for_any_number_of_ranks(device, ranks):
    me = ranks // 2
    gradients = [torch.randn(2 * ranks, 3) for _ in range(9)]
    numel = sum(g.numel() for g in gradients)
    segments = [torch.zeros(4 * numel, dtype=torch.uint8) for _ in range(ranks)]
    pushes = Pushes(segments, None, me, CPU)
    pushes.send(gradients, Placement("s", 0, 4 * numel), torch.float32)
    assert kind_of(CPU).launches == 1
    device.synchronize()
    for rank, segment in enumerate(segments):
        parts = [g.chunk(ranks)[rank].reshape(-1) for g in gradients]
        assert torch.equal(segment.view(torch.float32).view(ranks, -1)[me], torch.cat(parts))


def test_what_is_queued_runs_when_somebody_waits_for_it(device):
    stream, x = device.new_stream(), torch.zeros(2)
    with device.on_stream(stream):
        x.add_(1)
        first = stream.record_event()
        x.mul_(3)
    assert x.tolist() == [0, 0]
    first.wait()  # the default stream
    assert x.tolist() == [1, 1]
    device.synchronize()
    assert x.tolist() == [3, 3]


def test_what_makes_a_tensor_runs_behind_what_its_stream_has_queued(device):
    stream, x = device.new_stream(), torch.zeros(2)
    with device.on_stream(stream):
        x.add_(1)
        y = x + 1
    assert y.tolist() == [2, 2]


def test_work_reads_what_is_there_when_it_runs(device):
    """So it reads wrong bytes if whoever writes them does not wait."""
    stream, x, y = device.new_stream(), torch.ones(2), torch.zeros(2)
    with device.on_stream(stream):
        y.copy_(x)
    x.fill_(7)
    device.synchronize()
    assert y.tolist() == [7, 7]


def test_streams_wait_for_each_other(device):
    first, second = device.new_stream(), device.new_stream()
    x, y = torch.zeros(2), torch.zeros(2)
    with device.on_stream(first):
        x.fill_(4)
    second.wait_stream(first)
    with device.on_stream(second):
        y.copy_(x)
    second.synchronize()
    assert y.tolist() == [4, 4]


def test_an_event_that_is_asked_often_comes(device):
    stream, x = device.new_stream(), torch.zeros(2)
    with device.on_stream(stream):
        x.add_(1)
        x.add_(1)
    event = stream.record_event()
    assert [event.query() for _ in range(3)] == [False, False, True]


def test_counters_of_versions_move_when_work_is_queued(device):
    """Autograd saved what was there behind it."""
    stream, x = device.new_stream(), torch.zeros(2)
    with device.on_stream(stream):
        x.add_(1)
    version = x._version
    device.synchronize()
    assert (version, x._version) == (1, 1)


@pytest.mark.parametrize(
    "act",
    [
        lambda device, stream, before: device.synchronize(),
        lambda device, stream, before: stream.synchronize(),
        lambda device, stream, before: stream.wait_event(before),
        lambda device, stream, before: symm_mem.empty(8, CPU),
        lambda device, stream, before: nccl.allocate(8, CPU),
        lambda device, stream, before: device.empty_cache(),
    ],
    ids=["synchronize", "stream", "wait outside", "map", "allocate", "empty the cache"],
)
def test_a_capture_refuses(device, act):
    other, stream = device.new_stream(), device.new_stream()
    before = other.record_event()
    with device.on_stream(stream), capture() as number:
        assert device.is_capturing()
        assert device.capture_of(stream) == number
        with pytest.raises(RuntimeError, match="CUDA error"):
            act(device, stream, before)
    assert not device.is_capturing()


# Bytes.


def test_a_device_has_no_more_bytes_than_it_has(device):
    kept = symm_mem.empty(600, CPU)
    assert device.free_bytes() == (400, 1000)
    with pytest.raises(RuntimeError, match="out of memory"):
        symm_mem.empty(401, CPU)
    with pytest.raises(RuntimeError, match="out of memory"):
        nccl.allocate(401, CPU)
    with pytest.raises(RuntimeError, match="out of memory"):
        state().device.take("kernels", 401)
    view = kept[:5]
    del kept
    assert device.free_bytes() == (400, 1000)
    del view
    assert device.free_bytes() == (1000, 1000)


def test_what_tensors_leave_is_cached_until_the_cache_is_emptied():
    with installed(total=1000, had=0, counted=True):
        device, block = device_of(CPU), torch.empty(75)
        assert (device.memory().allocated, device.memory().reserved) == (300, 300)
        del block
        there = device.memory()
        assert (there.free, there.reserved, there.allocated) == (700, 300, 0)
        assert (there.most_reserved, there.most_allocated) == (300, 300)
        device.empty_cache()
        assert device.memory().free == 1000


def test_the_tensors_of_a_program_count():
    with installed(total=1000, had=0, counted=True):
        x = torch.empty(25)
        y = x + 1
        assert state().device.allocated == 200
        del y
        assert (state().device.allocated, state().device.cached) == (100, 100)
        x.untyped_storage().resize_(0)
        assert (state().device.allocated, state().device.cached) == (0, 200)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(251)
        assert state().device.retries == 1


def test_what_lies_in_a_segment_or_in_another_tensor_does_not_count():
    with installed(total=4096, had=0, counted=True) as doubles:
        segment, tensor = symm_mem.empty(1024, CPU), torch.empty(64)
        kept = [segment.view(torch.float32)]
        for whole in (segment, tensor):
            storage = torch._C._construct_storage_from_data_pointer(whole.data_ptr() + 16, CPU, 128)
            kept.append(torch.empty(0).set_(storage).mul_(2))
        assert doubles.device.allocated == 256
        assert doubles.device.segments == 1024
        kept.append(torch.empty(64))
        assert doubles.device.allocated == 512


def test_the_cache_is_emptied_for_what_does_not_fit_into_it():
    with installed(total=1000, had=0, counted=True):
        torch.empty(50)
        assert (state().device.cached, state().device.retries) == (200, 0)
        x = torch.empty(250)
        assert (state().device.cached, state().device.retries) == (0, 1)
        assert x.nbytes == state().device.reserved == state().device.most_reserved


# Torch's symmetric memory.


def test_one_allocator_serves_a_process(device):
    symm_mem.set_backend("NCCL")
    kept = symm_mem.empty(8, CPU)
    symm_mem.set_backend("NCCL")
    with pytest.raises(RuntimeError, match="was used"):
        symm_mem.set_backend("NVSHMEM")
    assert kept.numel() == 8


def test_cuda_s_allocator_cannot_be_chosen_by_name(device):
    symm_mem.set_backend("NCCL")
    with pytest.raises(RuntimeError, match="by name"):
        symm_mem.set_backend("CUDA")


def test_nccl_s_allocator_takes_no_group(device):
    symm_mem.set_backend("NCCL")
    with pytest.raises(RuntimeError, match="must not be called with a group_name"):
        state().memory.empty(8, CPU, "0")
    assert symm_mem.empty(8, CPU).numel() == 8


# On ranks.


def _refused(act, *args):
    """The text of the error; ranks on which there is none would wait."""
    with pytest.raises(RuntimeError) as caught:
        act(*args)
    assert str(caught.value) in state().refused
    return str(caught.value)


def _memory(rank, world):
    """What handles give and refuse."""
    import torch.distributed as dist

    group, said = dist.group.WORLD, []
    name = group.group_name
    said.append(_refused(symm_mem.rendezvous, torch.zeros(8), name))
    own = symm_mem.empty(8, CPU)
    handle = symm_mem.rendezvous(own, name)
    own.fill_(rank)
    handle.barrier(channel=0, timeout_ms=5000)
    peer = handle.get_buffer(1 - rank, (8,), torch.uint8)
    stream = device_of(CPU).new_stream()
    with device_of(CPU).on_stream(stream):
        handle.barrier(channel=1, timeout_ms=5000)
        peer.fill_(10 + rank)
        handle.barrier(channel=1, timeout_ms=5000)
    stream.synchronize()
    if rank == 0:
        with pytest.raises(RuntimeError, match="timed out"):
            handle.barrier(channel=0, timeout_ms=50)
    other = symm_mem.empty(8 + 8 * rank, CPU)
    said.append(_refused(symm_mem.rendezvous, other, name))
    return own.tolist(), said


@pytest.mark.ranks
def test_peers_map_what_the_allocator_made_and_nothing_else(two):
    for rank, (own, said) in enumerate(two.run(on_devices, _memory)):
        assert own == [11 - rank] * 8
        assert "not allocated with symmetric memory" in said[0]
        assert "ranks have [8, 16] bytes" in said[1]


def _unconnected(rank, world):
    import torch.distributed as dist

    symm_mem.set_backend("NCCL")
    group, own = dist.group.WORLD, symm_mem.empty(8, CPU)
    said = _refused(symm_mem.rendezvous, own, group.group_name)
    dist.all_reduce(torch.zeros(1))
    handle = symm_mem.rendezvous(own, group.group_name)
    with pytest.raises(RuntimeError, match="no barrier"):
        handle.barrier()
    return said


@pytest.mark.ranks
def test_nccl_registers_with_a_communicator_that_has_run_something(two):
    assert all("no communicator yet" in said for said in two.run(on_devices, _unconnected))


def _windows(rank, world):
    """Errors of windows, and what communicators and windows take."""
    import torch.distributed as dist

    group, said = dist.group.WORLD, []
    dist.all_reduce(torch.zeros(1))
    taken = [dict(state().device.taken)]
    said.append(_refused(nccl.register, torch.zeros(64, dtype=torch.uint8), group))
    first, second, third = (nccl.allocate(n, CPU) for n in (64, 32, 128))
    said.append(_refused(nccl.register, first[8:], group))
    said.append(_refused(nccl.deregister, 1, group))
    window = nccl.register(first, group)
    said.append(_refused(nccl.register, first, group))
    said.append(_refused(nccl.register, (second, third)[rank], group))
    taken.append(dict(state().device.taken))
    nccl.deregister(window, group)
    said.append(_refused(nccl.deregister, window, group))
    taken.append(dict(state().device.taken))
    window = nccl.register(second, group)
    if rank == 0:  # so it finds other room for the next one than its peer does
        nccl.deregister(window, group)
    said.append(_refused(nccl.register, third, group))
    return said, taken


@pytest.mark.ranks
def test_windows_are_of_nccl_s_memory_and_registered_once_in_one_order(two):
    for said, taken in two.run(on_devices, _windows):
        words = ["is not NCCL's", "is not NCCL's", "no such window", "registered already"]
        words += ["different windows", "no such window", "different windows"]
        assert [word for word, text in zip(words, said, strict=True) if word in text] == words
        with_one = {"communicators": BYTES, "windows": WINDOW}
        assert taken == [{"communicators": BYTES}, with_one, with_one]


def _shared(rank, world):
    """What peers map of each other."""
    import torch.distributed as dist

    own = nccl.allocate(64, CPU)
    said = _refused(peers.share, torch.zeros(8))
    file, nbytes, begin = peers.share(own[16:])
    told = [None] * world
    dist.all_gather_object(told, (os.getpid(), file))
    process, there = told[1 - rank]
    opened = os.open(f"/proc/{process}/fd/{there}", os.O_RDWR)
    peer = peers.mapped(opened, nbytes, CPU)[begin:]
    peer.fill_(rank + 1)
    dist.barrier()
    for each in (file, opened):
        os.close(each)
    return said, own.tolist()


@pytest.mark.ranks
def test_peers_map_what_nccl_has_allocated_and_nothing_else(two):
    for rank, (said, own) in enumerate(two.run(on_devices, _shared)):
        assert "cannot be exported" in said
        assert own == [0] * 16 + [2 - rank] * 48


def _engines(rank, world):
    """A gather by copy engines, and what they refuse; names, and bytes of the communicator."""
    import torch.distributed as dist

    device, group = device_of(CPU), dist.group.WORLD
    engines = nccl.copy_engine_group(group, "engines", 0)
    taken = dict(state().device.taken)
    block = nccl.allocate(64, CPU)
    own, whole = block[:16].fill_(rank), block[32:]
    ordinary, said = torch.zeros(32, dtype=torch.uint8), []
    dist.all_gather_into_tensor(ordinary, own.clone(), group=engines)
    symmetric = symm_mem.empty(64, CPU)
    said.append(_refused(lambda: dist.all_gather_into_tensor(symmetric[:32], own, group=engines)))
    nccl.register(block, engines)
    said.append(_refused(lambda: dist.all_gather_into_tensor(whole, own, group=engines)))
    stream = device.new_stream()
    stream.wait_stream(device.current_stream())
    whole.fill_(9)
    with device.on_stream(stream):
        dist.all_gather_into_tensor(whole, own, group=engines)
    late = whole.tolist()
    device.current_stream().wait_stream(stream)
    ended = whole.tolist()
    work = dist.all_gather_into_tensor(whole, own + 5, group=engines, async_op=True)
    pending = whole.tolist()
    work.wait()
    return said, taken, (late, ended, pending, whole.tolist()), state().kernels


@pytest.mark.ranks
def test_copy_engines_run_off_the_default_stream_on_what_is_registered(two):
    for said, taken, (late, ended, pending, then), kernels in two.run(on_devices, _engines):
        assert ["not registered" in said[0], "default stream" in said[1]] == [True, True]
        assert taken == {"communicators": RESTRICTED}
        assert late == [9] * 32
        assert pending == ended == [0] * 16 + [1] * 16
        assert then == [5] * 16 + [6] * 16
        copies = ["Memcpy PtoP (Device -> Device)"] * 2
        assert kernels == ["ncclDevKernel_all-gather", *copies[:1], "ncclDevKernel_all-gather"]


def _collectives(rank, world):
    """Each collective beside gloo's own, waited for and not."""
    import torch.distributed as dist

    name = dist.group.WORLD.group_name
    x = torch.arange(8.0) + 10 * rank
    run = {
        "gather": lambda: F.all_gather_into_tensor(x, 2, name),
        "gathers": lambda: F.all_gather_into_tensor_coalesced([x, x + 1], 2, name)[1],
        "scatter": lambda: F.reduce_scatter_tensor(x, "sum", 2, name),
        "reduce": lambda: F.all_reduce(x, "sum", name),
        "exchange": lambda: F.all_to_all_single(x, [4, 4], [4, 4], name),
        "broadcast": lambda: F.broadcast(x, 1, name),
    }
    wanted = {what: F.wait_tensor(act()).tolist() for what, act in run.items()}
    with installed():
        late = {what: act() for what, act in run.items()}
        wrong = [what for what, result in late.items() if result.tolist() == wanted[what]]
        wrong = wrong if rank == 0 else wrong[:-1]  # it has what it broadcasts
        wrong += [w for w, r in late.items() if F.wait_tensor(r).tolist() != wanted[w]]
        average = F.wait_tensor(F.all_reduce(x, "avg", name)).tolist()
    assert F.wait_tensor(run["gather"]()).tolist() == wanted["gather"]
    return wrong, average


@pytest.mark.ranks
def test_collectives_have_gloo_s_results_behind_their_wait(two):
    for wrong, average in two.run(_collectives):
        assert wrong == []
        assert average == [5.0 + i for i in range(8)]


def test_doubles_leave_nothing_behind():
    before = torch.cpu.Stream, nccl.serves, symm_mem.empty
    with installed():
        assert device_of(CPU).is_accelerator
        assert torch.cpu.Stream is not before[0]
        with torch.cpu.stream(torch.cpu.Stream()):
            assert not torch.cpu.current_stream().is_default
    assert (torch.cpu.Stream, nccl.serves, symm_mem.empty) == before
    assert not device_of(CPU).is_accelerator


def test_every_file_of_tests_for_devices_is_in_one_piece():
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    pieces = text.partition("## On devices")[2].partition("\n## ")[0]
    named = re.findall(r"tests/gpu/(test_\w+\.py)", pieces)
    assert sorted(named) == sorted(path.name for path in (TESTS / "gpu").glob("test_*.py"))
