"""The facade of a device: what the CPU answers, what is asked of CUDA, and a kind in its place."""

from __future__ import annotations

import ctypes
import inspect

import pytest
import torch

from symmplan.device import (
    Allocation,
    Device,
    HeldBlock,
    accelerator,
    device_of,
    kind_of,
    replace_kind,
)
from symmplan.device import cuda as module
from symmplan.device.cuda import CudaDevice
from symmplan.process import PROCESS
from symmplan.torch_private import devices

CPU = torch.device("cpu")


class Accelerator(Device):
    is_accelerator = True


@pytest.fixture
def replaced():
    replace_kind("cpu", Accelerator)
    yield
    replace_kind("cpu", None)


@pytest.fixture
def cuda(monkeypatch):
    """Two CUDA devices that tell what was asked of them; the current one is in the list."""
    monkeypatch.setattr(PROCESS, "devices", {})
    current, told = [0], []

    def tells(name, answer=None):
        def asked(*given, **named):
            told.append((name, *given, *named.values()))
            return answer

        return asked

    for name in ("current_stream", "default_stream", "set_device", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, tells(name, name))
    monkeypatch.setattr(torch.cuda, "set_stream", tells("set_stream"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 + index, 100))
    stats = {"reserved_bytes.all.current": 5, "allocated_bytes.all.peak": 4}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: stats)
    return current, told


def test_work_of_the_cpu_is_over_at_once():
    cpu = device_of(CPU)
    assert cpu is device_of(CPU)
    assert not cpu.is_accelerator
    streams = [cpu.current_stream(), cpu.default_stream(), cpu.new_stream(), cpu.event(timed=True)]
    assert streams == [None] * 4
    with cpu.current(), cpu.on_stream(None), cpu.followed({}):
        cpu.synchronize()
        cpu.empty_cache()
    assert not cpu.is_capturing()
    assert [cpu.capture_of(), cpu.stream_number(), cpu.memory(), cpu.blocked()] == [0, 0, None, []]


def test_a_device_without_an_index_is_the_current_one(cuda):
    current, told = cuda
    first = device_of(torch.device("cuda"))
    assert first.device == torch.device("cuda", 0)
    assert first is device_of(torch.device("cuda", 0))
    current[0] = 1
    second = device_of(torch.device("cuda"))
    assert second.device == torch.device("cuda", 1)
    for device in (first, second):
        device.current_stream()
        device.synchronize()
    assert told == [
        ("current_stream", 0),
        ("synchronize", 0),
        ("current_stream", 1),
        ("synchronize", 1),
    ]


def test_bytes_are_the_drivers_and_the_allocators(cuda):
    there = device_of(torch.device("cuda", 1)).memory()
    assert (there.free, there.total, there.reserved, there.most_reserved) == (11, 100, 5, 0)
    assert (there.allocated, there.most_allocated) == (0, 4)


@pytest.fixture
def history(cuda, monkeypatch):
    """What torch's allocator says of two devices, and whether it keeps a history."""
    monkeypatch.setattr(PROCESS, "histories", 0)
    parts = [{"size": 512, "state": "active_allocated"}, {"size": 1536, "state": "inactive"}]
    segment = {"device": 1, "address": 4096, "stream": 7, "segment_type": "small", "blocks": parts}
    said = {
        "segments": [{**segment, "device": 0, "address": 0}, segment],
        "device_traces": [[], []],
        "allocator_settings": {"expandable_segments": False},
    }
    kept = []

    def keep(enabled, **_):
        kept.append(enabled)

    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_snapshot", lambda: said)
    monkeypatch.setattr(memory, "_record_memory_history", keep)
    monkeypatch.setattr(memory, "get_allocator_backend", lambda: "native")
    enabled = "_cuda_isHistoryEnabled"
    monkeypatch.setattr(torch._C, enabled, lambda: bool(kept and kept[-1]), raising=False)
    return said, kept


def _alloc(address, nbytes):
    return {"action": "alloc", "addr": address, "size": nbytes, "stream": 7}


def _free(address):
    return {"action": "free_completed", "addr": address, "size": 0, "stream": 7}


def test_what_the_allocator_does_is_noted_for_each_who_asks(history):
    said, kept = history
    device = device_of(torch.device("cuda", 1))
    since, held = device.note_allocations()
    assert held == [
        HeldBlock(4096, 512, free=False, segment=4096, stream=7, small=True),
        HeldBlock(4608, 1536, free=True, segment=4096, stream=7, small=True),
    ]
    entries = said["device_traces"][1]
    entries += [{"action": "segment_alloc"}, _alloc(1, 10), _free(1), _alloc(1, 20)]
    later, _ = device.note_allocations()  # another model
    entries += [_free(1), {"action": "free_requested", "addr": 1}]
    assert kept == ["all"]
    assert device.noted_allocations(later) == [Allocation(0, 1, 0, 0)]
    assert kept == ["all"]
    assert device.noted_allocations(since) == [
        Allocation(1, 1, 10, 7),
        Allocation(0, 1, 0, 0),
        Allocation(2, 1, 20, 7),
        Allocation(0, 1, 0, 0),
    ]
    assert kept == ["all", None]


def test_a_history_that_somebody_else_asked_for_is_left_alone(history):
    _, kept = history
    kept.append("all")
    assert device_of(torch.device("cuda", 1)).note_allocations() is None
    assert kept == ["all"]


@pytest.mark.parametrize("what", ["settings", "entries"])
def test_what_cannot_be_replayed_is_not_noted(history, what, monkeypatch):
    said, kept = history
    device = device_of(torch.device("cuda", 1))
    since, _ = device.note_allocations()
    said["device_traces"][1] += [_alloc(1, 10), _alloc(2, 10)]
    if what == "settings":
        said["allocator_settings"]["expandable_segments"] = True
    else:
        monkeypatch.setattr(devices, "_ENTRIES", 2)
    assert device.noted_allocations(since) == []
    assert kept == ["all", None]


def test_the_current_stream_is_as_before_behind_another_one(cuda):
    current, told = cuda
    device = device_of(torch.device("cuda", 1))

    class Other:
        device_index = 1

    for there in (1, 0):
        current[0], told[:] = there, []
        with device.on_stream(Other):
            assert told[-1] == ("set_stream", Other)
        here = [("current_stream", 0), ("current_stream", 1)][there:]
        back = [("set_stream", "current_stream")] * len(here)
        assert told == [*here, ("set_stream", Other), *back]


class Driver:
    """CUDA's, for tensors of the CPU: what one call copies, and on which stream."""

    def __init__(self, answer=0):
        self.answer, self.streams = answer, []

    def cuMemcpyBatchAsync(  # noqa: N802 (the driver's name)
        self, targets, sources, sizes, count, options, first, number, _, stream
    ):
        assert (options._obj[0], first._obj.value, number.value) == (1, 0, 1)
        if self.answer == 0:
            tables = [
                (ctypes.c_uint64 * count.value).from_address(t.value)
                for t in (targets, sources, sizes)
            ]
            for target, source, nbytes in zip(*tables, strict=True):
                ctypes.memmove(target, source, nbytes)
        self.streams.append(stream.value)
        return self.answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", ["", "a capture", "the default stream", "a refusal"])
def test_copies_are_one_launch_where_nothing_is_captured_or_cast(cuda, monkeypatch, dtype, given):
    driver = Driver(answer=801 if given == "a refusal" else 0)
    monkeypatch.setattr(module, "_driver", lambda: driver)
    device = device_of(torch.device("cuda", 1))
    monkeypatch.setattr(device, "is_capturing", lambda: given == "a capture")
    device.stream_number = lambda: 0 if given == "the default stream" else 7
    target = torch.zeros(10)
    copy = device.copies([(0, 1, 2, target[:2]), (1, 0, 3, target[5:8]), (0, 4, 1, target[9:])])
    for step in range(2):
        first = torch.arange(5, dtype=dtype) + 10 * step
        copy([first, -first - 1])
        a, b, c, d, e, f = (first[i].item() for i in (1, 2, 0, 1, 2, 4))
        assert target.tolist() == [a, b, 0, 0, 0, -c - 1, -d - 1, -e - 1, 0, f]
    asked = dtype == torch.float32 and given in ("", "a refusal")
    assert driver.streams == [7] * 2 * asked


def test_tests_have_other_kinds(replaced):
    assert isinstance(device_of(CPU), Accelerator)
    assert accelerator() == CPU
    replace_kind("cpu", None)
    assert kind_of(CPU) is Device
    assert not device_of(CPU).is_accelerator


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has one")
def test_this_process_has_no_accelerator():
    assert accelerator() is None
    assert CudaDevice.names() == []


def test_cuda_answers_all_that_is_asked():
    names = [n for n, v in vars(Device).items() if inspect.isfunction(v) or isinstance(v, bool)]
    assert set(names) <= {*vars(CudaDevice)}
