"""Who waits for whom on a device's streams, with streams that only write down what is asked."""

from __future__ import annotations

import contextlib

import pytest
import torch

from symmplan.device import Device, device_of, replace_kind
from symmplan.errors import RunError
from symmplan.memory.streams import beside, mark, off_default_stream, synchronize, wait_for
from symmplan.process import PROCESS

CPU = torch.device("cpu")


class _Event:
    def __init__(self, name):
        self.name = name

    def wait(self, stream=None):
        (stream or _Streams.now).told.append(f"waits for {self.name}")


class _Work:
    def wait(self):
        _Streams.now.told.append("waits for a work")


class _Stream:
    def __init__(self, name):
        self.name, self.told, self.capture = name, [], 0

    def wait_stream(self, other):
        self.told.append(f"waits for {other.name}")

    def record_event(self):
        return _Event(f"event of {self.name}")


class _Streams(Device):
    """A device whose streams only write down for whom they wait."""

    is_accelerator = True
    event_type = _Event
    default = now = _Stream("default")

    def current_stream(self):
        return _Streams.now

    def default_stream(self):
        return self.default

    def new_stream(self):
        return _Stream("side")

    @contextlib.contextmanager
    def on_stream(self, stream):
        before, _Streams.now = _Streams.now, stream
        yield
        _Streams.now = before

    def is_capturing(self):
        return bool(_Streams.now.capture)

    def capture_of(self, stream=None):
        return (stream or _Streams.now).capture


@pytest.fixture
def default(monkeypatch):
    monkeypatch.setattr(PROCESS, "side_streams", {})
    replace_kind("cpu", _Streams)
    _Streams.default = _Streams.now = _Stream("default")
    yield _Streams.default
    replace_kind("cpu", None)


def test_the_current_stream_waits_for_marks_of_its_capture_alone(default):
    there, other = device_of(CPU), _Stream("other")
    other.capture = 7
    marks = [
        mark(default.record_event(), there),
        mark(other.record_event(), there, other),
        mark(_Work(), there),
    ]
    wait_for(marks)
    assert default.told == ["waits for event of default", "waits for a work"]
    with there.on_stream(other):
        wait_for(marks)
    assert other.told == ["waits for event of other"]
    wait_for([])


def test_work_leaves_the_default_stream_in_its_order(default):
    with off_default_stream(CPU):
        side = _Streams.now
    assert [side.told, default.told] == [["waits for default"], ["waits for side"]]
    with device_of(CPU).on_stream(_Stream("other")), off_default_stream(CPU):
        assert _Streams.now.name == "other"
    with off_default_stream(CPU):
        assert _Streams.now is side


def test_work_beside_is_behind_the_current_stream_and_is_waited_for_once(default):
    ran = []
    work = beside(lambda: ran.append(_Streams.now), CPU, "one of them", torch.ones(1))
    (side,) = ran
    assert [side.told, default.told] == [["waits for default"], []]
    work.wait()
    work.wait()
    assert default.told == ["waits for event of side"]


def test_nobody_waits_for_a_device_in_a_capture(default):
    synchronize(CPU)
    default.capture = 1
    with pytest.raises(RunError, match="while a CUDA graph is being captured"):
        synchronize(CPU)


def test_on_the_cpu_work_is_over_at_once():
    ran = []
    assert beside(lambda: ran.append(1), CPU, "one of them") is None
    with off_default_stream(CPU):
        assert ran == [1]
