"""A device with a capacity: what its driver gives, and torch's caching allocator on top of it.

Tensors of the program are counted inside `counted`, where each op is looked at.
"""

from __future__ import annotations

import os
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from doubles.streams import streams

MiB = 1 << 20


class Device:
    """Bytes of a device.

    Args:
        total: All of them.
        had: Those that the allocator has kept of what the program did before.

    Attributes:
        total: All of them.
        taken: ``{cause: bytes}`` of what neither torch's allocator nor segments have.
        most_reserved: The most that the allocator had.
        most_allocated: The most of these that tensors had.
        retries: How often the allocator emptied its cache to have more.
    """

    def __init__(self, total=80 << 30, had=0):
        self.total = total
        self.taken = {}
        self._cached = self.most_reserved = self.most_allocated = had
        self._last = self.retries = self.allocations = 0
        # ``(block, its bytes now, stream)`` of tensors as they came, were resized and went.
        self.history = []
        self._direct, self._counted, self._sizes = [], {}, {}
        # Mappings of segments.
        self._mappings = []

    @property
    def segments(self):
        """Bytes of allocations of symmetric memory, which the allocator does not have."""
        self._direct = [(alive, n) for alive, n in self._direct if alive()]
        return sum(n for _, n in self._direct)

    @property
    def cached(self):
        """Bytes that the allocator keeps for later."""
        self.allocated  # noqa: B018 - what is gone is cached
        return self._cached

    @property
    def allocated(self):
        """Bytes of tensors."""
        now = self._tensors()
        self.most_allocated = max(self.most_allocated, now)
        return now

    @property
    def reserved(self):
        return self._reserved(self.allocated)

    def _reserved(self, allocated):
        now = allocated + self._cached
        self.most_reserved = max(self.most_reserved, now)
        return now

    @property
    def free(self):
        """Free bytes, by the driver."""
        return self._free(self.reserved)

    def _free(self, reserved):
        return self.total - sum(self.taken.values()) - self.segments - reserved

    def take(self, cause, nbytes):
        """Bytes beyond segments.

        Raises:
            RuntimeError: There are not so many.
        """
        if nbytes > self.free:
            raise RuntimeError(f"CUDA error: out of memory ({cause})")
        self.taken[cause] = self.taken.get(cause, 0) + nbytes

    def give(self, cause, nbytes):
        self.taken[cause] -= nbytes

    def empty_cache(self):
        _refuse_capture()
        self.reserved  # noqa: B018 - the most so far
        self._cached = 0

    def map(self, nbytes):
        """Bytes that peers can map, from the driver: ``(tensor, descriptor of their file)``.

        Raises:
            RuntimeError: There are not so many.
        """
        _refuse_capture()
        if nbytes > self.free:
            raise RuntimeError("CUDA driver error: out of memory")
        tensor, file = mapped(nbytes)
        self._direct.append((_alive(tensor), nbytes))
        return tensor, file

    def count(self, tensor):
        """A tensor of the program has been made."""
        storage = tensor.untyped_storage()
        allocated = self.allocated  # what is gone may have been where this one is
        if storage._cdata in self._counted or not storage.nbytes():
            return
        if self._lies_in_another(storage):
            return
        self._reserve(storage.nbytes(), self._reserved(allocated))
        self._counted[storage._cdata] = weakref.ref(storage)
        self._sizes[storage._cdata] = 0  # as it had none before
        self.reserved  # noqa: B018 - the most so far

    def mapped(self, storage):
        """A storage is a mapping of a segment, which the allocator does not have."""
        self._mappings.append(weakref.ref(storage))

    def _lies_in_another(self, storage):
        """Whether its bytes are those of a mapping, or of a storage that is counted already."""
        self._mappings = [mapping for mapping in self._mappings if mapping() is not None]
        begin = _address(storage)
        others = (other() for other in (*self._mappings, *self._counted.values()))
        return any(
            other is not None and 0 <= begin - _address(other) < other.nbytes() for other in others
        )

    def _reserve(self, nbytes, reserved):
        free = self._free(reserved)
        more = 0 if nbytes <= self._cached else nbytes
        if more > free:
            self.retries += 1
            free += self._cached
            self._cached = 0
        if more > free:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes} bytes, {free} are free, "
                f"{reserved} are reserved."
            )
        if not more:
            self._cached -= nbytes

    def _tensors(self):
        now = 0
        for key, storage in tuple(self._counted.items()):
            alive = storage()
            nbytes = 0 if alive is None else alive.nbytes()
            if nbytes != self._sizes[key]:
                self._sizes[key] = nbytes
                self.allocations += nbytes > 0
                self.history.append((key, nbytes, streams().current.cuda_stream))
            if alive is None:
                del self._counted[key]
            now += nbytes
        gone, self._last = self._last - now, now
        self._cached += max(0, gone)
        return now


class Counted(TorchDispatchMode):
    """Counts the tensors that ops make inside."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if op is torch.ops.aten.from_file.default:
            self._device.mapped(result.untyped_storage())
            return result
        for value in tree_leaves(result):
            if type(value) is torch.Tensor and value.device.type == "cpu":
                self._device.count(value)
        return result


def mapped(nbytes):
    """``(tensor, descriptor)`` of new bytes without a name, that other processes can map."""
    file = os.memfd_create("double")
    os.ftruncate(file, max(nbytes, 1))
    tensor = _of_file(f"/proc/self/fd/{file}", nbytes)
    weakref.finalize(tensor.untyped_storage(), os.close, file).atexit = False
    return tensor, file


def mapping_of(process, file, nbytes):
    """The bytes that another process has `mapped`."""
    return _of_file(f"/proc/{process}/fd/{file}", nbytes)


def _of_file(path, nbytes):
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def _alive(tensor):
    """A function that says whether a tensor's bytes are there: their address in torch, or None."""
    storage = tensor.untyped_storage()
    weak, number = weakref.ref(storage), storage._cdata
    return lambda: None if weak() is None else number


def _address(storage):
    """Where a storage's bytes are; 0 if it has none."""
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0


def _refuse_capture():
    if streams().current.capture:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing (malloc)")
