"""Streams on the CPU whose work runs late: when something waits for it, and not before.

What is queued on the default stream runs at once. On any other stream ops that write given tensors
are queued, with their arguments. So whoever reads the result without waiting reads older bytes, on
each run alike. What computes new tensors runs behind all that its stream has queued.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_COUNT = itertools.count(1)


class Stream:
    """Work in its order.

    Attributes:
        device: Whose it is.
        queued: How many pieces of work were queued so far.
        done: How many of them have run.
        capture: Number of the capture that it is in; 0 if it is in none.
        clock: ``{stream: how many of its events precede what this one is given now}``; its own
            counts from 1. See `doubles.sanitizer`.
    """

    device = torch.device("cpu")

    def __init__(self, device=None, priority=0, *, default=False):
        self.is_default = default
        self.cuda_stream = next(_COUNT) - 1
        self.queued = self.done = 0
        self.capture = 0
        self.clock = {self: 1}
        self._work = deque()
        if not default:
            streams().made.append(self)

    def queue(self, act):
        """Let ``act()`` run behind all that was queued before."""
        self.queued += 1
        self._work.append(act)
        if self.is_default:
            self.run(self.queued)

    def run(self, until):
        """Run what is among the first ``until`` pieces and has not run."""
        while self.done < until and self._work:
            act = self._work.popleft()
            with contextlib.ExitStack() as stack:
                stack.enter_context(_disable_current_modes())
                stack.enter_context(current(streams().default))
                act()
            self.done += 1

    def wait_event(self, event):
        where, at, capture = event.where, event.at, event.capture
        if where is None or where is self:
            return
        _same_capture(self, capture)
        join(self.clock, event.clock)
        self.queue(lambda: where.run(at))

    def wait_stream(self, stream):
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self):
        _not_captured(self, "cudaStreamSynchronize")
        join(streams().host, self.clock)
        self.run(self.queued)

    def query(self):
        return self.done == self.queued


class Event:
    """A place in a stream's work; asked whether it was reached, it lets one piece run."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.where, self.at, self.capture, self._time = None, 0, 0, 0.0
        self.clock = {}

    @classmethod
    def now(cls, stream):
        """One that is recorded behind what a stream was given."""
        event = cls()
        event.record(stream)
        return event

    def record(self, stream=None):
        stream = streams().current if stream is None else stream
        self.where, self.at, self.capture = stream, stream.queued, stream.capture
        self._time = time.perf_counter()
        self.clock = dict(stream.clock)
        stream.clock[stream] += 1

    def wait(self, stream=None):
        (streams().current if stream is None else stream).wait_event(self)

    def query(self):
        if self.where is None:
            return True
        reached = self.where.done >= self.at
        if not reached:
            self.where.run(self.where.done + 1)
        else:
            join(streams().host, self.clock)
        return reached

    def synchronize(self):
        if self.where is not None:
            _not_captured(self.where, "cudaEventSynchronize")
            join(streams().host, self.clock)
            self.where.run(self.at)

    def elapsed_time(self, end):
        """Milliseconds between the moments at which the host recorded the two."""
        return max(0.0, 1000 * (end._time - self._time))


class Streams(threading.local):
    """The streams of a device: the default one, the current one of a thread, all that were made."""

    def __init__(self, default, made):
        self.default = self.current = default
        self.made = made
        #: Called with the target of each copy on a side stream.
        self.copied = lambda target: None
        #: What the host knows to be over, as ``Stream.clock``.
        self.host = {}
        #: Looks for races; None if nobody does.
        self.sanitizer = None

    def synchronize(self):
        _not_captured(self.current, "cudaDeviceSynchronize")
        for stream in self.made:
            join(self.host, stream.clock)
            stream.run(stream.queued)


class current(contextlib.AbstractContextManager):  # noqa: N801 (like `torch.cuda.stream`)
    """While inside, a stream is the current one."""

    def __init__(self, stream):
        self._stream = stream
        self._late = None

    def __enter__(self):
        self._before = streams().current
        if self._stream is None:
            return
        switch(self._stream)
        if not self._stream.is_default:
            self._late = _Late(self._stream)
            self._late.__enter__()

    def __exit__(self, *error):
        late, self._late = self._late, None
        if late is not None:
            late.__exit__(*error)
        switch(self._before)


def join(clock, other):
    """What precedes the other precedes this, too."""
    for stream, at in other.items():
        clock[stream] = max(clock.get(stream, 0), at)


def touch(tensor, op, *, writes, stream=None):
    """Work that no mode sees accesses a tensor, on the current stream if None."""
    if streams().sanitizer is not None:
        streams().sanitizer.touch(tensor, op, writes=writes, stream=stream)


def switch(stream):
    """Make a stream the current one."""
    streams().current = stream


@contextlib.contextmanager
def capture():
    """A CUDA graph is captured from the current stream: nothing may wait for the device."""
    stream = streams().current
    stream.capture = next(_COUNT)
    _CAPTURING.append(stream)
    try:
        yield stream.capture
    finally:
        for joined in _CAPTURING:
            joined.capture = 0
        _CAPTURING.clear()


class _Late(TorchDispatchMode):
    """Queues the ops that write given tensors."""

    def __init__(self, stream):
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs, stream, schema = kwargs or {}, self._stream, op._schema
        late = schema.name.startswith(("aten::", "fsdp::")) and _writes_given(schema)
        if late:
            if op is torch.ops.aten.copy_.default:
                streams().copied(args[0])
            if streams().sanitizer is not None:
                streams().sanitizer.saw(op, args, kwargs)
            stream.queue(lambda: _run(op, args, kwargs))
            return _given(schema, args, kwargs)
        if schema.name not in _FACTORIES and not getattr(op, "is_view", False):
            stream.run(stream.queued)
        return op(*args, **kwargs)


_FACTORIES = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}
_FACTORIES |= {"aten::detach", "aten::new_empty_strided", "profiler::_record_function_enter_new"}


def _run(op, args, kwargs):
    """An op below autograd, which has seen it when it was queued."""
    with _below():
        op(*args, **kwargs)


def _writes_given(schema):
    """Whether an op returns nothing but what it was given to write."""
    infos = [value.alias_info for value in schema.returns]
    return schema.is_mutable and all(info is not None and info.is_write for info in infos)


def _given(schema, args, kwargs):
    """What such an op returns."""
    named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    written = [named[a.name] for a in schema.arguments if _is_written(a) and a.name in named]
    if not schema.returns:
        return None
    return written[0] if len(schema.returns) == 1 else tuple(written)


def _is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


def _same_capture(stream, number):
    """CUDA refuses to wait in a capture for what is outside it, and the other way round.

    A stream joins a capture when it waits for an event of it.
    """
    if number and not stream.capture and not stream.is_default:
        stream.capture = number
        _CAPTURING.append(stream)
    if number != stream.capture:
        raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")


def _not_captured(stream, call):
    if stream.capture:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({call})")


_STREAMS = [None]
#: What a capture has so far.
_CAPTURING = []


def streams():
    """Those of this process's device."""
    return _STREAMS[0]


def renew():
    """Begin with none but a default stream."""
    default = Stream(default=True)
    _STREAMS[0] = Streams(default, [default])


def put(target, source):
    """Copy now, below autograd and modes."""
    with _below():
        target.copy_(source)


@contextlib.contextmanager
def _below():
    """Below autograd, its counters of versions, and modes."""
    counters = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with (
        torch.no_grad(),
        _disable_current_modes(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(counters),
    ):
        yield
