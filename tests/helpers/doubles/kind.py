"""The CPU as an accelerator: what replaces its kind in `symmplan.device`, and in ``torch.cpu``."""

from __future__ import annotations

import contextlib

import torch

from doubles.network import DEVICE_EVENT
from doubles.streams import Event, Stream, current, put, streams, touch
from symmplan.device.base import Allocation, Device, DeviceMemory


class DoubledDevice(Device):
    """See the module. The class of a process has its ``bytes``, a `doubles.capacity.Device`."""

    is_accelerator = True
    bytes = None
    launches = 0

    def __init__(self, device):
        super().__init__(torch.device("cpu"))
        self.stream_number = lambda: streams().current.cuda_stream

    def uuid(self):
        return "double"

    def current_stream(self):
        return streams().current

    def default_stream(self):
        return streams().default

    def new_stream(self):
        return Stream()

    def on_stream(self, stream):
        return current(stream)

    def number_of(self, stream):
        return getattr(stream, "cuda_stream", None)

    def event(self, *, timed=False):
        return Event(timed)

    def record_event(self):
        return streams().current.record_event()

    def record_stream(self, tensor, stream):
        """What is queued keeps its tensors, so that nothing else needs to."""

    def copies(self, pieces):
        """One launch on a side stream, as of `CudaDevice`; counted in ``launches``."""
        one_by_one = super().copies(pieces)

        def copy(sources):
            stream = streams().current
            cast = {source.dtype for source in sources} != {piece[3].dtype for piece in pieces}
            if len(pieces) < 2 or cast or stream.is_default or stream.capture:
                type(self).launches += len(pieces)
                one_by_one(sources)
                return
            type(self).launches += 1
            for source, _, _, target in pieces:
                streams().copied(target)
                touch(sources[source], "copies", writes=False)
                touch(target, "copies", writes=True)
            stream.queue(lambda: [put(t, sources[i][b : b + n]) for i, b, n, t in pieces])

        return copy

    @staticmethod
    def ran(event):
        return event.name().startswith(DEVICE_EVENT)

    def synchronize(self):
        streams().synchronize()

    def followed(self, after):
        return _followed(after)

    def is_capturing(self):
        return streams().current.capture != 0

    def capture_of(self, stream=None):
        return (streams().current if stream is None else stream).capture

    def free_bytes(self):
        return self.bytes.free, self.bytes.total

    def memory(self):
        there = self.bytes
        reserved = there.reserved
        return DeviceMemory(
            there.free,
            reserved,
            there.most_reserved,
            there.allocated,
            there.most_allocated,
            total=there.total,
            retries=there.retries,
            allocations=there.allocations,
        )

    def note_allocations(self):
        """As where nothing but what is noted is in blocks of the driver."""
        return len(self.bytes.history), []

    def noted_allocations(self, since):
        found, number = [], 0
        for block, nbytes, stream in self.bytes.history[since:]:
            number += nbytes > 0
            found.append(Allocation(number if nbytes else 0, block, nbytes, stream))
        return found

    def empty_cache(self):
        self.bytes.empty_cache()


@contextlib.contextmanager
def _followed(after):
    """Functions of streams and events are followed by others inside."""
    from doubles import streams as module

    owners = {"Event": Event, "Stream": Stream, "cuda": module.Streams}
    with contextlib.ExitStack() as stack:
        for name, then in after.items():
            owner, _, method = name.rpartition(".")
            replaced(stack, owners[owner or "cuda"], method, _behind, then)
        yield


def _behind(function, then):
    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        then(*args, **kwargs)
        return result

    return run


def replaced(stack, where, name, make, *args):
    """Put ``make(function, *args)`` in the place of a function until a stack ends."""
    function = getattr(where, name)
    stack.callback(setattr, where, name, function)
    setattr(where, name, make(function, *args))


def put_in_torch(stack):
    """Give ``torch.cpu`` these streams: FSDP2 asks it for them."""
    doubles = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: streams().current,
        "stream": current,
        "synchronize": lambda device=None: streams().synchronize(),
    }
    for name, double in doubles.items():
        replaced(stack, torch.cpu, name, lambda _, new: new, double)
    # And, where gradients are cast, whatever accelerator there is.
    of_accelerator = torch.accelerator, "current_stream"
    replaced(stack, *of_accelerator, lambda _, new: new, doubles["current_stream"])
