"""Torch's symmetric memory on CPU ranks: one allocator in a process, files that peers map."""

from __future__ import annotations

import os
import time
import weakref

import torch

from doubles.capacity import mapped, mapping_of
from doubles.network import WINDOW, Block, exchanged
from doubles.streams import put, streams, touch
from symmplan.torch_private import c10d as names

_PAD = 2048
_BACKENDS = ("CUDA", "NCCL", "NVSHMEM")


class SymmetricMemory:
    """What replaces `symmplan.torch_private.symm_mem` are its methods.

    Args:
        device: Whose bytes it allocates.
        network: With which NCCL's allocations are registered.

    Attributes:
        name: The allocator.
        used: Whether it has allocated, after which no other can be chosen.
        handles: ``(allocation, group, its handle)`` of all that met; the last held weakly.
    """

    def __init__(self, device, network):
        self.device, self.network = device, network
        self.name, self.used = "CUDA", False
        self._files = []
        self.handles = []
        streams().copied = self._copied

    def _copied(self, target):
        """A copy into a peer's memory is a copy engine's."""
        if any(block.holds(target) for block in self.network.peers):
            self.network.ran("Memcpy PtoP (Device -> Device)", "")

    def backend_of(self, device):
        return self.name

    def set_backend(self, name):
        if name == self.name:
            return
        if self.used:
            self.network.refuse("the symmetric memory backend can't be changed: it was used")
        if name not in _BACKENDS or name == "CUDA":
            self.network.refuse(f"{name} can't be chosen by name")
        self.name = name

    def has_nvshmem(self):
        return False

    def pool(self, device):
        raise AssertionError("symmplan takes nothing from torch's pool")

    def empty(self, nbytes, device, group=None):
        """An allocation; torch's own functional ops name the group for which they want it.

        Raises:
            RuntimeError: The device has not so many bytes, or NCCL's allocator is given a group.
        """
        if self.name == "NCCL" and group is not None:
            self.network.refuse(
                "NCCLSymmetricMemoryAllocator::alloc must not be called with a group_name"
            )
        tensor, file = self.device.map(nbytes)
        self.used = True
        block = Block.of(tensor)
        self._files = [(b, f) for b, f in self._files if b.alive]
        self._files.append((block, file))
        self.network.allocations.append(block)
        return tensor

    def rendezvous(self, tensor, group):
        """The handle of an allocation. Collective.

        Raises:
            RuntimeError: It is no allocation of this allocator, or ranks differ.
        """
        if not isinstance(group, str):
            group = names.group_name(group)
        group = names.group_by_name(group)
        found = [(b, f) for b, f in self._files if b.holds(tensor)]
        if not found:
            self.network.refuse("rendezvous: the tensor is not allocated with symmetric memory")
        ((block, file),) = found
        if self.name == "NCCL":
            communicator = self.network.communicator(group)
            if not communicator.nbytes:
                self.network.refuse("NCCL has no communicator yet: run a collective first")
            self.network.agree(group, [len(communicator.windows), block.nbytes])
            if block not in communicator.windows:
                if not communicator.windows:
                    self.device.take("windows", WINDOW)
                communicator.windows.append(block)
        told = exchanged(group, (os.getpid(), file, block.nbytes, block.begin))
        if any(nbytes != block.nbytes for _, _, nbytes, _ in told):
            self.network.refuse(f"rendezvous: ranks have {[n for _, _, n, _ in told]} bytes")
        own = tensor.view(torch.uint8)
        begin = tensor.data_ptr() - block.begin
        peers = [
            own.new_empty(0).set_(own.untyped_storage(), own.storage_offset() - begin, (n,))
            if r == group.rank()
            else mapping_of(process, there, n)
            for r, (process, there, n, _) in enumerate(told)
        ]
        alive = [block for block in self.network.peers if block.alive]
        others = [Block.of(p) for r, p in enumerate(peers) if r != group.rank()]
        self.network.peers = alive + others
        channels = _PAD // (4 * group.size())
        barriers = {n: _Barrier(self.device, group) for n in sorted({0, 1, channels - 1})}
        exchanged(group, "mapped")
        handle = Handle(self.name, group, peers, barriers)
        self.handles = [known for known in self.handles if known[0].alive]
        self.handles.append((block, group, weakref.ref(handle)))  # whose bytes end with it
        return handle

    # Kernels.

    def install(self):
        """Give ops of ``symm_mem::`` kernels."""
        self._library = torch.library.Library("symm_mem", "IMPL")
        for name, kernel in (
            ("one_shot_all_reduce", self._one_shot),
            ("two_shot_all_reduce_", self._two_shot),
        ):
            self._library.impl(name, kernel, "CPU", allow_override=True)

    def uninstall(self):
        self._library._destroy()

    def _one_shot(self, tensor, reduce_op, group_name):
        """Each rank adds up all of it, in the order of the ranks."""
        handle = self._met("one_shot_all_reduce", tensor, reduce_op, group_name)
        made = torch.empty_like(tensor)
        parts = _parts(handle, tensor, 0, tensor.numel())
        self._run("one_shot_all_reduce_kernel", tensor, group_name, handle, parts, [made.view(-1)])
        return made

    def _two_shot(self, tensor, reduce_op, group_name):
        """Each rank adds up its part of it, in the order of the ranks."""
        handle = self._met("two_shot_all_reduce", tensor, reduce_op, group_name)
        part = -(-tensor.numel() // handle.world_size)
        begin = min(part * handle.rank, tensor.numel())
        parts = _parts(handle, tensor, begin, min(part, tensor.numel() - begin))
        name = "two_shot_all_reduce_kernel_inplace"
        self._run(name, tensor, group_name, handle, parts, parts)
        return tensor

    def _met(self, what, tensor, reduce_op, group_name):
        """The handle of the allocation of a tensor that a kernel takes."""
        group = names.group_by_name(group_name)
        if not tensor.is_contiguous():
            self.network.refuse(f"{what}: input must be contiguous")
        if reduce_op != "sum":
            self.network.refuse(f"{what}: only sum is supported for now")
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            self.network.refuse(f'"{what}" not implemented for {tensor.dtype}')
        if tensor.numel() * tensor.itemsize % 4:
            self.network.refuse(f"{what}: input size must be at least 4-byte aligned")
        met = [handle() for b, g, handle in self.handles if g is group and b.holds(tensor)]
        if self.name != "CUDA" or not any(met):
            self.network.refuse(f"{what}: a rendezvous in the middle of a step, or none")
        return met[-1]

    def _run(self, name, tensor, group_name, handle, parts, targets):
        """The parts of all ranks are added up between two barriers."""

        def add():
            total = parts[0].clone()
            for other in parts[1:]:
                total += other
            for target in targets:
                put(target, total)

        stream = streams().current
        touch(tensor, name, writes=targets is parts, stream=stream)
        self.network.ran(name, group_name)
        handle.barrier()
        stream.queue(add)
        handle.barrier()


def _parts(handle, tensor, begin, count):
    """Elements of a tensor on each rank: kernels count from where its storage begins, wherever that
    is in the allocation.
    """
    first = tensor.storage_offset() + begin
    ranks = range(handle.world_size)
    return [handle.get_buffer(r, (count,), tensor.dtype, first) for r in ranks]


class Handle:
    """Of an allocation in a group.

    Args:
        name: Of the allocator.
        group: The group.
        peers: Each rank's bytes.
        barriers: ``{channel: its barrier}`` of the first two and the last.

    Attributes:
        signal_pad_size: In bytes.
        met: The channels on which ranks met.
    """

    signal_pad_size = _PAD

    def __init__(self, name, group, peers, barriers):
        self._name, self._peers, self._barriers = name, peers, barriers
        self.met = set()
        self.rank, self.world_size = group.rank(), group.size()

    def get_buffer(self, place, shape, dtype, begin=0):
        """A view of a peer's bytes, from an element on, as torch counts."""
        flat = self._peers[place].view(dtype)
        count = 1
        for extent in shape:
            count *= extent
        return flat[begin : begin + count].view(tuple(shape))

    def barrier(self, channel=0, timeout_ms=0):
        """In the order of the current stream; NCCL's handles have none."""
        if self._name != "CUDA":
            raise RuntimeError("NYI: NCCL's symmetric memory has no barrier")
        self.met.add(channel)
        self._barriers[channel].meet(timeout_ms or 60_000)


class _Barrier:
    """Words in memory that all ranks map: how often each has arrived."""

    def __init__(self, device, group):
        self._rank = group.rank()
        mine, file = mapped(8)
        self._kept = mine
        told = exchanged(group, (os.getpid(), file))
        self._words = [
            (mine if r == self._rank else mapping_of(process, there, 8)).view(torch.int64)
            for r, (process, there) in enumerate(told)
        ]
        exchanged(group, "mapped")
        self._count = 0

    def meet(self, timeout_ms):
        """What was queued before is done when peers see this rank; the stream waits for them."""
        stream = streams().current
        stream.run(stream.queued)
        self._count += 1
        count = self._count
        put(self._words[self._rank], torch.tensor([count]))

        def wait():
            end = time.monotonic() + timeout_ms / 1000
            while any(int(word) < count for word in self._words):
                if time.monotonic() > end:
                    raise RuntimeError("CUDA error: a barrier of symmetric memory timed out")
                time.sleep(0.0002)

        stream.queue(wait)
