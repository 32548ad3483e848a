"""NCCL on CPU ranks: gloo moves the bytes. Communicators, their policy, their windows.

All collectives of process groups reach ops of ``c10d::``, which have kernels here meanwhile. Such a
kernel runs what its stream has queued, starts gloo into other memory, and lets the stream copy the
result when somebody waits for it.
"""

from __future__ import annotations

import itertools
import os
import warnings
import weakref

import torch
import torch.distributed as dist
from attrs import define, field

from doubles.capacity import mapping_of
from doubles.gloo import RUNS, reduction_of
from doubles.streams import Event, Stream, join, put, streams, touch
from symmplan.place.collectives import NCCL
from symmplan.torch_private import c10d as names
from symmplan.torch_private.nccl import name_of

MiB = 1 << 20
CPU = torch.device("cpu")
#: Bytes of a device that a communicator takes when it is first used, by whether it is restricted to
#: one channel; and for its first window, until it ends.
BYTES, RESTRICTED, WINDOW = 466 * MiB, 22 * MiB, 40 * MiB


@define(eq=False)
class Communicator:
    """A process group's.

    Attributes:
        engines: Whether its policy asks for copy engines.
        restricted: Whether it has one channel.
        stream: On which its asynchronous collectives run.
        windows: The memory that is registered with it, at its place.
        nbytes: What it has taken of the device.
    """

    engines: bool = False
    restricted: bool = False
    stream: object = None
    windows: list = field(factory=list)
    nbytes: int = 0


@define(eq=False)
class Block:
    """An allocation: where its bytes are, as long as they are."""

    begin: int
    nbytes: int
    storage: object

    @classmethod
    def of(cls, tensor):
        return cls(tensor.data_ptr(), tensor.nbytes, weakref.ref(tensor.untyped_storage()))

    @property
    def alive(self):
        return self.storage() is not None

    def holds(self, tensor):
        return self.alive and self.begin <= tensor.data_ptr() < self.begin + self.nbytes


class Network:
    """The communicators of a process, and NCCL's memory.

    What replaces `symmplan.torch_private.nccl` and `symmplan.torch_private.peers` are its methods.

    Attributes:
        device: Of which they take bytes.
        version_: Of NCCL.
        kernels: ``(name, group)`` of what has run, as a profile names it.
        without: Names of process groups that have no communicator.
        refused: What was refused, also where that was caught.
    """

    def __init__(self, device, version=(2, 28, 9)):
        self.device = device
        self.version_ = version
        self.kernels, self.without, self.refused = [], set(), []
        #: Allocations that can be registered, which are no ordinary memory: of torch's, too.
        self.allocations = []
        #: Its own among them; and what this process has mapped of its peers.
        self._files, self.peers = [], []
        self._of, self._made = weakref.WeakKeyDictionary(), []
        self._works, self._numbers = [], itertools.count()
        self._library = None

    # What replaces `symmplan.torch_private.nccl`.

    def version(self):
        return self.version_

    def serves(self, group):
        return names.group_name(group) not in self.without

    def has_copy_engine_policy(self):
        return self.version_ >= (2, 28)

    def copy_engine_options(self):
        raise AssertionError("gloo has no such options: copy_engine_group makes such groups")

    name_of = staticmethod(name_of)

    def subgroup(self, like, ranks, what, number):
        limit = like._get_backend(CPU).options._timeout
        group = names.new_group(name_of(what, ranks), ranks, number, "gloo", limit, what)
        self._made.append(group)
        self.communicator(group)
        return group

    def copy_engine_group(self, like, what, number):
        group = self.subgroup(like, dist.get_process_group_ranks(like), what, number)
        found = self.communicator(group)
        found.engines = found.restricted = True
        self.used(group)
        return group

    def end(self, group):
        """End a communicator, of which no windows are left.

        Raises:
            RuntimeError: It has some.
        """
        found = self._of.pop(group)
        if any(found.windows):
            self.refuse("NCCL error: invalid usage: windows are registered with the communicator")
        self.device.give("communicators", found.nbytes)
        if found.windows:
            self.device.give("windows", WINDOW)
        self._made.remove(group)
        dist.destroy_process_group(group)

    @property
    def windows(self):
        """How many windows there are."""
        return sum(w is not None for of in self._of.values() for w in of.windows)

    registers_windows = staticmethod(lambda _: True)

    def allocate(self, nbytes, device):
        """An allocation that can be registered, and that peers can map; see `share`.

        Raises:
            RuntimeError: The device has not so many bytes.
        """
        tensor, file = self.device.map(nbytes)
        block = Block.of(tensor)
        self._files = [(b, f) for b, f in self._files if b.alive]
        self._files.append((block, file))
        self.allocations.append(block)
        return tensor

    def register(self, tensor, group):
        """A window.

        Raises:
            RuntimeError: The memory is not NCCL's, the communicator has it already, the device is
                full, or another rank registers other memory, or has other windows.
        """
        found = self.used(group)
        block = self._own(tensor)
        if block is None or block.begin != tensor.data_ptr():
            self.refuse("NCCL error: invalid argument: the memory is not NCCL's")
        if block in found.windows:
            self.refuse("NCCL error: invalid usage: the memory is registered already")
        self.agree(group, [block.nbytes, *(n for n, w in enumerate(found.windows) if w)])
        if not found.windows:
            self.device.take("windows", WINDOW)
        place = found.windows.index(None) if None in found.windows else len(found.windows)
        found.windows[place : place + 1] = [block]
        return place + 1

    def deregister(self, window, group):
        """Take it back.

        Raises:
            RuntimeError: The communicator does not have it.
        """
        found = self.communicator(group)
        if not 0 < window <= len(found.windows) or found.windows[window - 1] is None:
            self.refuse("NCCL error: invalid usage: there is no such window")
        found.windows[window - 1] = None

    # What replaces `symmplan.torch_private.peers`.

    def can_map(self):
        return True

    def share(self, tensor):
        """A descriptor of an allocation, its bytes, and where the tensor begins.

        Raises:
            RuntimeError: It is no allocation of NCCL's.
        """
        block = self._own(tensor)
        if block is None:
            self.refuse("CUDA driver error: CUDA_ERROR_INVALID_VALUE: it cannot be exported")
        (file,) = (f for b, f in self._files if b is block)
        return os.dup(file), block.nbytes, tensor.data_ptr() - block.begin

    def mapped(self, file, nbytes, device):
        """The bytes that another process shares."""
        tensor = mapping_of(os.getpid(), file, nbytes)
        self.peers = [block for block in self.peers if block.alive] + [Block.of(tensor)]
        return tensor

    def tensor_at(self, *given):
        raise AssertionError("doubles have no addresses")

    def _own(self, tensor):
        return next((b for b, _ in self._files if b.holds(tensor)), None)

    # The communicators.

    def communicator(self, group):
        if group not in self._of:
            self._of[group] = Communicator(stream=Stream())
        return self._of[group]

    def used(self, group):
        """A communicator that is connected from now on, and has its bytes."""
        found = self.communicator(group)
        if not found.nbytes:
            nbytes = RESTRICTED if found.restricted else BYTES
            self.device.take("communicators", nbytes)
            found.nbytes = nbytes
        return found

    def refuse(self, what):
        self.refused.append(what)
        raise RuntimeError(what)

    def agree(self, group, said):
        """Let each rank of a group say something, which must be the same. Collective."""
        told = exchanged(group, said)
        if any(other != said for other in told):
            self.refuse(f"NCCL error: ranks register different windows: {told}")

    # Collectives.

    def install(self):
        """Give ops of ``c10d::`` kernels."""
        self._library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there were others, which come back
            for name, (kind, run) in RUNS.items():
                schema = getattr(torch.ops.c10d, name).default._schema
                kernel = self._kernel(schema, kind, run)
                self._library.impl(name, kernel, "CPU", allow_override=True)

    def uninstall(self):
        self._library._destroy()
        for group in filter(names.is_registered, self._made):  # others may have their names
            dist.destroy_process_group(group)

    def _kernel(self, schema, kind, run):
        def kernel(*args, **kwargs):
            given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
            given |= {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
            group = dist.ProcessGroup.unbox(given["process_group"])
            backend = group._get_backend(CPU)
            asynchronous, stream = given.get("async_op", True), streams().current
            found = self.used(group)
            self._name(kind, found, group, _tensors(given), given, asynchronous)
            alike = self._alike(kind, found, group, given)
            stream.run(stream.queued)
            works, copies = run(backend, given)
            where = found.stream if asynchronous else stream
            if asynchronous:
                join(where.clock, Event.now(stream).clock)
            for tensor in _tensors(given):
                touch(tensor, kind, writes=False, stream=where)
            for target, *_ in copies:
                touch(target, kind, writes=True, stream=where)
            where.queue(_end_of(works, copies, alike))
            made = _Work(where, where.queued, works)
            self._works = [*self._works[-500:], made]  # a box does not keep it
            return _returned(schema, given, made)

        return kernel

    def _name(self, kind, found, group, tensors, given, asynchronous):
        """See what runs a collective, and refuse what NCCL refuses."""
        windows = [w for w in found.windows if w is not None and w.alive]
        outside = [t for t in tensors if not any(w.holds(t) for w in windows)]
        inside = bool(tensors) and not outside
        abilities = NCCL.get(kind)
        if found.engines and any(b.holds(t) for b in self.allocations for t in outside):
            self.refuse(f"NCCL error: invalid usage: {kind} of memory that is not registered")
        if found.engines and inside and abilities is not None and abilities.engines:
            if streams().current.is_default and not asynchronous:
                self.refuse("NCCL error: invalid argument: copy engines on the default stream")
            name = "Memcpy PtoP (Device -> Device)"
        elif (
            inside
            and abilities is not None
            and not abilities.why_not(
                self.version_, str(tensors[0].dtype)[6:], reduction_of(given) or ""
            )
        ):
            name = f"ncclSymkDevKernel_{kind}"
        else:
            name = f"ncclDevKernel_{kind}"
        self.ran(name, names.group_name(group))

    def _alike(self, kind, found, group, given):
        """What refuses a collective, once it is over, that on devices would never be.

        All of its tensors lie in windows on all ranks or on none. Of an all-to-all no tensor does
        on any rank, or all do on all of them, and all ranks give sizes or none does. Who sends or
        receives here does not see the other end: neither may lie in a window.
        """
        windows = [w for w in found.windows if w is not None and w.alive]
        if not windows:
            return lambda: None
        tensors = [t for t in _tensors(given) if t.nbytes]
        inside = sum(any(w.holds(t) for w in windows) for t in tensors)
        if kind == "send":
            if inside:
                self.refuse("NCCL waits for ever: one end of a send lies in a window")
            return lambda: None
        apart = len(tensors) - inside
        mine = [inside > 0 and not apart, None, None]
        if kind == "all-to-all":
            mine = [inside > 0, apart > 0, bool(given["input_split_sizes"])]
        told = telling(group, mine)

        def refuse():
            several = told()
            whole, some, _ = zip(*several, strict=True)
            mixed = any(len({*said}) > 1 for said in zip(*several, strict=True))
            if kind == "all-to-all":
                mixed = (any(whole) and any(some)) or len({sizes for *_, sizes in several}) > 1
            if mixed:
                self.refuse(f"NCCL waits for ever: the ranks' {kind} differs: {several}")

        return refuse

    def ran(self, name, group):
        """Something runs on the device, also in a profile."""
        self.kernels.append((name, group))
        for event in ("cudaLaunchKernel", f"{DEVICE_EVENT}{name}"):
            with torch._C._profiler._RecordFunctionFast(event):  # no annotation
                pass


#: How events of the double begin in a profile.
DEVICE_EVENT = "on the device: "


class _Work(dist.Work):
    """Of a collective; who waits lets the current stream wait."""

    def __init__(self, stream, at, works):
        super().__init__()
        self._stream, self._at, self._works = stream, at, works
        self._event = Event.now(stream)

    def wait(self, timeout=None):
        stream, at = self._stream, self._at
        if streams().current is not stream:
            join(streams().current.clock, self._event.clock)
            streams().current.queue(lambda: stream.run(at))
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        reached = self._stream.done >= self._at
        if not reached and all(work.is_completed() for work in self._works):
            self._stream.run(self._at)
        return reached

    def is_success(self):
        return True

    def get_future(self):
        self.wait()
        future = torch.futures.Future()
        future.set_result([])
        return future


def _end_of(works, copies, alike):
    """What ends a collective: gloo is done, and its results are where they belong."""

    def done():
        for work in works:
            work.wait()
        works.clear()  # they hold their tensors
        alike()
        for target, source, divisor in copies:
            if divisor > 1:
                source.div_(divisor)
            put(target, source)

    return done


def _tensors(given):
    """Those of a collective."""
    found, left = [], [v for n, v in given.items() if n != "sparse_indices"]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            left += value
    return found


def _returned(schema, given, work):
    """What an op returns: what it was given to write, if it has that, and its work."""
    boxed = work.boxed()
    if len(schema.returns) == 1:
        return boxed
    return given[schema.arguments[0].name], boxed


_EXCHANGES = weakref.WeakKeyDictionary()


def exchanged(group, said):
    """What each rank of a group says, in its order. Collective."""
    return telling(group, said)()


def telling(group, said):
    """Say something to a group's ranks, through its store; what gives what all of them say."""
    number = _EXCHANGES[group] = _EXCHANGES.get(group, 0) + 1
    store, rank = names.group_store(group), group.rank()
    store.set(f"doubles/{number}/{rank}", repr(said))

    def told():
        return [
            eval(store.get(f"doubles/{number}/{r}").decode(), {"__builtins__": {}})
            for r in range(group.size())
        ]

    return told
