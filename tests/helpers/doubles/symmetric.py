"""Torch's symmetric memory on CPU ranks: one allocator in a process, files that peers map."""

from __future__ import annotations

import os
import time

import torch

from doubles.capacity import mapped, mapping_of
from doubles.network import WINDOW, Block, exchanged
from doubles.streams import put, streams
from symmplan.torch_private import c10d as names

_BACKENDS = ("CUDA", "NCCL", "NVSHMEM")


class SymmetricMemory:
    """What replaces `symmplan.torch_private.symm_mem` are its methods.

    Args:
        device: Whose bytes it allocates.
        network: With which NCCL's allocations are registered.

    Attributes:
        name: The allocator.
        used: Whether it has allocated, after which no other can be chosen.
    """

    def __init__(self, device, network):
        self.device, self.network = device, network
        self.name, self.used = "CUDA", False
        self._files = []
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
        barriers = [_Barrier(self.device, group) for _ in range(2)]
        exchanged(group, "mapped")
        return Handle(self.name, group, peers, barriers)


class Handle:
    """Of an allocation in a group.

    Args:
        name: Of the allocator.
        group: The group.
        peers: Each rank's bytes.
        barriers: One of each channel.
    """

    def __init__(self, name, group, peers, barriers):
        self._name, self._peers, self._barriers = name, peers, barriers
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
