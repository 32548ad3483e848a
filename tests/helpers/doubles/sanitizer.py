"""Finds accesses of the same bytes, one of them a write, that no stream or event orders.

Each stream has a vector clock. It counts the events that were recorded on it (its own component),
and knows for each other stream up to which of these it has waited. An access that another stream
does not know of is not ordered before what that stream is given next. So a wait that is missing
shows whatever ran first, also of the default stream, whose work runs at once.

Seen are the ops that Python's modes see, collectives, and copies of one launch: all their accesses
of segments, and of other memory what reads a tensor before the stream that wrote it last.
"""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import torch
from attrs import frozen
from torch.utils._python_dispatch import TorchDispatchMode

from symmplan.process import PROCESS

_HERE = str(Path(__file__).parent)
#: Ops that access nothing, though their schema does not say so.
_NOTHING = ("_reshape_alias", "record_stream", "set_", "resize_", "wait_tensor")
_NOTHING += ("_wrap_tensor_autograd",)


@frozen
class Access:
    """Bytes that work on a stream reads or writes: addresses in a segment, or all of a tensor."""

    begin: int
    end: int
    stream: object
    writes: bool
    op: str
    line: str


class Sanitizer(TorchDispatchMode):
    """Looks for races while it is active.

    Attributes:
        races: ``(earlier access, later access)`` that nothing orders.
    """

    def __init__(self, streams):
        super().__init__()
        self.races = []
        self._streams = streams
        #: ``{access: its stream's component}``, of those that lie in segments.
        self._accesses = {}
        #: ``{id of a storage outside of segments: (the storage, its last write, its component)}``.
        self._written = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.saw(op, args, kwargs or {})
        result = op(*args, **kwargs or {})
        if not getattr(op, "is_view", False) and op.namespace == "aten":
            for tensor in tensors_in(result):
                self.touch(tensor, op._schema.name, writes=True)
        return result

    def saw(self, op, args, kwargs):
        """The current stream is given an op."""
        schema = op._schema
        if getattr(op, "is_view", False) or schema.name.partition("::")[2] in _NOTHING:
            return
        named = {a.name: a for a in schema.arguments}
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(named[name], value) for name, value in kwargs.items()]
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(value):
                self.touch(tensor, schema.name, writes=writes)

    def touch(self, tensor, op, *, writes, stream=None):
        """A stream, the current one if None, is given work that accesses a tensor."""
        if tensor.numel() == 0 or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return
        stream = self._streams.current if stream is None else stream
        extent = _extent(tensor)
        if extent is None:
            self._ordinary(tensor.untyped_storage(), op, stream, writes=writes)
            return
        new = Access(*extent, stream, writes, op, _line())
        for old, at in self._accesses.items():
            apart = old.end <= new.begin or new.end <= old.begin
            if not apart and (old.writes or writes):
                self._compare(old, at, new)
        self._accesses[new] = stream.clock[stream]

    def _ordinary(self, storage, op, stream, *, writes):
        """The same of memory outside of segments, which is new for each tensor."""
        new = Access(0, storage.nbytes(), stream, writes, op, _line())
        kept, old, at = self._written.get(storage._cdata, (None, None, 0))
        if kept is not None and kept() is storage:
            self._compare(old, at, new)
        if writes:
            self._written[storage._cdata] = weakref.ref(storage), new, stream.clock[stream]

    def _compare(self, old, at, new):
        known = max(new.stream.clock.get(old.stream, 0), self._streams.host.get(old.stream, 0))
        if old.stream is not new.stream and at > known:
            self.races.append((old, new))


def tensors_in(value):
    """The tensors of an argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_in(v)]
    return []


def _extent(tensor):
    """The addresses of a tensor's bytes; None if they lie in no segment of this process."""
    begin = tensor.data_ptr()
    for segment in PROCESS.segments:
        start = segment.tensor.data_ptr()
        if start <= begin < start + segment.nbytes:
            spans = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((n - 1) * stride for n, stride in spans)
            return begin, begin + (last + 1) * tensor.element_size()
    return None


def _line():
    """Where the work is issued: the innermost line that is neither torch's nor a double's."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, "<")) and "/torch/" not in name:
            return f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
